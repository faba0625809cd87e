"""What a device is told about host memory is taken back while that memory is still there."""

import gc
import weakref

import pytest
import torch

from holdfast.engine.staging import Staging
from holdfast.models.layout import MemoryShape, PageShape, StateShape
from holdfast.models.memory import Memory, UnitCounts


class Runtime:
    """Stands in for the driver: which addresses it knows."""

    def __init__(self) -> None:
        self.known: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert address not in self.known and flags == 0
        self.known[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.known[address]
        return 0


def test_a_host_tier_is_unpinned_before_its_memory_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    shape = MemoryShape(PageShape(2, 1, 8), None, 0, StateShape(1, 4, 3, 2, 4, 4))
    memory = Memory(shape, UnitCounts(4, 0, 3), 16, torch.float32, torch.device("cpu"))
    sizes = [tensor.nbytes for name in ("full", "state") for tensor in memory.storage(name)]
    released: list[int] = []
    weakref.finalize(memory.storage("full")[0], lambda: released.append(len(runtime.known)))
    staging = Staging(torch.device("cuda"))
    staging.pin(memory)
    assert sorted(runtime.known.values()) == sorted(sizes)
    del memory
    gc.collect()
    assert len(runtime.known) == len(sizes) and not released, "pinned memory stays"
    del staging
    gc.collect()
    assert not runtime.known
    assert released == [0], "the memory went after the device had forgotten it"
