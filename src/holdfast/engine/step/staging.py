"""Transfers between host and device in a step: words in, tokens out.

Neither direction blocks. Words lie in pinned memory that is reused once the device has read it; tokens arrive
in pinned memory, and `tokens` waits for them. Kernels do both transfers: copy engines have more latency. On a
CPU there is no transfer. Used by the executor.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from holdfast import kernels
from holdfast.engine.step.inputs import Words
from holdfast.models.memory import Memory


class Arrival:
    """Tokens on their way to the host."""

    __slots__ = ("_event", "_tokens")

    def __init__(self, tokens: Tensor, event: torch.cuda.Event | None) -> None:
        self._tokens = tokens
        self._event = event

    @property
    def arrived(self) -> bool:
        """Whether the tokens have come."""
        return self._event is None or self._event.query()

    def synchronize(self) -> None:
        """Wait until the tokens have come."""
        if self._event is not None:
            self._event.synchronize()

    def wait(self) -> list[int]:
        """Wait for the tokens and return them."""
        self.synchronize()
        tokens: list[int] = self._tokens.tolist()
        return tokens


class _Buffer:
    """Pinned words, and the event after which the device has read them."""

    __slots__ = ("read", "words")

    def __init__(self, size: int) -> None:
        self.words = torch.zeros(size, dtype=torch.int32, pin_memory=True)
        self.read = torch.cuda.Event()


class Staging:
    """The staging buffers of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned = device.type == "cuda"
        self._buffers: list[_Buffer] = []
        self._taken: _Buffer | None = None
        self._arriving: list[tuple[Tensor, torch.cuda.Event]] = []

    def pin(self, memory: Memory | None) -> None:
        """Register a host tier's memory with the device (pinning), so that moves are asynchronous.

        It is unregistered when this object is finalised, before the tier's memory is freed.
        """
        if memory is None or not self._pinned:
            return
        storages = [
            storage
            for component in ("full", "window", "state")
            for storage in memory.storage(component)
            if storage.numel()
        ]
        for storage in storages:
            address = storage.data_ptr()
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, storage.nbytes, 0))
        # At process exit the system unregisters everything.
        weakref.finalize(self, _unpin, storages).atexit = False  # type: ignore[misc]

    def words(self, size: int) -> Tensor:
        """Words to fill in for the next `send`, int32 on the host."""
        if not self._pinned:
            return torch.zeros(size, dtype=torch.int32)
        found = next(
            (each for each in self._buffers if each.words.numel() >= size and each.read.query()), None
        )
        if found is None:
            found = _Buffer(max(4096, 1 << (size - 1).bit_length()))
            self._buffers.append(found)
        self._taken = found
        return found.words[:size]

    def send(self, words: Tensor, target: Tensor | None) -> Tensor:
        """Copy filled-in words to the device: to the front of `target`, or to a new tensor."""
        if target is None:
            if not self._pinned:
                return words
            target = torch.empty_like(words, device=self._device)
        kernels.carry(words, target[: words.numel()])
        if self._taken is not None:
            self._taken.read.record()
            self._taken = None
        return target

    def fetch(self, tokens: Tensor) -> Arrival:
        """Copy tokens to the host."""
        if not self._pinned:
            return Arrival(tokens.clone(), None)
        arrived = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        kernels.carry(tokens, arrived)
        event = torch.cuda.Event()
        event.record()
        # The allocator does not know that a kernel writes there, and not every caller waits.
        self._arriving = [(each, written) for each, written in self._arriving if not written.query()]
        self._arriving.append((arrived, event))
        return Arrival(arrived, event)


def _unpin(storages: list[Tensor]) -> None:
    """Unregister a tier's memory, which still exists."""
    for storage in storages:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(storage.data_ptr()))


def fill(words: Tensor) -> Words:
    """The words as a NumPy array, which Python fills faster."""
    array: Words = words.numpy()
    return array
