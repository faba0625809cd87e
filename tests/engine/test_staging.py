"""What a device is told about host memory is taken back while that memory is still there."""

import gc
import weakref
from typing import Any

import pytest
import torch

from holdfast.engine.step.staging import Staging
from holdfast.models.layout import MemoryShape, PageShape, StateShape
from holdfast.models.memory import Memory, MemoryTypes, UnitCounts


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
    memory = Memory(shape, UnitCounts(4, 0, 3), 16, MemoryTypes.of(torch.float32), torch.device("cpu"))
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


class Written:
    """Stands in for an event: the device has come to it, or not yet."""

    done = False

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self.done


def test_memory_that_tokens_arrive_in_is_kept_until_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nobody waits for them: the step was void."""
    empty = torch.empty

    def unpinned(*sizes: Any, pin_memory: bool, **given: Any) -> torch.Tensor:
        assert pin_memory
        return empty(*sizes, **given)

    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(torch.cuda, "Event", Written)
    staging = Staging(torch.device("cuda"))
    alive = []
    for token in range(3):
        arrival = staging.fetch(torch.tensor([token, 7]))
        alive.append(weakref.ref(arrival._tokens))
        assert arrival._tokens.tolist() == [token, 7]
        del arrival
    gc.collect()
    assert all(each() is not None for each in alive)
    monkeypatch.setattr(Written, "done", True)
    staging.fetch(torch.tensor([9]))
    gc.collect()
    assert all(each() is None for each in alive)
