"""The sockets of gloo: open while ranks connect to each other, and to nobody afterwards."""

import os
import socket
import sys
from pathlib import Path

import pytest
import torch

from holdfast.engine.ranks import group
from holdfast.models.ranks import Ranks


def port_of(descriptor: int) -> tuple[str, int]:
    with socket.socket(fileno=os.dup(descriptor)) as listener:
        host, port = listener.getsockname()
        return host, port


@pytest.mark.skipif(sys.platform != "linux", reason="filters of sockets are Linux's")
def test_nobody_connects_to_a_rank_once_the_ranks_are_connected(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        before = set(group._listeners())
        assert other.fileno() in before
        joined = group.join_gloo(tmp_path / "meeting", Ranks(0, 1), 30.0, alone_too=True)
        (listener,) = set(group._listeners()) - before
        host, port = port_of(listener)
        assert host == "127.0.0.1", "nothing from other machines"
        with pytest.raises(TimeoutError):
            socket.create_connection((host, port), timeout=0.2)
        socket.create_connection(other.getsockname(), timeout=30).close()
    assert joined.sum(torch.ones(2)).tolist() == [1.0, 1.0]
    joined.close()
