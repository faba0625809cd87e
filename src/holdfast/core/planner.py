"""Making a plan: which rows the next step computes.

Decode rows first, then chunks of running prefills, seals, and newly admitted turns, all under one token
budget. The oldest running turn is served first, so it always gets on. With overlap a plan is made while the
one before is still in flight: a sequence then counts the tokens that it is going to sample as known.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.core.admission import Admission, match_limit, packed_prompt
from holdfast.core.ledger import Kind, OutOfUnits, OverQuota
from holdfast.core.plan import Row, StepPlan
from holdfast.core.policy import queue_order
from holdfast.core.pressure import Pressure
from holdfast.core.registry import Plan, Registry
from holdfast.core.session import Life, Place, Session
from holdfast.core.tiers import start_restore
from holdfast.core.tokens import TOKEN_BYTES, all_known
from holdfast.core.turn import Turn

Proposer = Callable[[Session, Turn], list[int]]


class Planner:
    """Builds the rows of one step."""

    __slots__ = ("_full", "_matches", "_plan", "_short", "pressure", "propose", "registry")

    def __init__(self, registry: Registry, pressure: Pressure, propose: Proposer | None) -> None:
        self.registry = registry
        self.pressure = pressure
        self.propose = propose
        self._matches: dict[int, tuple[int, int, bytes]] = {}
        self._plan: Plan = StepPlan(0)
        self._short = False
        self._full: set[str] = set()

    def fill(self, plan: Plan, budget: int) -> None:
        """Put rows, copies and moves into a plan of at most `budget` tokens."""
        self._plan = plan
        self._short, self._full = False, set()
        prefilling: list[Session] = []
        budget = self._decode(plan, budget, prefilling)
        for session in prefilling:
            if budget > 0:
                budget -= self._chunk(plan, session, budget)
        budget = self._seal(plan, budget)
        self._admit(plan, budget)
        registry = self.registry
        for copy, owner in registry.copies:
            plan.copies.append(copy)
            plan.copied.append(owner)
            owner.sequence.fence = plan.step
        registry.copies = []
        plan.moves, registry.moves = registry.moves, []
        for move in plan.moves:
            registry.transits[move.number].sequence.fence = plan.step
        plan.forgotten, registry.forgotten = registry.forgotten, []
        self._plan = StepPlan(0)

    # --- running turns ----------------------------------------------------------------------------

    def _decode(self, plan: Plan, budget: int, prefilling: list[Session]) -> int:
        """One row for each running turn that waits for one token only; the others are collected."""
        rows = plan.rows
        step = plan.step
        ledger = self.registry.ledger
        stateful = ledger.layout.state
        for session in list(self.registry.running):
            turn = session.turn
            if turn is None or turn.ending is not None or session.life is not Life.RUNNING:
                continue
            sequence = session.sequence
            start = sequence.planned
            tokens = sequence.tokens
            todo = len(tokens) + turn.awaiting - start
            if todo > 1 or self.propose is not None:
                prefilling.append(session)
                continue
            # The last token is left to a seal or to the next turn, which a row of it in flight would hold up.
            last = turn.generated + turn.awaiting >= turn.request.max_tokens
            if todo < 1 or budget < 1 or last:
                continue
            source = sequence.state_source() if stateful else None
            ledger.purpose = "decode page"
            try:
                sequence.extend(1)
            except OutOfUnits as shortfall:
                if not self._extend_under_pressure(session, shortfall):
                    continue
            inputs = [] if start >= len(tokens) else [tokens[start]]
            row: Row[Turn] = Row(turn, session.number, start, 1, inputs, True, sequence.table_changes())
            if stateful:
                assert sequence.state is not None
                row.state = (source, sequence.state.units[0])
            turn.awaiting += 1
            turn.computed += 1
            session.unsettled += 1
            sequence.fence = step
            rows.append(row)
            budget -= 1
        return budget

    def _extend_under_pressure(self, session: Session, shortfall: OutOfUnits) -> bool:
        """Make room for one more token of a running turn; False if it must wait."""
        if not self._room(shortfall, session):
            return False
        try:
            session.sequence.extend(1)
        except OutOfUnits as still:
            self._wait_for_room(still, session)
            return False
        return True

    def _room(self, shortfall: OutOfUnits, session: Session) -> bool:
        """Whether a running turn that found no memory may try again now."""
        room = self.pressure.make_room(shortfall, session, may_retract=True)
        if not room:
            self._wait_for_room(shortfall, session)
        return room and _runs(session)

    def _wait_for_room(self, shortfall: OutOfUnits, session: Session) -> None:
        """Somebody stays without memory in this plan: what is on its way is for it, not for others."""
        if isinstance(shortfall, OverQuota):
            self._full.add(session.tenant)
        else:
            self._short = True

    def _chunk(self, plan: Plan, session: Session, budget: int) -> int:
        """A row of as many tokens as are known, allowed and affordable; returns how many.

        Where drafts find no room the row goes without them; no turn is retracted for a guess. Where a whole
        chunk finds none even under pressure, smaller ones are tried: the oldest turn must get on with what is
        left.
        """
        turn = session.turn
        if turn is None or not _runs(session):
            return 0
        drafts = self._drafts(session, turn, budget)
        if drafts is None:
            return 0
        pressed = False
        while budget > 0:
            try:
                return self._row(plan, session, turn, budget, drafts)
            except OutOfUnits as shortfall:
                if drafts:
                    if not self.pressure.make_room(shortfall, session, may_retract=False):
                        drafts = []
                elif not pressed and self._room(shortfall, session):
                    pressed = True
                elif _runs(session):
                    pressed = True
                    self._wait_for_room(shortfall, session)
                    budget = min(budget, max(1, session.sequence.known - session.sequence.planned)) // 2
                else:
                    return 0
        return 0

    def _drafts(self, session: Session, turn: Turn, budget: int) -> list[int] | None:
        """Guesses for the next tokens; None if the turn must wait for its row in flight."""
        if self.propose is None:
            return []
        if session.unsettled:
            return None
        sequence = session.sequence
        todo = sequence.known - sequence.planned
        room = min(turn.request.max_tokens - turn.generated - 1, budget - todo)
        if (
            todo < 1
            or room < 1
            or sequence.next_cut() is not None
            or todo > self.registry.policy.chunk_tokens
        ):
            return []
        drafts = self.propose(session, turn)[:room]
        return drafts if all_known(drafts, self.registry.policy.vocabulary) else []

    def _row(self, plan: Plan, session: Session, turn: Turn, budget: int, drafts: list[int]) -> int:
        """Reserve memory for one row and add it, or raise and change nothing."""
        sequence = session.sequence
        start = sequence.planned
        known = sequence.known + turn.awaiting
        count = min(known - start, budget, self.registry.policy.chunk_tokens)
        cut = sequence.next_cut()
        if cut is not None:
            count = min(count, cut - start)
        assert count > 0, "a turn that runs has something to compute"
        whole = start + count == known
        if not whole:
            drafts = []
        source = sequence.state_source() if self.registry.ledger.layout.state else None
        self.registry.ledger.purpose = (
            "draft reserve" if drafts else "chunk" if turn.computed else "first chunk"
        )
        if drafts:
            sequence.extend_drafts(count + len(drafts))
        else:
            sequence.extend(count)
        sample = whole and turn.generated + turn.awaiting < turn.request.max_tokens
        tokens = sequence.tokens.slice(start, start + count) + drafts
        total = count + len(drafts)
        row: Row[Turn] = Row(turn, session.number, start, total, tokens, sample, sequence.table_changes())
        row.drafts = len(drafts)
        if self.registry.ledger.layout.state:
            destination = sequence.spare if drafts else sequence.state
            assert destination is not None, "a row of a state layout has a slot to write to"
            row.state = (source, destination.units[0])
        if sample:
            turn.awaiting += 1
        turn.computed += total
        session.unsettled += 1
        sequence.fence = plan.step
        plan.rows.append(row)
        if cut is not None and sequence.planned == cut:
            sequence.pass_cut()
        return total

    # --- sessions whose last token is not computed yet --------------------------------------------

    def _seal(self, plan: Plan, budget: int) -> int:
        """Compute the last token of finished turns, where a page is free: it is never worth pressure."""
        registry = self.registry
        for session in list(registry.seals):
            if budget < 1:
                break
            del registry.seals[session]
            sequence, turn = session.sequence, session.last
            assert session.life is Life.SEALING and turn is not None and session.place is Place.HOME
            start = sequence.planned
            source = sequence.state_source() if registry.ledger.layout.state else None
            registry.ledger.purpose = "seal"
            try:
                sequence.extend(1)
            except OutOfUnits:
                session.on("end")
                continue
            row: Row[Turn] = Row(
                turn, session.number, start, 1, [sequence.tokens[start]], False, sequence.table_changes()
            )
            if registry.ledger.layout.state:
                assert sequence.state is not None
                row.state = (source, sequence.state.units[0])
            session.unsettled += 1
            sequence.fence = plan.step
            registry.resting.pop(session, None)
            plan.rows.append(row)
            budget -= 1
        return budget

    # --- waiting turns ----------------------------------------------------------------------------

    def _admit(self, plan: Plan, budget: int) -> None:
        """Admit waiting turns, in the order of the policy, while budget and memory last.

        Who finds no memory keeps those after it waiting, or it might wait for ever; so does a running turn. A
        tenant that may hold no more keeps only its own waiting: the others are looked through once more,
        without it.
        """
        if self._short:
            return
        full = set(self._full)
        tried = -1
        while len(full) > tried:
            tried = len(full)
            budget = self._admit_others(plan, budget, full)

    def _admit_others(self, plan: Plan, budget: int, full: set[str]) -> int:
        """Admit turns of tenants that are not full, up to the first that is; returns the budget left."""
        registry = self.registry
        if not self._admits(budget):
            return budget
        for turn in queue_order(registry.waiting, registry.now, registry.policy, self._cached, full):
            if not self._admits(budget):
                break
            session = registry.sessions[turn.session_id]
            if session.unsettled or not self._at_home(session) or self._waits_for_prefix(session, turn):
                full |= self._full
                if self._short or session.tenant in full:
                    break
                continue
            taken = self._try_admit(plan, session, turn, budget)
            if taken is None:
                full.add(session.tenant)
            if not taken:
                break
            budget -= taken
        return budget

    def _admits(self, budget: int) -> bool:
        """Whether one more turn may run in this plan. If not, who waits is not looked at."""
        return budget > 0 and len(self.registry.running) < self.registry.policy.running_max

    def _at_home(self, session: Session) -> bool:
        """Whether a session's memory is here; if not, see to it that it comes.

        One that leaves is called back, unless somebody before it waits for the room that it leaves.
        """
        registry = self.registry
        if session.place is Place.LEAVING and not self._short and session.tenant not in self._full:
            registry.discard_parcel(session, registry.ledger.step)
        if session.place is Place.AWAY:
            self.restore(session)
        return session.place is Place.HOME

    def restore(self, session: Session) -> bool:
        """Start bringing a session's memory back; give it up where that can never succeed."""
        registry = self.registry
        parcel = session.parcel
        assert parcel is not None
        transit = registry.ledger.holder(Kind.TRANSIT, session.id, session.tenant)
        registry.ledger.purpose = "restore"
        while True:
            try:
                registry.moves += start_restore(session.sequence, parcel, transit, registry.number())
            except OutOfUnits as shortfall:
                if not self.pressure.make_room(shortfall, session, may_retract=False):
                    if self._in_vain(shortfall, session):
                        registry.give_up(session)
                    else:
                        self._wait_for_room(shortfall, session)
                    return False
                continue
            session.moved("restore")
            session.sequence.fence = registry.ledger.step
            registry.transits[parcel.transit] = session
            return True

    def _in_vain(self, shortfall: OutOfUnits, session: Session) -> bool:
        """Whether waiting would bring no room: nothing runs or moves that could give some back."""
        registry = self.registry
        if not isinstance(shortfall, OverQuota):
            return not (registry.running or registry.transits or registry.flights or self._plan)
        plans = (*registry.flights, self._plan)
        rows = (row.turn.session_id for plan in plans for row in plan.rows)
        computing = (registry.sessions[name] for name in rows if name in registry.sessions)
        busy = (*registry.running, *registry.transits.values(), *computing)
        return all(other.tenant != session.tenant for other in busy)

    def _try_admit(self, plan: Plan, session: Session, turn: Turn, budget: int) -> int | None:
        """Admit one turn with its first row; returns the tokens planned: 0 without room, None over quota.

        Where nothing would give back what a whole chunk needs, it is as long as there is room for. Where that
        does not help the turn gives up its session's memory: with all of it to itself, it is computed again.
        """
        registry = self.registry
        while True:
            admission = Admission(registry, session, turn)
            try:
                admission.take()
                taken = self._row(plan, session, turn, budget, [])
            except OutOfUnits as shortfall:
                admission.undo()
                if self.pressure.make_room(shortfall, session, may_retract=False):
                    continue
                available = shortfall.pool.available(session.holder.account)
                if available < shortfall.asked and self._in_vain(shortfall, session):
                    room = available * registry.ledger.layout.page_size
                    if 0 < room < budget:
                        budget = room
                        continue
                    registry.give_up(session)
                return None if isinstance(shortfall, OverQuota) else 0
            self._admitted(session, turn)
            return taken

    def _admitted(self, session: Session, turn: Turn) -> None:
        registry = self.registry
        registry.wait_no_more(session, turn)
        self.forget(turn)
        registry.resting.pop(session, None)
        registry.seals.pop(session, None)
        registry.running.append(session)
        session.on("admit")
        turn.on("admit")
        if turn.admitted is None:
            turn.admitted = self.registry.now
        registry.counters.admitted += 1
        if not turn.retracts:
            mark = session.sequence.mark
            assert mark is not None
            # The one token that a seal would have computed counts as cached: it is no work of this turn's.
            late = mark.point.length == turn.known_before - 1
            turn.cached = turn.known_before if late else mark.point.length
            registry.counters.cached_tokens += turn.cached

    def forget(self, turn: Turn) -> None:
        """A turn waits no more: what was found for its prompt is of no use."""
        self._matches.pop(turn.number, None)

    def _cached(self, turn: Turn) -> int:
        """How many tokens of a waiting turn's prompt are in memory, as of the tree's present shape."""
        session = self.registry.sessions[turn.session_id]
        if session.sequence.lease is not None:
            return session.sequence.computed
        return self._match(session, turn)[1]

    def _match(self, session: Session, turn: Turn) -> tuple[int, int, bytes]:
        tree = self.registry.tree
        known = self._matches.get(turn.number)
        if known is None or known[0] != tree.version:
            packed = known[2] if known is not None else packed_prompt(session, turn)
            match = tree.match(session.tenant, packed, match_limit(turn, packed))
            known = self._matches[turn.number] = (tree.version, match.length, packed)
        return known

    def _waits_for_prefix(self, session: Session, turn: Turn) -> bool:
        """Whether another turn is computing a longer prefix of this prompt than the tree has.

        Where a prefix can be resumed only from a point, the other turn is asked to leave one; if it is past
        the place already, waiting would gain nothing.
        """
        if session.sequence.lease is not None or turn.known_before:
            return False
        registry = self.registry
        page_bytes = registry.tree.page_bytes
        page_size = registry.ledger.layout.page_size
        _, matched, packed = self._match(session, turn)
        for other in registry.running:
            running = other.turn
            assert running is not None
            if other.tenant != session.tenant or running.known_before or running.ending is not None:
                continue
            sequence = other.sequence
            end = (running.input_end - 1) // page_size * page_size
            if sequence.lease is None or sequence.lease.length >= end:
                continue
            theirs = sequence.tokens.packed(0, end)
            limit = min(len(theirs), match_limit(turn, packed) * TOKEN_BYTES) // page_bytes
            shared = _shared_pages(theirs, packed, limit, page_bytes) * page_size
            if shared <= matched:
                continue
            if registry.ledger.layout.cuts_anywhere:
                return True
            if any(point.length == shared for point in sequence.points):
                return True
            if sequence.planned < shared:
                sequence.cut_chunk_at(shared)
                return True
        return False


def _runs(session: Session) -> bool:
    """Whether a session's turn is running and not about to end."""
    return session.life is Life.RUNNING and session.turn is not None and session.turn.ending is None


def _shared_pages(left: bytes, right: bytes, limit: int, page_bytes: int) -> int:
    """How many whole pages two packed runs have in common, at most `limit`."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if left[low * page_bytes : middle * page_bytes] == right[low * page_bytes : middle * page_bytes]:
            low = middle
        else:
            high = middle - 1
    return low
