"""Reads all of memory: the content of every unit must be what its owner expects.

Rows read their own history when they run; this reads the rest too: idle sessions, resume points, parcels
on other tiers, copies on the host, the prefix tree with its tails. So corruption is found in place,
with its holder's name, and not only when it is read again.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.core.layout import Component, Tier
from holdfast.core.ledger import Hold
from holdfast.core.node import Node
from holdfast.core.scheduler import Scheduler
from holdfast.core.sequence import Sequence
from holdfast.core.session import Place, Session
from holdfast.sim.content import EMPTY, extend
from holdfast.sim.device import SimDevice
from holdfast.sim.found import Check, Found

FULL, WINDOW, STATE = Component.FULL, Component.WINDOW, Component.STATE


class Inspection:
    """One look at all memory of a scheduler; raises `Found` at the first thing that is not right."""

    def __init__(self, scheduler: Scheduler, device: SimDevice) -> None:
        self.registry = scheduler.registry
        self.layout = device.layout
        self.device = device

    def everything(self) -> None:
        """The tree, then every session."""
        registry = self.registry
        for root in registry.tree.roots.values():
            self._node(root, [EMPTY])
        waiting = {owner for _, owner in registry.copies}
        waiting.update(owner for plan in registry.flights for owner in plan.copied)
        for session in registry.sessions.values():
            if session.sequence.computed and session not in waiting:
                self._session(session)

    def quotas(self) -> None:
        """No tenant may hold more than its quota."""
        ledger = self.registry.ledger
        for account in ledger.accounts.values():
            for pool in ledger.pools.values():
                if pool.room(account) < 0:
                    held, limit = account.held[pool.index], account.limits[pool.index]
                    what = f"{held} units of {pool.name} are held, at most {limit} may be"
                    raise Found(Check.QUOTA, what, f"tenant {account.name}")

    def fences(self) -> None:
        """What a plan in flight may still read or write must not be free."""
        pools = self.registry.ledger.pools
        free = {key: set(pool.free) for key, pool in pools.items()}
        for step, key, units in self.device.in_flight():
            for unit in free.get(key, set()) & units.keys():
                what = f"{pools[key].name} unit {unit} is free while step {step} still names it"
                raise Found(Check.FENCE, what, self._whose(units[unit]))

    def _whose(self, number: int) -> str:
        """The turn whose row is in flight for a sequence of this number, or its session."""
        for plan in self.registry.flights:
            for row in plan.rows:
                if row.number == number:
                    return f"{row.turn.request.turn_id} of {row.turn.session_id}"
        sessions = self.registry.sessions.values()
        return next((session.id for session in sessions if session.number == number), "nobody")

    def _unit(
        self, pool: tuple[Component, Tier], unit: int, expected: list[int], whose: Callable[[], str]
    ) -> None:
        found = self.device.read_unit(pool, unit)[: len(expected)]
        if found != expected:
            what = (
                f"{pool[0].name.lower()} unit {unit} on {pool[1].name.lower()} is not what was written there"
            )
            raise Found(Check.CONTENT, what, whose())

    def _pages(
        self,
        component: Component,
        units: list[int],
        first: int,
        contents: list[int],
        whose: Callable[[], str],
    ) -> None:
        """Pages `first`, `first` + 1, … must be what was written up to the last of `contents`."""
        page_size = self.layout.page_size
        for page, unit in enumerate(units, first):
            expected = contents[page * page_size + 1 : (page + 1) * page_size + 1]
            self._unit((component, Tier.DEVICE), unit, expected, whose)

    def _slot(self, hold: Hold, expected: int) -> None:
        self._unit((STATE, Tier.DEVICE), hold.units[0], [expected], lambda: repr(hold.holder))

    # --- the tree ---------------------------------------------------------------------------------

    def _node(self, node: Node, above: list[int]) -> None:
        """A node and all below it; `above` is the content up to where its run begins."""
        contents = above + _extended(above[-1], node.key)
        whose = node.holder.__repr__
        if node.full is not None:
            self._pages(FULL, node.full.units, node.start // self.layout.page_size, contents, whose)
        if node.window is not None:
            self._pages(WINDOW, node.window.units, node.window_first, contents, whose)
        if node.state is not None:
            self._slot(node.state, contents[-1])
        for tail in node.tails.values():
            ends = contents + _extended(contents[-1], tail.key)
            page = node.end // self.layout.page_size
            for component, hold in ((FULL, tail.full), (WINDOW, tail.window)):
                if hold is not None:
                    self._pages(component, hold.units, page, ends, whose)
            if tail.state is not None:
                self._slot(tail.state, ends[-1])
        for child in node.children.values():
            self._node(child, contents)

    # --- sessions ---------------------------------------------------------------------------------

    def _session(self, session: Session) -> None:
        sequence = session.sequence
        root = sequence.lease.record.node.holder.name if sequence.lease is not None else session.tenant
        if root != session.tenant:
            raise Found(
                Check.TENANT, f"{session.id} of {session.tenant} leans on memory of {root}", session.id
            )
        contents = self.device.contents_of(session.number, sequence.tokens.slice(0, sequence.computed))
        if session.place is Place.AWAY:
            self._parcel(session, contents)
            return
        self._copy(session, contents)
        self._own_pages(sequence, contents)
        if not session.unsettled:
            self._state(sequence, contents)
        for point in sequence.points:
            if point.length <= sequence.computed:
                whose = point.holder.__repr__
                if point.state is not None:
                    self._slot(point.state, contents[point.length])
                if point.window is not None:
                    self._pages(WINDOW, point.window.hold.units, point.window.first, contents, whose)

    def _own_pages(self, sequence: Sequence, contents: list[int]) -> None:
        whose = sequence.holder.__repr__
        lease, leased = sequence.lease, sequence.leased_pages
        if sequence.full is not None:
            self._pages(FULL, sequence.full.units, leased, contents, whose)
            if lease is not None:
                self._pages(FULL, lease.full_units(0), 0, contents, whose)
        if sequence.window is not None:
            self._pages(WINDOW, sequence.window.hold.units, sequence.window.first, contents, whose)
            if lease is not None and lease.window_first < leased:
                self._pages(
                    WINDOW, lease.window_units(lease.window_first), lease.window_first, contents, whose
                )

    def _state(self, sequence: Sequence, contents: list[int]) -> None:
        """The state itself, where it stands for what is computed and not for a resume point."""
        newest = sequence.points[-1].length if sequence.points else -1
        if (
            sequence.state is not None
            and sequence.planned == sequence.computed
            and newest < sequence.computed
        ):
            self._slot(sequence.state, contents[-1])

    def _copy(self, session: Session, contents: list[int]) -> None:
        """What the host has as well must be what the session had when it came back, as far as that stands."""
        copy = session.sequence.copy
        if copy is None:
            return
        whose = f"copy of {session.id}"
        if copy.length >= len(contents):
            what = f"{copy.length} tokens are copied, but {len(contents) - 1} are computed"
            raise Found(Check.CONTENT, what, whose)
        page_size = self.layout.page_size
        for component, run in copy.runs.items():
            for page, unit in enumerate(run.hold.units, run.first):
                expected = contents[page * page_size + 1 : min((page + 1) * page_size, copy.length) + 1]
                self._unit((component, Tier.HOST), unit, expected, lambda: whose)
        if copy.state is not None:
            self._unit((STATE, Tier.HOST), copy.state.units[0], [contents[copy.length]], lambda: whose)

    def _parcel(self, session: Session, contents: list[int]) -> None:
        """What is away must still be what left: all of what is computed and not leased."""
        parcel, sequence = session.parcel, session.sequence
        assert parcel is not None, "memory that is away is in a parcel"
        page_size = self.layout.page_size
        starts = {
            FULL: sequence.leased_pages,
            WINDOW: sequence.window.first if sequence.window is not None else 0,
        }
        pages = self.layout.pages_for(sequence.computed)
        for component in self.layout.components:
            units = len(parcel.away[component].units) if component in parcel.away else 0
            lease = sequence.lease
            if component is STATE:
                complete = units or (lease is not None and lease.state_unit(sequence.computed) is not None)
            else:
                complete = starts[component] + units == pages
            if not complete:
                what = f"{units} {component.name.lower()} units are away, of {sequence.computed} tokens"
                raise Found(Check.CONTENT, what, f"parcel of {session.id}")
        for component, hold in parcel.away.items():
            pool = (component, parcel.tier)
            for index, unit in enumerate(hold.units):
                page = starts.get(component, 0) + index
                expected = contents[page * page_size + 1 : (page + 1) * page_size + 1]
                if component is STATE:
                    expected = [contents[-1]]
                self._unit(pool, unit, expected, lambda: f"parcel of {session.id}")


def _extended(content: int, key: bytes) -> list[int]:
    """The contents of the lengths that a packed run of tokens leads to."""
    contents: list[int] = []
    tokens = memoryview(key).cast("I")
    for token in tokens:
        content = extend(content, token)
        contents.append(content)
    return contents
