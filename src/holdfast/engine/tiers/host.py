"""The host tier: copies of sessions' units between the device and the host's memory, beside the steps.

A copy runs while the steps of other sessions go on: on a GPU on a stream of its own, on a CPU in a thread.
The core is told when it has finished:

    take_finished      between steps: copies that have finished since their plan settled
    fence_abandoned    a plan was made: its launches wait for copies that have been abandoned
    start              the copies of the plan begin, after all earlier launches
    settle             the plan settles: which of its copies have finished, and which are still running

A copy is abandoned when its session is closed, or gets a turn before it has left. It still writes to its
destination, whose units may belong to another session in the very next plan: hence the fence.

Used by the executor and the loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast import kernels
from holdfast.core.layout import Tier
from holdfast.core.plan import TierMove
from holdfast.engine.step.lead import Lead
from holdfast.models.memory import Memory

log = logging.getLogger("holdfast.host_tier")

INLINE_BYTES_MAX = 1 << 20
"""A move of fewer bytes is copied by the calling thread."""
POLL_SECONDS = 0.0002
"""How often a step without work polls the running copies."""


class StorageCopy(NamedTuple):
    """Units of one storage, and their destinations in another."""

    source: Tensor
    sources: list[int]
    target: Tensor
    targets: list[int]


class CopyEvent(Protocol):
    """The end of a move's copies; `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Whether the copies have finished; raises the error of one that failed."""

    def synchronize(self) -> None:
        """Wait until the copies have finished."""


class Copier(Protocol):
    """Runs copies beside the steps."""

    def copy(self, copies: Sequence[StorageCopy]) -> CopyEvent:
        """Begin the copies of one move, after all earlier launches."""

    def fence(self, event: CopyEvent) -> None:
        """Let all later launches begin after an event."""


class HostTier:
    """The copies between a device and its host tier, by the number of their move."""

    def __init__(
        self,
        memory: Memory | None = None,
        host: Memory | None = None,
        copier: Copier | None = None,
        lead: Lead | None = None,
    ) -> None:
        """`lead` tells other ranks, which copy the same units of their own memory."""
        self._lead = lead
        self.copier: Copier = copier if copier is not None else ThreadCopier()
        self._memory = memory
        self._host = host
        self._started: dict[int, CopyEvent] = {}
        """Copies whose plan has not settled."""
        self._running: dict[int, CopyEvent] = {}
        """Copies whose plan has settled and that had not finished by then."""
        self._abandoned: list[CopyEvent] = []
        self.bytes_copied = {Tier.HOST: 0, Tier.DEVICE: 0}
        """Bytes of all copies that were begun, by the tier that they went to."""

    def start(self, moves: Sequence[TierMove]) -> None:
        """Begin the moves of a plan, except those of the disk tier, which begins them itself."""
        copies: dict[int, list[StorageCopy]] = {}
        begun = [move for move in moves if Tier.DISK not in (move.source_tier, move.destination_tier)]
        for move in begun:
            copies.setdefault(move.number, []).extend(self._copies(move))
        if self._lead is not None and begun:
            self._lead.move(begun)
        try:
            for number, each in copies.items():
                self._started[number] = self.copier.copy(each)
        except Exception:
            # Other ranks may have begun what has failed here: what follows waits for it there.
            self._tell_fence(number for number in copies if number not in self._started)
            raise

    def _copies(self, move: TierMove) -> Iterator[StorageCopy]:
        assert self._memory is not None and self._host is not None, "a move needs a device and a host"
        name = move.component.name.lower()
        if move.source_tier is Tier.DEVICE:
            self._memory.settle(name, move.sources)
        else:
            self._memory.overwritten(name, move.destinations)
        for device, host in zip(self._memory.storage(name), self._host.storage(name), strict=True):
            source, target = (device, host) if move.source_tier is Tier.DEVICE else (host, device)
            self.bytes_copied[move.destination_tier] += device[0].nbytes * len(move.sources)
            yield StorageCopy(source, move.sources, target, move.destinations)

    def settle(self, moves: Sequence[TierMove]) -> list[bool | None]:
        """Whether each move of a plan succeeded; None for those that are still running."""
        started = {
            number: self._started.pop(number)
            for number in {move.number for move in moves} & self._started.keys()
        }
        finished = _finished(started)
        self._tell_fence(finished)
        self._running |= {number: event for number, event in started.items() if number not in finished}
        return [finished.get(move.number) if move.number in started else True for move in moves]

    def fence_abandoned(self, wanted: Container[int]) -> None:
        """Abandon every copy whose move is not wanted, and let later launches begin after it."""
        self._abandoned = [event for event in self._abandoned if not _over(event)]
        for events in (self._started, self._running):
            abandoned = [number for number in events if number not in wanted]
            self._tell_fence(abandoned)
            for number in abandoned:
                self.copier.fence(events[number])
                self._abandoned.append(events.pop(number))

    def take_finished(self) -> dict[int, bool]:
        """The moves that have finished since their plan settled, and whether each succeeded."""
        finished = _finished(self._running)
        self._tell_fence(finished)
        for number in finished:
            del self._running[number]
        return finished

    def _tell_fence(self, numbers: Iterable[int]) -> None:
        """The units of these moves may be used from now on: the copies of other ranks may take longer."""
        if self._lead is not None and (ended := list(numbers)):
            self._lead.fence(ended)

    def follow_fence(self, numbers: Iterable[int]) -> None:
        """On another rank: let later launches begin after these moves; raises the error of a failed one."""
        self._abandoned = [event for event in self._abandoned if not _over(event)]
        for number in numbers:
            event = self._started.pop(number, None)
            if event is None:
                continue  # rank 0 failed after it had told of the fence, and tells again
            self.copier.fence(event)
            if not event.query():
                self._abandoned.append(event)

    def complete(self) -> None:
        """On another rank: wait for the moves of all fences; main memory is going to be read or written."""
        for event in self._abandoned:
            event.synchronize()

    def wait(self, seconds: float) -> None:
        """Wait until a running copy finishes, or time is up."""
        end = time.monotonic() + seconds
        while self._running and time.monotonic() < end:
            if any(_over(event) for event in self._running.values()):
                return
            time.sleep(POLL_SECONDS)

    def drain(self) -> None:
        """Wait for all copies, abandoned ones included, so that their memory can be freed."""
        for event in (*self._started.values(), *self._running.values(), *self._abandoned):
            with suppress(Exception):
                event.synchronize()


def _over(event: CopyEvent) -> bool:
    """Whether a copy has finished or failed."""
    try:
        return event.query()
    except Exception:  # noqa: BLE001
        return True


def _finished(events: Mapping[int, CopyEvent]) -> dict[int, bool]:
    """The moves whose copies have finished, and whether each succeeded."""
    finished: dict[int, bool] = {}
    for number, event in events.items():
        try:
            if event.query():
                finished[number] = True
        except Exception:
            log.exception("a copy between the device and the host failed")
            finished[number] = False
    return finished


def copier_for(device: torch.device) -> Copier:
    """The copier of a device: streams on a GPU, a thread on a CPU."""
    return StreamCopier(device) if device.type == "cuda" else ThreadCopier()


class ThreadCopier:
    """A thread that copies in main memory, where the device is the CPU."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "holdfast-copies")

    def copy(self, copies: Sequence[StorageCopy]) -> CopyEvent:
        if sum(each.source[0].nbytes * len(each.sources) for each in copies) < INLINE_BYTES_MAX:
            copy_units(copies)
            return ThreadCopy(None)
        return ThreadCopy(self._thread.submit(copy_units, copies))

    def fence(self, event: CopyEvent) -> None:
        with suppress(Exception):  # The copy has been abandoned: its result is not needed.
            event.synchronize()


class ThreadCopy:
    """A copy of the thread, or (None) one that the calling thread has done."""

    __slots__ = ("_future",)

    def __init__(self, future: Future[None] | None) -> None:
        self._future = future

    def query(self) -> bool:
        if self._future is None:
            return True
        if not self._future.done():
            return False
        self._future.result()
        return True

    def synchronize(self) -> None:
        if self._future is not None:
            self._future.result()


def copy_units(copies: Sequence[StorageCopy]) -> None:
    """Copy units in main memory, on one core: the others compute steps. Adjacent units are copied at once."""
    for each in copies:
        source, target = (_bytes(storage) for storage in (each.source, each.target))
        for unit, place, count in _runs(each.sources, each.targets):
            target[place : place + count] = source[unit : unit + count]


def _runs(sources: list[int], targets: list[int]) -> Iterator[tuple[int, int, int]]:
    """Units that are adjacent in both storages: the first source, the first target, and their number."""
    begin = 0
    for end in range(1, len(sources) + 1):
        unit, place, count = sources[begin], targets[begin], end - begin
        if end == len(sources) or sources[end] != unit + count or targets[end] != place + count:
            yield unit, place, count
            begin = end


def _bytes(storage: Tensor) -> NDArray[np.uint8]:
    """Storage as [units, bytes]."""
    flat: NDArray[np.uint8] = storage.view(storage.shape[0], -1).view(torch.uint8).numpy()
    return flat


class StreamCopier:
    """Two CUDA streams beside that of the steps: one to the host, one to the device.

    The copies are kernels. On the copy engines a step's small transfers would queue behind a whole session.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._to_host, self._to_device = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def _units(self, units: list[int]) -> Tensor:
        return torch.tensor(units, dtype=torch.int64).to(self._device, non_blocking=True)

    @torch.inference_mode()
    def copy(self, copies: Sequence[StorageCopy]) -> CopyEvent:
        stream = self._to_host if copies[0].source.is_cuda else self._to_device
        steps = torch.cuda.current_stream()
        places = [(self._units(each.sources), self._units(each.targets)) for each in copies]
        for units in chain.from_iterable(places):
            units.record_stream(stream)
        stream.wait_stream(steps)
        event = torch.cuda.Event()
        try:
            with torch.cuda.stream(stream):
                for each, (sources, targets) in zip(copies, places, strict=True):
                    kernels.move_units(each.source, sources, each.target, targets)
                event.record()
        except Exception:
            # No event stands for the kernels that were launched before the error.
            steps.wait_stream(stream)
            raise
        return event

    def fence(self, event: CopyEvent) -> None:
        assert isinstance(event, torch.cuda.Event)
        torch.cuda.current_stream().wait_event(event)
