"""Moving a session's memory between tiers: all components as one parcel, or nothing.

A spill allocates units on another tier, asks the executor to copy, and frees the device units only when the
copy has settled; a restore works the other way round. While a copy is in flight its destination is
held as TRANSIT and its source stays valid, so either can be cancelled at any moment: the source is kept,
and the destination retires. Prefixes leased together with others stay leased; tree nodes that only this
sequence leases become its own before the spill (`sharing.reclaim`). Checkpoints do not move: they stay on the
device, where they are evicted before any session (`pressure`), and are valid again after the restore.

A restore from the host leaves the host's units to the sequence as a copy (`copies`). The next spill to the
host copies only the missing units, none if the copy is whole.
"""

from __future__ import annotations

from holdfast.core.copies import HostCopy
from holdfast.core.layout import Component, Tier
from holdfast.core.lease import Lease
from holdfast.core.ledger import Grant, Hold, Holder, Ledger, OutOfUnits
from holdfast.core.plan import TierMove
from holdfast.core.points import Run
from holdfast.core.sequence import Sequence


class Parcel:
    """A sequence's own memory on another tier, and the device units of a restore in flight.

    While a spill is in flight `away` has the units that it copies to. The host's copy is put behind the first
    `front` of them when the spill has settled.
    """

    __slots__ = ("away", "front", "holder", "home", "lease", "tier", "transit")

    def __init__(
        self,
        tier: Tier,
        holder: Holder,
        away: dict[Component, Hold],
        transit: int,
        front: dict[Component, int],
    ) -> None:
        self.tier = tier
        self.transit = transit
        self.holder = holder
        self.away = away
        self.front = front
        self.home: dict[Component, Hold] = {}
        self.lease: Lease | None = None

    def claim(self, into: list[Grant]) -> None:
        """Name everything the parcel holds, for the census."""
        into.extend(hold.grant for hold in self.away.values())
        into.extend(hold.grant for hold in self.home.values())

    def faults(self) -> list[str]:
        """A parcel has no books of its own."""
        return []

    def discard(self, fence: int) -> None:
        """Give up the units on both sides."""
        for hold in (*self.home.values(), *self.away.values()):
            hold.release(fence)


def own_holds(sequence: Sequence) -> dict[Component, Hold]:
    """The units of an idle sequence, by component, without empty components."""
    run = sequence.window
    holds = (
        (Component.FULL, sequence.full),
        (Component.WINDOW, run.hold if run is not None else None),
        (Component.STATE, sequence.state),
    )
    return {component: hold for component, hold in holds if hold is not None and len(hold)}


def whole_units(sequence: Sequence, parcel: Parcel | None) -> dict[Component, tuple[list[int], list[int]]]:
    """Where everything computed lies, by component: units of the tree, then the sequence's own, in order.

    The own ones are on the device, or where the parcel is. A window begins with the first page that is read.
    """
    assert sequence.mark is None and sequence.lease is not None, "only a sequence at rest"
    layout, lease = sequence.ledger.layout, sequence.lease
    holds = parcel.away if parcel is not None and sequence.away else own_holds(sequence)
    found: dict[Component, tuple[list[int], list[int]]] = {}
    for component in layout.components:
        leased: list[int] = []
        if component is Component.FULL:
            leased = lease.full_units(0)
        elif component is Component.WINDOW and sequence.window is not None:
            first = layout.window_first_page(sequence.computed)
            if first < sequence.window.first:
                leased = lease.window_units(first)[: sequence.window.first - first]
        elif component not in holds:
            unit = lease.state_unit(sequence.computed)
            assert unit is not None, "a sequence at rest has its state or leases it"
            leased = [unit]
        found[component] = (leased, list(holds[component].units) if component in holds else [])
    return found


def first_pages(sequence: Sequence) -> dict[Component, int]:
    """The number of the first page that a sequence holds itself, by component."""
    firsts = {Component.FULL: sequence.leased_pages}
    if sequence.window is not None:
        firsts[Component.WINDOW] = sequence.window.first
    return firsts


def start_spill(
    sequence: Sequence, tier: Tier, transit: Holder, number: int
) -> tuple[Parcel, list[TierMove]]:
    """Take room for a sequence on another tier, or raise. Its points stay, and none is pinned any more.

    Without room nothing changes but the host's copy, which loses what the sequence leases by now.
    """
    assert sequence.mark is None and not sequence.away, "only a sequence at rest, at home, can be spilled"
    own = own_holds(sequence)
    front, copied = dict.fromkeys(own, 0), dict.fromkeys(own, 0)
    copy = sequence.copy if tier is Tier.HOST else None
    if copy is not None:
        firsts = first_pages(sequence)
        copy.trim(firsts, sequence.computed)
        for component in own:
            if component is Component.STATE:
                copied[component] = int(copy.has_state(sequence.computed))
            else:
                begin, end = copy.span(component, firsts[component], sequence.computed)
                front[component], copied[component] = begin - firsts[component], end - begin
    new = {component: len(hold) - copied[component] for component, hold in own.items()}
    taken = _take_all(
        sequence.ledger, tier, {component: count for component, count in new.items() if count}, transit
    )
    for point in sequence.points:
        point.pinned = False
    moves: list[TierMove] = []
    for component, hold in taken.items():
        units, begin = own[component].units, front[component]
        sources = units[:begin] + units[begin + copied[component] :]
        moves.append(TierMove(number, component, Tier.DEVICE, sources, tier, list(hold.units)))
    return Parcel(tier, transit, taken, number, front), moves


def finish_spill(sequence: Sequence, parcel: Parcel) -> None:
    """The copy has settled: the parcel is the sequence's memory now, and the device units are given up."""
    copy, sequence.copy = sequence.copy, None
    joins = copy if parcel.tier is Tier.HOST else None
    own = own_holds(sequence)
    parcel.away = {
        component: _joined(
            sequence, parcel, component, joins.take(component, sequence.holder) if joins else None
        )
        for component in own
    }
    if copy is not None:
        copy.discard()
    for component, hold in own.items():
        if component is Component.STATE:
            hold.release(sequence.fence)
            sequence.state = None
        else:
            hold.shrink(len(hold), sequence.fence)
    sequence.away = True


def _joined(sequence: Sequence, parcel: Parcel, component: Component, copied: Hold | None) -> Hold:
    """The units of one component in the order of its pages: new ones before the copy, the copy, new ones."""
    new = parcel.away.get(component)
    if new is None:
        assert copied is not None, "what is not copied was in the host's copy"
        return copied
    moved = new.move_to(sequence.holder)
    if copied is None:
        return moved
    rest = moved.split(parcel.front[component])
    moved.join(copied)
    moved.join(rest)
    return moved


def start_restore(sequence: Sequence, parcel: Parcel, transit: Holder, number: int) -> list[TierMove]:
    """Take room for a parcel at home, or raise and change nothing."""
    assert sequence.away and not parcel.home, "only a sequence that is away can be restored"
    sizes = {component: len(hold) for component, hold in parcel.away.items()}
    parcel.home = _take_all(sequence.ledger, Tier.DEVICE, sizes, transit)
    parcel.transit = number
    return [
        TierMove(
            number,
            component,
            parcel.tier,
            list(parcel.away[component].units),
            Tier.DEVICE,
            list(hold.units),
        )
        for component, hold in parcel.home.items()
    ]


def finish_restore(sequence: Sequence, parcel: Parcel) -> None:
    """The copy has settled: the sequence is at home again, and the parcel is given up."""
    for component, hold in parcel.home.items():
        moved = hold.move_to(sequence.holder)
        if component is Component.STATE:
            sequence.state = moved
        elif component is Component.FULL:
            assert sequence.full is not None
            sequence.full.join(moved)
        else:
            assert sequence.window is not None
            sequence.window.hold.join(moved)
    parcel.home = {}
    if parcel.tier is Tier.HOST:
        sequence.copy = _left_behind(sequence, parcel)
    parcel.discard(sequence.fence)
    sequence.away = False
    own_first = sequence.leased_pages
    if sequence.window is not None:
        own_first = min(own_first, sequence.window.first)
    sequence.changed = min(sequence.changed, own_first)


def _left_behind(sequence: Sequence, parcel: Parcel) -> HostCopy:
    """The units that a sequence came back from, as its copy."""
    away, parcel.away = parcel.away, {}
    state = away.pop(Component.STATE, None)
    firsts = first_pages(sequence)
    runs = {component: Run(hold, firsts[component]) for component, hold in away.items()}
    return HostCopy(sequence.ledger.layout, sequence.holder, sequence.computed, runs, state)


def sink(sequence: Sequence, parcel: Parcel) -> None:
    """A parcel's content is on disk as well: account for it there, or raise and change nothing."""
    assert sequence.away and not parcel.home and parcel.tier is Tier.HOST, (
        "only a parcel that lies on the host"
    )
    sizes = {component: len(hold) for component, hold in parcel.away.items()}
    taken = _take_all(sequence.ledger, Tier.DISK, sizes, sequence.holder)
    parcel.discard(sequence.fence)
    parcel.away, parcel.tier = taken, Tier.DISK


def adopt(sequence: Sequence, lease: Lease, length: int, transit: Holder, number: int) -> Parcel:
    """Take room on disk for an empty sequence whose first `length` tokens are in a file, or raise.

    All its memory is on disk, none of it leased. On a failure the caller still owns the lease.
    """
    layout = sequence.ledger.layout
    assert sequence.lease is None and 0 < length <= sequence.known, "only what was never computed here"
    pages, first = layout.pages_for(length), layout.window_first_page(length)
    sizes = {Component.FULL: pages, Component.WINDOW: pages - first, Component.STATE: 1}
    wanted = {component: sizes[component] for component in layout.components}
    taken = _take_all(sequence.ledger, Tier.DISK, wanted, sequence.holder)
    sequence.lease = lease
    sequence.stand_at(length)
    sequence.away = True
    if sequence.window is not None:
        sequence.window.first = first
    return Parcel(Tier.DISK, transit, taken, number, {})


def _take_all(
    ledger: Ledger, tier: Tier, sizes: dict[Component, int], holder: Holder
) -> dict[Component, Hold]:
    taken: dict[Component, Hold] = {}
    try:
        for component, count in sizes.items():
            taken[component] = ledger.take(ledger.pool(component, tier), count, holder)
    except OutOfUnits:
        for hold in taken.values():
            hold.release()
        raise
    return taken
