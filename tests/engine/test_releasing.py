"""What is large is given back to the system by another thread; its name is free at once."""

import os
import threading
from pathlib import Path

import pytest
import torch

from holdfast.engine.tiers import releasing
from holdfast.engine.tiers.releasing import release_tensors, remove_file


class Closing:
    """Notes which threads close descriptors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by: list[int] = []
        self.closed = threading.Event()
        self._close = os.close
        monkeypatch.setattr(os, "close", self)

    def __call__(self, descriptor: int) -> None:
        self._close(descriptor)
        self.by.append(threading.get_ident())
        self.closed.set()


@pytest.mark.parametrize("large", [False, True])
def test_a_file_is_gone_at_once_and_its_content_is_released_by_a_thread_if_it_is_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    monkeypatch.setattr(releasing, "LARGE_BYTES", 100)
    path = tmp_path / "file"
    path.write_bytes(b"x" * (100 if large else 99))
    closing = Closing(monkeypatch)
    remove_file(path)
    assert not path.exists()
    assert closing.closed.wait(60)
    assert [by == threading.get_ident() for by in closing.by] == [not large]
    remove_file(path)
    path.mkdir()
    with pytest.raises(OSError, match=r"directory|permitted"):
        remove_file(path)


def no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_without_a_thread_what_is_large_is_released_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releasing, "LARGE_BYTES", 0)
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    tensors = {"a": [torch.zeros(1)]}
    release_tensors(tensors)
    assert not tensors


@pytest.mark.parametrize("large", [False, True])
def test_tensors_are_released_by_a_thread_if_they_are_large(
    monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    monkeypatch.setattr(releasing, "LARGE_BYTES", 100)
    by: list[int] = []
    cleared = threading.Event()

    class Noting(dict[str, list[torch.Tensor]]):
        def clear(self) -> None:
            by.append(threading.get_ident())
            super().clear()
            cleared.set()

    tensors = Noting(a=[torch.zeros(20), torch.zeros(5 if large else 4)])
    release_tensors(tensors)
    assert cleared.wait(60) and not tensors
    assert [each == threading.get_ident() for each in by] == [not large]
