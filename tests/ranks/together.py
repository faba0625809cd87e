"""Ranks as forks of this process: functions that run on several ranks at once, over gloo.

A fork has imported torch already. Each rank is a process of its own, with its own memory and sockets.
"""

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from holdfast.engine.ranks.group import RankGroup, join_gloo
from holdfast.models.ranks import Ranks

SECONDS = 60.0


def run_ranks(size: int, work: Callable[[RankGroup], dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Run a function on `size` ranks; what each of them returned."""
    with TemporaryDirectory() as folder:
        children = []
        for rank in range(size):
            sys.stdout.flush()
            child = os.fork()
            if child == 0:
                _be_rank(Path(folder), Ranks(rank, size), work)
            children.append(child)
        statuses = [os.waitpid(child, 0)[1] for child in children]
        assert statuses == [0] * size, f"ranks ended with {statuses}"
        return [load_file(Path(folder) / f"{rank}.safetensors") for rank in range(size)]


def _be_rank(folder: Path, ranks: Ranks, work: Callable[[RankGroup], dict[str, Tensor]]) -> None:
    status = 1
    try:
        torch.set_num_threads(1)
        found = work(join_gloo(folder / "meeting", ranks, SECONDS))
        save_file(found, folder / f"{ranks.rank}.safetensors")
        status = 0
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        os._exit(status)


class Alone:
    """A rank that only loads."""

    ranks = Ranks(0, 2)

    def sum(self, x: Tensor) -> Tensor:
        raise AssertionError(x)

    def gather(self, x: Tensor) -> Tensor:
        raise AssertionError(x)

    def broadcast(self, x: Tensor) -> None:
        raise AssertionError(x)
