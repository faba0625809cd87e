"""Moves between the device and the host, beside the steps.

On a GPU a few programs carry a parcel while the steps of other sessions go on, and the core is told when it
has arrived:

    arrived    between steps: the parcels that are there now
    forsake    a plan was made: what it launches waits for the copies that nobody else waits for any more
    start      its parcels set out, after all that was launched before
    came       it settles: which of them are there, and which are still under way

Nobody waits any more for a parcel whose session was closed, or had a turn before it had left. It is still
written where it was sent, and its units may be somebody else's in the very next plan: hence `forsake`.

On a CPU a move is a copy like any other and is done at once. Used by the executor and the loop.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterator, Sequence
from itertools import chain
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from holdfast import kernels
from holdfast.core.layout import Tier
from holdfast.core.plan import TierMove
from holdfast.models.memory import Memory

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
        """Whether it is over."""

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

    def __init__(self, memory: Memory | None, host: Memory | None, way: Way | None) -> None:
        self._memory = memory
        self._host = host
        self.way = way
        self._begun: dict[int, Mark] = {}
        self._late: dict[int, Mark] = {}

    def start(self, moves: Sequence[TierMove]) -> None:
        """Begin all moves but those of the disk, which begins them itself."""
        parcels: dict[int, list[Load]] = {}
        for move in moves:
            if Tier.DISK not in (move.source_tier, move.destination_tier):
                parcels.setdefault(move.number, []).extend(self._loads(move))
        for number, parcel in parcels.items():
            if self.way is None:
                copy_at_once(parcel)
            else:
                self._begun[number] = self.way.carry(parcel)

    def _loads(self, move: TierMove) -> Iterator[Load]:
        assert self._memory is not None and self._host is not None, "a move needs two places"
        name = move.component.name.lower()
        for here, there in zip(self._memory.storage(name), self._host.storage(name), strict=True):
            source, target = (here, there) if move.source_tier is Tier.DEVICE else (there, here)
            yield Load(source, move.sources, target, move.destinations)

    def came(self, moves: Sequence[TierMove]) -> list[bool | None]:
        """What came of a plan's moves, now that it settles: None for those under way."""
        for number in {move.number for move in moves} & self._begun.keys():
            mark = self._begun.pop(number)
            if not mark.query():
                self._late[number] = mark
        return [None if move.number in self._late else True for move in moves]

    def forsake(self, wanted: Container[int]) -> None:
        """What is launched from now on waits for all parcels but the wanted ones."""
        for marks in (self._begun, self._late):
            for number in [number for number in marks if number not in wanted]:
                assert self.way is not None
                self.way.order(marks.pop(number))

    def arrived(self) -> list[int]:
        """The numbers of late parcels that are there now."""
        there = [number for number, mark in self._late.items() if mark.query()]
        for number in there:
            del self._late[number]
        return there

    def wait(self, seconds: float) -> None:
        """Give a parcel time to arrive."""
        end = time.monotonic() + seconds
        while self._late and time.monotonic() < end:
            if any(mark.query() for mark in self._late.values()):
                return
            time.sleep(LOOK_SECONDS)

    def drain(self) -> None:
        """Wait for every copy: the memory may go after that."""
        for mark in (*self._begun.values(), *self._late.values()):
            mark.synchronize()


def copy_at_once(parcel: Sequence[Load]) -> None:
    """All units of a parcel, one launch for each storage."""
    _launch(parcel, _places(parcel))


def _places(parcel: Sequence[Load]) -> list[tuple[Tensor, Tensor]]:
    """Sources and targets of each load, on the device that copies them."""
    places = []
    for load in parcel:
        device = load.source.device if load.source.is_cuda else load.target.device
        sources, targets = (
            torch.tensor(units, dtype=torch.int64).to(device, non_blocking=True)
            for units in (load.sources, load.targets)
        )
        places.append((sources, targets))
    return places


def _launch(parcel: Sequence[Load], places: Sequence[tuple[Tensor, Tensor]]) -> None:
    for load, (sources, targets) in zip(parcel, places, strict=True):
        kernels.move_units(load.source, sources, load.target, targets)


class SideStreams:
    """A GPU's streams beside that of the steps: one out, one home.

    The copies are kernels, not the copy engines': those would let a step's few words wait for a whole parcel.
    """

    def __init__(self, device: torch.device) -> None:
        self._out, self._home = torch.cuda.Stream(device), torch.cuda.Stream(device)

    @torch.inference_mode()
    def carry(self, parcel: Sequence[Load]) -> Mark:
        stream = self._out if parcel[0].source.is_cuda else self._home
        steps = torch.cuda.current_stream()
        places = _places(parcel)
        for units in chain.from_iterable(places):
            units.record_stream(stream)
        stream.wait_stream(steps)
        mark = torch.cuda.Event()
        try:
            with torch.cuda.stream(stream):
                _launch(parcel, places)
                mark.record()
        except Exception:
            # Nobody will know of what has set out before.
            steps.wait_stream(stream)
            raise
        return mark

    def order(self, mark: Mark) -> None:
        assert isinstance(mark, torch.cuda.Event)
        torch.cuda.current_stream().wait_event(mark)
