"""Equality of states: all facts that decide the future, without arbitrary names.

Units are renamed in the order in which a walk over the owners meets them, so the choice of a free unit
does not matter. Steps count from the last one settled, recency and ages as ranks. The content of a free unit
is omitted: nothing may read it.
"""

from __future__ import annotations

from hashlib import blake2b

from holdfast.core.layout import Component, Tier
from holdfast.core.ledger import Hold
from holdfast.core.node import Node, Tail
from holdfast.core.points import ResumePoint, Run
from holdfast.core.registry import Plan
from holdfast.core.scheduler import Scheduler
from holdfast.core.session import Session
from holdfast.core.turn import Turn
from holdfast.sim.device import SimDevice
from holdfast.sim.hearing import Audience

Form = object


class Fingerprint:
    """One walk over a state."""

    def __init__(self, scheduler: Scheduler, device: SimDevice, audience: Audience) -> None:
        self.registry = scheduler.registry
        self.ledger = scheduler.registry.ledger
        self.device = device
        self.audience = audience
        self.names: dict[tuple[Component, Tier, int], int] = {}
        nodes = list(self.registry.tree.forest.nodes())
        ticks = {node.used for node in nodes} | {tail.used for node in nodes for tail in node.tails.values()}
        self.ranks = {tick: rank for rank, tick in enumerate(sorted(ticks))}

    def digest(self) -> bytes:
        """The state as sixteen bytes."""
        return blake2b(repr(self._state()).encode(), digest_size=16).digest()

    def _state(self) -> Form:
        registry = self.registry
        return (
            [self._session(registry.sessions[name]) for name in sorted(registry.sessions)],
            [self._node(root) for _, root in sorted(registry.tree.roots.items())],
            [turn.session_id for turn in registry.queue.values()],
            [[session.id for session in table] for table in (registry.running, registry.resting)],
            [[session.id for session in table] for table in (registry.queues.checkpointed, registry.seals)],
            sorted(session.id for session in registry.transits.values()),
            [session.id for session in registry.queues.expected],
            [self._plan(plan) for plan in registry.flights],
            [
                self._copy(copy.component, copy.source, copy.destination, owner)
                for copy, owner in registry.copies
            ],
            [self._move(move.sources, move.destinations) for move in registry.moves.pending],
            [self._pool(key) for key in self.ledger.pools],
        )

    # --- units ------------------------------------------------------------------------------------

    def _unit(self, component: Component, tier: Tier, unit: int) -> int:
        return self.names.setdefault((component, tier, unit), len(self.names))

    def _hold(self, hold: Hold | None) -> Form:
        if hold is None:
            return None
        pool = hold.pool
        units = [self._unit(pool.component, pool.tier, unit) for unit in hold.units]
        return units, hold.holder.kind.value, self._since(hold.grant.fence)

    def _run(self, run: Run | None) -> Form:
        return None if run is None else (run.first, self._hold(run.hold))

    def _since(self, step: int) -> int:
        """A step counted from the last one settled; 0 if it is over."""
        return max(0, step - self.ledger.settled)

    def _pool(self, key: tuple[Component, Tier]) -> Form:
        pool = self.ledger.pools[key]
        retiring = [(self._since(fence), len(units)) for fence, units in pool.retiring]
        return len(pool.free), retiring, len(pool.quarantine)

    # --- sessions ---------------------------------------------------------------------------------

    def _session(self, session: Session) -> Form:
        sequence, parcel = session.sequence, session.parcel
        mark = sequence.mark
        points = sequence.points
        marked: Form = None
        if mark is not None:
            successor = None if mark.successor is None else mark.successor.length
            marked = (mark.known, mark.point.length, successor, list(mark.cuts))
        away: Form = None
        if parcel is not None:
            away = [
                (component.value, self._hold(hold))
                for component, hold in (*parcel.away.items(), *parcel.home.items())
            ]
        return (
            (
                session.id,
                session.life.value,
                session.place.value,
                session.unsettled,
                list(session.boundaries),
            ),
            self._turn(session.turn),
            None
            if session.last is None
            else (session.last.known_before, session.last.input_end, session.last.generated),
            sequence.tokens.slice(0, sequence.known),
            (
                sequence.computed,
                sequence.planned,
                sequence.pages,
                sequence.changed,
                self._since(sequence.fence),
            ),
            (
                self._hold(sequence.full),
                self._run(sequence.window),
                self._hold(sequence.state),
                self._hold(sequence.spare),
            ),
            [self._point(point) for point in points],
            marked,
            self._lease(session),
            away,
            self._host_copy(session),
            self._tables(session.number),
            self._conversation(session.id),
        )

    def _host_copy(self, session: Session) -> Form:
        copy = session.sequence.copy
        if copy is None:
            return None
        runs = [(component.value, self._run(run)) for component, run in copy.runs.items()]
        return copy.length, runs, self._hold(copy.state)

    def _turn(self, turn: Turn | None) -> Form:
        if turn is None:
            return None
        ending = turn.ending
        how = None if ending is None else (ending.event, ending.keep, ending.trusted)
        progress = (turn.generated, turn.awaiting, turn.computed > 0, turn.failures, turn.retracts > 0)
        return turn.state.value, turn.known_before, len(turn.request.tokens), progress, how

    def _point(self, point: ResumePoint) -> Form:
        return (
            point.length,
            point.pinned,
            point.holder.kind.value,
            self._hold(point.state),
            self._run(point.window),
        )

    def _lease(self, session: Session) -> Form:
        lease = session.sequence.lease
        if lease is None:
            return None
        record = lease.record
        state = None if record.state_node is None else record.state_node.end
        return record.length, record.window_first, state, None if record.tail is None else record.tail.key

    def _tables(self, number: int) -> Form:
        """What the device has been told of a sequence's tables, and will have been told."""
        shown: list[Form] = []
        for tables in self.device.tables_of(number):
            for component, table in zip((Component.FULL, Component.WINDOW), tables, strict=True):
                units = [None if unit is None else self._unit(component, Tier.DEVICE, unit) for unit in table]
                shown.append(units)
        return shown

    def _conversation(self, name: str) -> Form:
        talk = self.audience.conversations[name]
        turn = self.registry.sessions[name].turn
        current = turn is not None and talk.planned_at == turn.retracts
        return (
            talk.last,
            talk.said,
            talk.before,
            talk.asked,
            current,
            talk.began,
            name in self.audience.closing,
        )

    # --- the tree and the plans -------------------------------------------------------------------

    def _node(self, node: Node) -> Form:
        own = (
            node.key,
            self._hold(node.full),
            node.window_first,
            self._hold(node.window),
            self._hold(node.state),
        )
        locks = (node.leases, len(node.window_leases), node.state_leases)
        tails = [self._tail(tail) for _, tail in sorted(node.tails.items())]
        children = [self._node(child) for _, child in sorted(node.children.items())]
        return own, locks, self._recency(node), tails, children

    def _tail(self, tail: Tail) -> Form:
        return (
            tail.key,
            [self._hold(hold) for hold in (tail.full, tail.window, tail.state)],
            self._recency(tail),
            tail.leases,
        )

    def _recency(self, member: Node | Tail) -> Form:
        return self.ranks[member.used], member.rank, member.queued, self._since(member.fence)

    def _plan(self, plan: Plan) -> Form:
        rows = []
        for row in plan.rows:
            state: Form = None
            if row.state is not None:
                source, destination = row.state
                from_unit = None if source is None else self._unit(Component.STATE, Tier.DEVICE, source)
                state = (from_unit, self._unit(Component.STATE, Tier.DEVICE, destination))
            rows.append(
                (
                    row.turn.session_id,
                    row.start,
                    row.count,
                    row.sample,
                    row.tokens,
                    row.turn.over,
                    state,
                    self._change(plan, row.number),
                )
            )
        copies = [
            self._copy(copy.component, copy.source, copy.destination, owner)
            for copy, owner in zip(plan.copies, plan.copied, strict=True)
        ]
        moves = [self._move(move.sources, move.destinations) for move in plan.moves]
        return self._since(plan.step), plan.void, rows, copies, moves, len(plan.forgotten)

    def _change(self, plan: Plan, number: int) -> Form:
        for row in plan.rows:
            if row.number == number and row.table is not None:
                change = row.table
                full = [self._unit(Component.FULL, Tier.DEVICE, unit) for unit in change.full]
                window = [self._unit(Component.WINDOW, Tier.DEVICE, unit) for unit in change.window]
                return change.first, full, change.window_first, window
        return None

    def _copy(self, component: Component, source: int, destination: int, owner: Session) -> Form:
        names = (self._unit(component, Tier.DEVICE, unit) for unit in (source, destination))
        return component.value, *names, owner.id

    def _move(self, sources: list[int], destinations: list[int]) -> Form:
        return len(sources), len(destinations)
