"""Planning: the rows of the next step.

Decode rows first, then chunks of running prefills, seals, and newly admitted turns, all under one token
budget, which is smaller while answers are generated (step_size.py); the rest goes to open turns. The oldest
running turn is served first, so it always progresses; an input longer than a step leaves half of it to
others. With overlap a plan is made while the previous one is in flight: the tokens being sampled then count
as known.

`Planner` lasts as long as the scheduler. `PlanBuilder` is the state of one plan in the making.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.core.admission import Admission
from holdfast.core.in_flight import Plan
from holdfast.core.ledger import OutOfUnits, OverQuota
from holdfast.core.listening import leave_point_ahead
from holdfast.core.plan import Row
from holdfast.core.policy import queue_order
from holdfast.core.prefetch import Prefetch
from holdfast.core.pressure import Pressure, Shortage
from holdfast.core.prompts import Prompts
from holdfast.core.registry import Registry
from holdfast.core.session import Life, LifeEvent, Place, Session
from holdfast.core.step_size import step_budget
from holdfast.core.tokens import all_known
from holdfast.core.turn import NEVER, Turn, TurnEvent

AHEAD_MAX = 8
"""Waiting turns for whose memory room is made at a time."""

Proposer = Callable[[Session, Turn], list[int]]


class Planner:
    """Makes plans. `propose` guesses the next tokens of a turn, if anything does."""

    __slots__ = ("prefetch", "pressure", "prompts", "propose", "registry")

    def __init__(self, registry: Registry, pressure: Pressure, propose: Proposer | None) -> None:
        self.registry = registry
        self.pressure = pressure
        self.propose = propose
        self.prompts = Prompts(registry)
        self.prefetch = Prefetch(registry, pressure)

    def fill(self, plan: Plan, budget: int) -> None:
        """Put rows, copies and moves into a plan of at most `budget` tokens, fewer beside answers."""
        PlanBuilder(self, plan, budget).build()


class PlanBuilder:
    """One plan in the making: `budget` tokens are left.

    While a turn lacks memory (`short`), or its tenant is at its quota (`full`), memory that becomes free is
    for that turn: no other turn is admitted, or none of that tenant.
    """

    __slots__ = ("budget", "full", "plan", "planner", "pressure", "registry", "short")

    def __init__(self, planner: Planner, plan: Plan, budget: int) -> None:
        self.planner = planner
        self.registry = planner.registry
        self.pressure = planner.pressure
        self.plan = plan
        self.budget = budget
        self.short = False
        self.full: set[str] = set()

    def build(self) -> None:
        """Make the whole plan."""
        self.pressure.spare_units()
        self._answer()
        self.budget = step_budget(self.registry, self.budget, self.planner.propose is not None)
        prefilling = self._decode()
        for place, session in enumerate(prefilling, start=1):
            if self.budget > 0:
                others = place < len(prefilling) or self._awaits_admission()
                self.budget -= self._chunk(session, self._part(session) if others else self.budget)
        self._seal()
        recalled = self._recall()
        self._admit()
        self._listen()
        self.planner.prefetch.fetch(self.short, self.full)
        for session in recalled:
            del self.registry.queues.recalled[session]
        self.registry.in_flight.load(self.plan)
        self.registry.moves.load(self.plan)

    # --- running turns ----------------------------------------------------------------------------

    def _decode(self) -> list[Session]:
        """Add a row for each running turn that waits for one token only; returns the others."""
        rows, step, budget = self.plan.rows, self.plan.step, self.budget
        ledger, drafting = self.registry.ledger, self.planner.propose is not None
        stateful, running = ledger.layout.state, Life.RUNNING
        prefilling: list[Session] = []
        for session in list(self.registry.queues.running):
            turn = session.turn
            if turn is None or turn.ending is not None or session.life is not running:
                continue
            sequence = session.sequence
            start = sequence.planned
            tokens = sequence.tokens
            todo = len(tokens) + turn.awaiting - start
            mark = sequence.mark
            # A row that ends at a cut leaves a point there; an input that is only computed has no decode row.
            if todo > 1 or drafting or (todo == 1 and mark and (mark.cuts or not turn.request.max_tokens)):
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
        self.budget = budget
        return prefilling

    def _extend_under_pressure(self, session: Session, shortfall: OutOfUnits) -> bool:
        """Make room for one more token of a running turn; False if it must wait."""
        while self._room(shortfall, session):
            try:
                session.sequence.extend(1)
            except OutOfUnits as another:
                shortfall = another
            else:
                return True
        return False

    def _room(self, shortfall: OutOfUnits, session: Session) -> bool:
        """Whether a running turn that found no memory may try again now."""
        room = self.pressure.make_room(shortfall, session, may_retract=True)
        if not room:
            self._wait_for_room(shortfall, session)
        return room and _runs(session)

    def _wait_for_room(self, shortfall: OutOfUnits, session: Session) -> None:
        """Keep memory that becomes free for a session that lacks it in this plan."""
        if isinstance(shortfall, OverQuota):
            self.full.add(session.tenant)
        else:
            self.short = True

    def _part(self, session: Session) -> int:
        """An input's share of the budget before others: half of it, unless it ends in this step."""
        left = session.sequence.known - session.sequence.planned
        return self.budget if left <= self.budget else -(-self.budget // 2)

    def _chunk(self, session: Session, budget: int) -> int:
        """Add a row of as many tokens as are known, allowed and affordable; returns how many.

        Without room for drafts the row goes without them: no turn is retracted for a guess. Without room for
        a whole chunk even under pressure, smaller ones are tried, so that the oldest turn always gets on.
        """
        turn = session.turn
        if turn is None or not _runs(session):
            return 0
        drafts = self._drafts(session, turn)
        if drafts is None:
            return 0
        while budget > 0:
            try:
                return self._row(session, turn, budget, drafts)
            except OutOfUnits as shortfall:
                if drafts:
                    if not self.pressure.make_room(shortfall, session, may_retract=False):
                        drafts = []
                elif not self._room(shortfall, session):
                    budget = self._smaller(session, budget, shortfall) if _runs(session) else 0
        return 0

    def _smaller(self, session: Session, budget: int, shortfall: OutOfUnits) -> int:
        """A smaller chunk than one without room: half of it, or as much as the free pages hold."""
        registry, sequence = self.registry, session.sequence
        pages = Shortage(registry, shortfall).room
        room = sequence.capacity - sequence.planned + pages * registry.ledger.layout.page_size
        return min(room, min(budget, max(1, sequence.known - sequence.planned)) // 2)

    def _drafts(self, session: Session, turn: Turn) -> list[int] | None:
        """Guesses for the next tokens; None if the turn must wait for its row in flight."""
        propose, policy = self.planner.propose, self.registry.policy
        if propose is None:
            return []
        if session.unsettled:
            return None
        sequence = session.sequence
        todo = sequence.known - sequence.planned
        room = min(turn.request.max_tokens - turn.generated - 1, self.budget - todo)
        if todo < 1 or room < 1 or sequence.next_cut() is not None or todo > policy.chunk_tokens:
            return []
        drafts = propose(session, turn)[: min(room, policy.drafts_max)]
        return drafts if all_known(drafts, policy.vocabulary) else []

    def _row(self, session: Session, turn: Turn, budget: int, drafts: list[int]) -> int:
        """Reserve memory for one row and add it, or raise and change nothing; returns its tokens."""
        sequence, ledger = session.sequence, self.registry.ledger
        start = sequence.planned
        # The last token of an open input is left for the row that samples.
        known = sequence.known + turn.awaiting - turn.is_open
        count = min(known - start, budget, self.registry.policy.chunk_tokens)
        cut = sequence.next_cut()
        if cut is not None:
            count = min(count, cut - start)
        assert count > 0, "a turn that runs has something to compute"
        whole = start + count == known
        assert whole or not drafts, "drafts follow everything that is known"
        source = sequence.state_source() if ledger.layout.state else None
        ledger.purpose = "draft reserve" if drafts else "chunk" if turn.computed else "first chunk"
        if drafts:
            sequence.extend_drafts(count + len(drafts))
        else:
            sequence.extend(count)
        sample = whole and not turn.is_open and turn.generated + turn.awaiting < turn.request.max_tokens
        tokens = sequence.tokens.slice(start, start + count) + drafts
        total = count + len(drafts)
        row: Row[Turn] = Row(turn, session.number, start, total, tokens, sample, sequence.table_changes())
        row.drafts = len(drafts)
        if ledger.layout.state:
            destination = sequence.spare if drafts else sequence.state
            assert destination is not None, "a row of a state layout has a slot to write to"
            row.state = (source, destination.units[0])
        if sample:
            turn.awaiting += 1
        turn.computed += total
        session.unsettled += 1
        sequence.fence = self.plan.step
        self.plan.rows.append(row)
        if cut is not None and sequence.planned == cut:
            sequence.pass_cut()
        return total

    # --- sessions whose last tokens are not computed yet ------------------------------------------

    def _seal(self) -> None:
        """Compute the last tokens of turns that finished a while ago, oldest first.

        Only where pages are free: a seal takes no other's memory.
        """
        queues, ledger = self.registry.queues, self.registry.ledger
        chunk_tokens = self.registry.policy.chunk_tokens
        for session in list(queues.seals):
            if self.budget < 1 or not self.registry.seals_due(self.registry.now):
                break
            del queues.seals[session]
            sequence, turn = session.sequence, session.last
            assert session.life is Life.SEALING and turn is not None and session.place is Place.HOME
            start = sequence.planned
            count = min(sequence.known - start, self.budget, chunk_tokens)
            source = sequence.state_source() if ledger.layout.state else None
            ledger.purpose = "seal"
            try:
                sequence.extend(count)
            except OutOfUnits:
                session.on(LifeEvent.END)
                continue
            inputs = sequence.tokens.slice(start, start + count)
            row: Row[Turn] = Row(turn, session.number, start, count, inputs, False, sequence.table_changes())
            if ledger.layout.state:
                assert sequence.state is not None
                row.state = (source, sequence.state.units[0])
            session.unsettled += 1
            sequence.fence = self.plan.step
            queues.resting.pop(session, None)
            self.plan.rows.append(row)
            self.budget -= count

    # --- sessions that a verb waits for -----------------------------------------------------------

    def _recall(self) -> list[Session]:
        """Bring memory back that a verb waits for, before turns are admitted; returns whose has come.

        While a turn lacks memory nothing is brought back.
        """
        queues = self.registry.queues
        for session in list(queues.recalled):
            if not self._keeps_room_for(session):
                self._at_home(session)
        return queues.held

    # --- waiting turns ----------------------------------------------------------------------------

    def _admit(self) -> None:
        """Admit waiting turns, in the order of the policy, while budget and memory last.

        A turn without room, waiting or running, blocks those after it, or it might wait for ever. A tenant at
        its quota blocks only its own turns: the others are looked through once more, without it.
        """
        if self.short:
            return
        tried = -1
        while len(self.full) > tried:
            tried = len(self.full)
            self._admit_others()

    def _admit_others(self) -> None:
        """Admit turns of tenants that are not full, up to the first that is."""
        registry, prompts = self.registry, self.planner.prompts
        if not self._admits():
            return
        waiting = registry.queues.waiting
        order = queue_order(waiting, registry.now, registry.policy, prompts.cached, self.full)
        for place, turn in enumerate(order):
            if not self._admits():
                break
            session = registry.sessions[turn.session_id]
            waits = session.unsettled or not self._at_home(session) or prompts.waits_for_prefix(session, turn)
            if waits and self.short:
                behind = order[place : place + AHEAD_MAX]
                self.pressure.leave_ahead([registry.sessions[each.session_id] for each in behind])
            if (waits or not self._try_admit(session, turn)) and self._keeps_room_for(session):
                break

    def _keeps_room_for(self, session: Session) -> bool:
        """Whether memory that becomes free is for a session that lacks it, or for others of its tenant."""
        return self.short or session.tenant in self.full

    def _awaits_admission(self) -> bool:
        """Whether a turn waits that may be admitted, as far as is known before it is looked at."""
        return bool(self.registry.queue) and not self.short and self._has_place()

    def _admits(self) -> bool:
        """Whether one more turn may run in this plan. If not, waiting turns are not looked at."""
        return self.budget > 0 and self._has_place()

    def _has_place(self) -> bool:
        """Whether one more turn may run."""
        return len(self.registry.queues.running) < self.registry.policy.running_max

    def _at_home(self, session: Session) -> bool:
        """Whether a session's memory is on the device; if not, start bringing it back.

        A spill under way is cancelled, unless a turn before this one waits for the room that it makes.
        """
        if session.place is Place.LEAVING and not self._keeps_room_for(session):
            self.registry.moves.discard(session)
        if session.place is Place.AWAY:
            try:
                self.pressure.restore(session, self.plan)
            except OutOfUnits as shortfall:
                self._wait_for_room(shortfall, session)
        return session.place is Place.HOME

    def _try_admit(self, session: Session, turn: Turn) -> bool:
        """Admit one turn with its first row; False if there is no room for it.

        Where nothing will free what a whole chunk needs, the row is as long as there is room for. Where that
        does not help the turn gives up its session's memory: with all of it to itself, it is computed again.
        """
        registry, budget = self.registry, self.budget
        while True:
            admission = Admission(registry, session, turn)
            try:
                admission.take()
                taken = self._row(session, turn, budget, [])
            except OutOfUnits as shortfall:
                admission.undo()
                if self.pressure.make_room(shortfall, session, may_retract=False):
                    continue
                pages = Shortage(registry, shortfall).room
                if pages < shortfall.asked and self.pressure.in_vain(shortfall, session, self.plan):
                    room = pages * registry.ledger.layout.page_size
                    if 0 < room < budget:
                        budget = room
                        continue
                    registry.give_up(session)
                self._wait_for_room(shortfall, session)
                return False
            self._admitted(session, turn)
            self.budget -= taken
            return True

    def _admitted(self, session: Session, turn: Turn) -> None:
        registry = self.registry
        if turn.is_open:
            registry.queues.attend(session)
        else:
            registry.queues.wait_no_more(session, turn)
            registry.queues.run(session)
        self.planner.prompts.forget(turn)
        session.on(LifeEvent.ADMIT)
        turn.on(TurnEvent.ADMIT)
        if turn.admitted is None:
            turn.admitted = registry.now
        registry.counters.admitted += 1
        if not turn.retracts:
            mark, last = session.sequence.mark, session.last
            assert mark is not None
            # The tokens that a seal would have computed count as cached: they are no work of this turn's.
            seal = 1 if last is None else max(1, last.unsealed)
            late = turn.known_before - seal <= mark.point.length < turn.known_before
            turn.cached = turn.known_before if late else mark.point.length
            registry.counters.cached_tokens += turn.cached

    # --- turns that are open ----------------------------------------------------------------------

    def _answer(self) -> None:
        """Let turns that were committed run, as far as there is room among those that do."""
        queues = self.registry.queues
        for session in list(queues.listening):
            turn = session.turn
            assert turn is not None, "a session that listens has a turn"
            if not turn.is_open and turn.revised == NEVER and self._has_place():
                queues.stop(session)
                queues.run(session)

    def _listen(self) -> None:
        """Compute inputs ahead that are not complete yet, with what other turns have left of the step.

        While one of those lacks memory nothing is computed ahead.
        """
        queues, left = self.registry.queues, min(self.budget, self.registry.policy.listening_tokens)
        queues.unheard, short = False, self.short
        for session in list(queues.listening):
            turn = session.turn
            assert turn is not None, "a session that listens has a turn"
            crowded = left < 1 or len(self.plan.rows) >= self.registry.policy.running_max
            if short or crowded or not turn.is_open:
                queues.unheard = True  # It waits for others; one that was committed, for its place.
            elif session.tenant not in self.full:
                taken = self._compute_ahead(session, turn, left)
                left -= taken
                queues.unheard = queues.unheard or taken > 0

    def _compute_ahead(self, session: Session, turn: Turn, budget: int) -> int:
        """Add a row for an open turn; returns its tokens. It makes room as an admission does."""
        queues = self.registry.queues
        waits = session.life is Life.QUEUED
        if waits:
            # A turn that had to give its memory back does not compete for it again.
            beaten = turn.retracts and (queues.running or queues.waiting.turns)
            if beaten or session.unsettled or not self._at_home(session):
                return 0
        elif not _runs(session) or turn.revised != NEVER:
            return 0
        begun = self.planner.prompts.cached(turn) if waits else session.sequence.planned
        if turn.input_end - 1 <= begun:
            return 0
        while True:
            admission = Admission(self.registry, session, turn)
            try:
                if waits:
                    admission.take()
                else:
                    leave_point_ahead(session.sequence)
                taken = self._row(session, turn, budget, [])
            except OutOfUnits as shortfall:
                if waits:
                    admission.undo()
                if not self.pressure.make_room(shortfall, session, may_retract=False):
                    return 0
                continue
            if waits:
                self._admitted(session, turn)
            return taken


def _runs(session: Session) -> bool:
    """Whether a session's turn is running and not about to end."""
    return session.life is Life.RUNNING and session.turn is not None and session.turn.ending is None
