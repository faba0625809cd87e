"""What passes between the host and the device in a step: words on the way in, tokens on the way out.

Neither direction waits. Words lie in pinned memory that is used again once the device has read it; tokens
arrive in pinned memory, which is kept until they have, and are waited for when somebody needs them. Kernels
carry both: copy engines take longer to begin. On a CPU there is nothing to carry. Used by the executor.
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

    def wait(self) -> list[int]:
        """The tokens, once they are there."""
        if self._event is not None:
            self._event.synchronize()
        tokens: list[int] = self._tokens.tolist()
        return tokens


class _Buffer:
    """Pinned words, and when the device will have read them."""

    __slots__ = ("read", "words")

    def __init__(self, size: int) -> None:
        self.words = torch.zeros(size, dtype=torch.int32, pin_memory=True)
        self.read = torch.cuda.Event()


class Staging:
    """The way to one device and back."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned = device.type == "cuda"
        self._buffers: list[_Buffer] = []
        self._taken: _Buffer | None = None
        self._arriving: list[tuple[Tensor, torch.cuda.Event]] = []

    def pin(self, memory: Memory | None) -> None:
        """Let the device address a host tier, so that nobody waits for moves.

        It does so until nobody uses this object any more: the tier's memory is given back after that.
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
        # A process that ends gives back everything.
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
        """Bring filled-in words to the device: to the front of `target`, or to a place of their own."""
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
        """Bring tokens to the host."""
        if not self._pinned:
            return Arrival(tokens.clone(), None)
        arrived = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        kernels.carry(tokens, arrived)
        event = torch.cuda.Event()
        event.record()
        # The allocator does not know that a kernel writes there, and not everybody waits for tokens.
        self._arriving = [(each, written) for each, written in self._arriving if not written.query()]
        self._arriving.append((arrived, event))
        return Arrival(arrived, event)


def _unpin(storages: list[Tensor]) -> None:
    """The device forgets the addresses of a tier, whose memory is still there."""
    for storage in storages:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(storage.data_ptr()))


def fill(words: Tensor) -> Words:
    """The words as an array that Python fills quickly."""
    array: Words = words.numpy()
    return array
