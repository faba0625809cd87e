"""Moves between the device and the host, beside the steps.

A parcel is carried while the steps of other sessions go on, on a GPU by a few programs on a stream of their
own and on a CPU by a thread, and the core is told when it has arrived:

    arrived    between steps: the parcels that are there now
    forsake    a plan was made: what it launches waits for the copies that nobody else waits for any more
    start      its parcels set out, after all that was launched before
    came       it settles: which of them are there, and which are still under way

Nobody waits any more for a parcel whose session was closed, or had a turn before it had left. It is still
written where it was sent, and its units may be somebody else's in the very next plan: hence `forsake`.

Used by the executor and the loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Container, Iterator, Mapping, Sequence
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
from holdfast.models.memory import Memory

log = logging.getLogger("holdfast.carrier")

SMALL = 1 << 20
"""Bytes of a parcel below which a CPU copies it at once."""
LOOK_SECONDS = 0.0002
"""How often a parcel is looked at by a step that has nothing else to do."""


class Load(NamedTuple):
    """Units of one storage, and where in another they go."""

    source: Tensor
    sources: list[int]
    target: Tensor
    targets: list[int]


class Mark(Protocol):
    """The end of a copy."""

    def query(self) -> bool:
        """Whether it is over; raises what went wrong."""

    def synchronize(self) -> None:
        """Wait until it is."""


class Way(Protocol):
    """What carries parcels beside the steps."""

    def carry(self, parcel: Sequence[Load]) -> Mark:
        """Set out after all that was launched before."""

    def order(self, mark: Mark) -> None:
        """Whatever is launched from now on begins after it."""


class Carrier:
    """The parcels between a device and its host tier."""

    def __init__(self, memory: Memory | None = None, host: Memory | None = None) -> None:
        self._memory = memory
        self._host = host
        self.way: Way = Helper()
        self._begun: dict[int, Mark] = {}
        self._late: dict[int, Mark] = {}
        self._forsaken: list[Mark] = []

    def start(self, moves: Sequence[TierMove]) -> None:
        """Begin all moves but those of the disk, which begins them itself."""
        parcels: dict[int, list[Load]] = {}
        for move in moves:
            if Tier.DISK not in (move.source_tier, move.destination_tier):
                parcels.setdefault(move.number, []).extend(self._loads(move))
        for number, parcel in parcels.items():
            self._begun[number] = self.way.carry(parcel)

    def _loads(self, move: TierMove) -> Iterator[Load]:
        assert self._memory is not None and self._host is not None, "a move needs two places"
        name = move.component.name.lower()
        for here, there in zip(self._memory.storage(name), self._host.storage(name), strict=True):
            source, target = (here, there) if move.source_tier is Tier.DEVICE else (there, here)
            yield Load(source, move.sources, target, move.destinations)

    def came(self, moves: Sequence[TierMove]) -> list[bool | None]:
        """What came of a plan's moves, now that it settles: None for those under way."""
        begun = {
            number: self._begun.pop(number) for number in {move.number for move in moves} & self._begun.keys()
        }
        known = _known(begun)
        self._late |= {number: mark for number, mark in begun.items() if number not in known}
        return [known.get(move.number) if move.number in begun else True for move in moves]

    def forsake(self, wanted: Container[int]) -> None:
        """What is launched from now on waits for all parcels but the wanted ones."""
        self._forsaken = [mark for mark in self._forsaken if not _over(mark)]
        for marks in (self._begun, self._late):
            for number in [number for number in marks if number not in wanted]:
                self.way.order(marks[number])
                self._forsaken.append(marks.pop(number))

    def arrived(self) -> dict[int, bool]:
        """Late parcels that are there now, or lost, by their numbers."""
        known = _known(self._late)
        for number in known:
            del self._late[number]
        return known

    def wait(self, seconds: float) -> None:
        """Give a parcel time to arrive."""
        end = time.monotonic() + seconds
        while self._late and time.monotonic() < end:
            if any(_over(mark) for mark in self._late.values()):
                return
            time.sleep(LOOK_SECONDS)

    def drain(self) -> None:
        """Wait for every copy, those that nobody wants included: the memory may go after that."""
        for mark in (*self._begun.values(), *self._late.values(), *self._forsaken):
            with suppress(Exception):
                mark.synchronize()


def _over(mark: Mark) -> bool:
    """Whether a copy has ended, well or not."""
    try:
        return mark.query()
    except Exception:  # noqa: BLE001
        return True


def _known(marks: Mapping[int, Mark]) -> dict[int, bool]:
    """The copies that have ended, and whether all went well."""
    known: dict[int, bool] = {}
    for number, mark in marks.items():
        try:
            if mark.query():
                known[number] = True
        except Exception:
            log.exception("a copy between the device and the host failed")
            known[number] = False
    return known


class Helper:
    """A thread that copies in main memory, where the device is the CPU."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "holdfast-copies")

    def carry(self, parcel: Sequence[Load]) -> Mark:
        if sum(load.source[0].nbytes * len(load.sources) for load in parcel) < SMALL:
            copy_at_once(parcel)
            return Errand(None)
        return Errand(self._thread.submit(copy_at_once, parcel))

    def order(self, mark: Mark) -> None:
        with suppress(Exception):  # Nobody asks what came of it.
            mark.synchronize()


class Errand:
    """What the thread was asked for; nothing, where it was not needed."""

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


def copy_at_once(parcel: Sequence[Load]) -> None:
    """All units of a parcel, in main memory, by this thread alone: others have steps to compute."""
    for load in parcel:
        source, target = (_bytes(storage) for storage in (load.source, load.target))
        for unit, place in zip(load.sources, load.targets, strict=True):
            target[place] = source[unit]


def _bytes(storage: Tensor) -> NDArray[np.uint8]:
    """Storage as [units, bytes]."""
    flat: NDArray[np.uint8] = storage.view(storage.shape[0], -1).view(torch.uint8).numpy()
    return flat


class SideStreams:
    """A GPU's streams beside that of the steps: one out, one home.

    The copies are kernels, not the copy engines': those would let a step's few words wait for a whole parcel.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._home = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def _units(self, units: list[int]) -> Tensor:
        return torch.tensor(units, dtype=torch.int64).to(self._device, non_blocking=True)

    @torch.inference_mode()
    def carry(self, parcel: Sequence[Load]) -> Mark:
        stream = self._out if parcel[0].source.is_cuda else self._home
        steps = torch.cuda.current_stream()
        places = [(self._units(load.sources), self._units(load.targets)) for load in parcel]
        for units in chain.from_iterable(places):
            units.record_stream(stream)
        stream.wait_stream(steps)
        mark = torch.cuda.Event()
        try:
            with torch.cuda.stream(stream):
                for load, (sources, targets) in zip(parcel, places, strict=True):
                    kernels.move_units(load.source, sources, load.target, targets)
                mark.record()
        except Exception:
            # Nobody will know of what has set out before.
            steps.wait_stream(stream)
            raise
        return mark

    def order(self, mark: Mark) -> None:
        assert isinstance(mark, torch.cuda.Event)
        torch.cuda.current_stream().wait_event(mark)
