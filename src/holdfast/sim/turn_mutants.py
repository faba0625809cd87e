"""Planted bugs of admission and of turns.

Each function replaces one site by a version that differs in the effect of about one statement, and never
raises of itself: the audit, the device or the clients of a simulation must notice it. See planting.py.
"""

from __future__ import annotations

from holdfast.core import errors, fallback, pressure
from holdfast.core.admission import Admission
from holdfast.core.cuts import Cuts
from holdfast.core.layout import Component, Tier
from holdfast.core.ledger import Holder, OutOfUnits
from holdfast.core.planner import PlanBuilder
from holdfast.core.registry import Registry
from holdfast.core.scheduler import Scheduler
from holdfast.core.sequence import Sequence
from holdfast.core.session import Life, Session
from holdfast.core.settler import Settler
from holdfast.core.tiers import own_holds
from holdfast.core.turn import Turn, TurnRequest
from holdfast.sim.planting import Mutant, Patcher


def free_but_keep(patcher: Patcher, sequence: Sequence) -> None:
    """Let units go while a Hold still names them: what freeing the same list a second time does."""
    for hold in list(own_holds(sequence).values())[:1]:
        patcher.reach()
        hold.grant.books.let_go(hold.pool, list(hold.units), 0)


# --- admission ----------------------------------------------------------------------------------------


def failed_admission_keeps_the_slot(patcher: Patcher) -> None:
    """A turn that was matched and given a state slot, and could not be added to the batch, keeps the slot."""
    original = Admission.undo

    def faulty(self: Admission) -> None:
        ledger = self.registry.ledger
        original(self)
        pool = ledger.pools.get((Component.STATE, Tier.DEVICE))
        if pool is not None and pool.free:
            patcher.reach()
            gate = pool.gate
            pool.guard(None)
            patcher.park(ledger.take(pool, 1, self.turn.holder))
            pool.guard(gate)

    patcher.replace(Admission, "undo", faulty)


def failed_admission_keeps_the_lock(patcher: Patcher) -> None:
    """A turn that could not be added to the batch leaves its prefix locked."""
    original = Admission.undo

    def faulty(self: Admission) -> None:
        sequence = self.session.sequence
        leaned, self.leaned = self.leaned, False
        original(self)
        if leaned:
            self.registry.in_flight.purge_copies(self.session)
            patcher.reach()
            patcher.park(sequence.lease)
            sequence.lease = None
            sequence.drop_memory()

    patcher.replace(Admission, "undo", faulty)


def failed_admission_keeps_the_row(patcher: Patcher) -> None:
    """A turn that could not be added is in the batch all the same."""
    original = PlanBuilder._try_admit

    def faulty(self: PlanBuilder, session: Session, turn: Turn) -> bool:
        admitted = original(self, session, turn)
        if not admitted:
            patcher.reach()
            self.registry.queues.running.append(session)
        return admitted

    patcher.replace(PlanBuilder, "_try_admit", faulty)


def admitted_is_freed_as_if_it_had_failed(patcher: Patcher) -> None:
    """What an admitted turn has taken is given back as well."""
    original = PlanBuilder._admitted

    def faulty(self: PlanBuilder, session: Session, turn: Turn) -> None:
        original(self, session, turn)
        free_but_keep(patcher, session.sequence)

    patcher.replace(PlanBuilder, "_admitted", faulty)


def retried_chunk_takes_twice(patcher: Patcher) -> None:
    """A chunk that is tried again after room was made takes a page for each try."""
    original = PlanBuilder._room

    def faulty(self: PlanBuilder, shortfall: OutOfUnits, session: Session) -> bool:
        room = original(self, shortfall, session)
        full = session.sequence.full
        if room and full is not None and len(full.pool.free) > shortfall.asked:
            patcher.reach()
            gate = full.pool.gate
            full.pool.guard(None)
            full.grow(1)
            full.pool.guard(gate)
        return room

    patcher.replace(PlanBuilder, "_room", faulty)


# --- turns that are refused, aborted, retracted --------------------------------------------------------


def second_turn_clears_the_firsts_flight(patcher: Patcher) -> None:
    """A turn that is refused because another is in flight sets the session free."""
    original = Scheduler.submit

    def faulty(
        self: Scheduler, session_id: str, request: TurnRequest, now: float, keep: int | None = None
    ) -> Turn:
        try:
            return original(self, session_id, request, now, keep)
        except errors.SessionBusy:
            patcher.reach()
            self.registry.sessions[session_id].life = Life.IDLE
            raise

    patcher.replace(Scheduler, "submit", faulty)


def refused_turn_overwrites_the_mark(patcher: Patcher) -> None:
    """A refused turn moves the point to which the running one would roll back."""
    original = Scheduler.submit

    def faulty(
        self: Scheduler, session_id: str, request: TurnRequest, now: float, keep: int | None = None
    ) -> Turn:
        try:
            return original(self, session_id, request, now, keep)
        except errors.SessionBusy:
            sequence = self.registry.sessions[session_id].sequence
            if sequence.mark is not None:
                patcher.reach()
                sequence.mark.known = sequence.known
            raise

    patcher.replace(Scheduler, "submit", faulty)


def refused_turn_drops_the_memory(patcher: Patcher) -> None:
    """A turn that is too long costs the session the memory that it has."""
    original = Scheduler.submit

    def faulty(
        self: Scheduler, session_id: str, request: TurnRequest, now: float, keep: int | None = None
    ) -> Turn:
        try:
            return original(self, session_id, request, now, keep)
        except errors.ContextExceeded:
            session = self.registry.sessions[session_id]
            if session.sequence.computed and session.at_rest:
                patcher.reach()
                self.registry.drop_memory(session)
            raise

    patcher.replace(Scheduler, "submit", faulty)


def stale_event_is_accepted(patcher: Patcher) -> None:
    """An abort that names a turn of the past ends the one in flight."""
    original = Scheduler.abort

    def faulty(
        self: Scheduler,
        session_id: str,
        turn_id: str,
        now: float,
        keep: int | None = None,
        reason: str = "abort",
    ) -> None:
        session = self.registry.sessions.get(session_id)
        if session is not None and session.turn is not None and session.turn.request.turn_id != turn_id:
            patcher.reach()
            turn_id = session.turn.request.turn_id
        original(self, session_id, turn_id, now, keep, reason)

    patcher.replace(Scheduler, "abort", faulty)


def queued_abort_leaves_the_session_busy(patcher: Patcher) -> None:
    """Aborting a turn that waits leaves its session in flight for ever."""
    original = Scheduler._drop_waiting

    def faulty(self: Scheduler, session: Session, turn: Turn, reason: str, keep: int | None) -> None:
        original(self, session, turn, reason, keep)
        patcher.reach()
        session.life = Life.QUEUED

    patcher.replace(Scheduler, "_drop_waiting", faulty)


def abort_advances_the_history(patcher: Patcher) -> None:
    """An aborted turn stays in the session's history."""
    original = fallback.rollback

    def faulty(sequence: Sequence, holder: Holder, checkpoints: Holder, certain: int | None = None) -> None:
        assert sequence.mark is not None
        if sequence.known > sequence.mark.known:
            patcher.reach()
            sequence.mark.known = sequence.known
        original(sequence, holder, checkpoints, certain)

    patcher.replace(fallback, "rollback", faulty)


def abort_shrinks_the_history(patcher: Patcher) -> None:
    """An aborted turn takes a token of the committed history with it."""
    original = fallback.rollback

    def faulty(sequence: Sequence, holder: Holder, checkpoints: Holder, certain: int | None = None) -> None:
        original(sequence, holder, checkpoints, certain)
        if sequence.known:
            patcher.reach()
            sequence.tokens.cut(sequence.known - 1)

    patcher.replace(fallback, "rollback", faulty)


def abort_wipes_the_memory(patcher: Patcher) -> None:
    """An abort drops all memory of the session: its next turn computes the whole history again."""
    original = fallback.rollback

    def faulty(sequence: Sequence, holder: Holder, checkpoints: Holder, certain: int | None = None) -> None:
        original(sequence, holder, checkpoints, certain)
        if sequence.computed:
            patcher.reach()
        sequence.drop_memory()

    patcher.replace(fallback, "rollback", faulty)


def first_turn_abort_keeps_the_slot(patcher: Patcher) -> None:
    """The abort of a first turn forgets the state slot that the turn wrote to."""
    original = fallback.rollback

    def faulty(sequence: Sequence, holder: Holder, checkpoints: Holder, certain: int | None = None) -> None:
        assert sequence.mark is not None
        if sequence.mark.known == 0 and sequence.state is not None:
            patcher.reach()
            patcher.park(sequence.state)
            sequence.state = None
        original(sequence, holder, checkpoints, certain)

    patcher.replace(fallback, "rollback", faulty)


def first_turn_abort_keeps_the_lock(patcher: Patcher) -> None:
    """The abort of a first turn leaves the prefix locked that the turn leaned on."""
    original = fallback.rollback

    def faulty(sequence: Sequence, holder: Holder, checkpoints: Holder, certain: int | None = None) -> None:
        original(sequence, holder, checkpoints, certain)
        if sequence.known == 0 and sequence.lease is not None:
            patcher.reach()
            patcher.park(sequence.lease)
            sequence.lease = None
            sequence.drop_memory()

    patcher.replace(fallback, "rollback", faulty)


def keep_counts_one_too_many(patcher: Patcher) -> None:
    """A turn that is cut keeps one token more than its listener heard."""
    original = Settler._keep

    def faulty(self: Settler, session: Session, turn: Turn, generated: int, certain: int | None) -> None:
        if 0 <= generated < session.sequence.known - turn.input_end:
            patcher.reach()
            generated += 1
        original(self, session, turn, generated, certain)

    patcher.replace(Settler, "_keep", faulty)


def retract_clears_the_flight(patcher: Patcher) -> None:
    """A retracted turn is no longer its session's turn, though it waits."""
    original = pressure.take_back

    def faulty(registry: Registry, session: Session, certain: int | None = None) -> None:
        original(registry, session, certain)
        patcher.reach()
        session.turn = None
        session.life = Life.IDLE

    patcher.replace(pressure, "take_back", faulty)


def finished_turn_is_freed_again_by_retract(patcher: Patcher) -> None:
    """A turn that was retracted, or was to be, has its memory freed once more when it finishes."""
    original = Settler._finish

    def faulty(self: Settler, session: Session, turn: Turn, reason: str) -> None:
        ending = turn.ending
        original(self, session, turn, reason)
        retracted = turn.retracts > 0 or ending is not None
        if retracted and session.life is not Life.CLOSED:
            free_but_keep(patcher, session.sequence)

    patcher.replace(Settler, "_finish", faulty)


def rewind_keeps_what_lies_past_the_cut(patcher: Patcher) -> None:
    """A history is cut, but what was computed of it is not."""

    def faulty(_self: Cuts, session: Session, known: int) -> None:
        if session.sequence.computed > known:
            patcher.reach()
        session.sequence.tokens.cut(known)

    patcher.replace(Cuts, "cut", faulty)


def sealed_token_is_counted_twice(patcher: Patcher) -> None:
    """The row that computes a turn's last token advances its session by two."""
    original = Settler._sealed

    def faulty(self: Settler, session: Session) -> None:
        sequence = session.sequence
        if session.life is Life.SEALING and sequence.computed == sequence.known:
            patcher.reach()
            sequence.planned = sequence.computed = sequence.computed + 1
        original(self, session)

    patcher.replace(Settler, "_sealed", faulty)


TURN_MUTANTS = tuple(
    Mutant(name, story, "scheduler", one, plant)
    for name, story, one, plant in (
        ("failed-admission-keeps-the-slot", "A2", True, failed_admission_keeps_the_slot),
        ("failed-admission-keeps-the-lock", "A2", True, failed_admission_keeps_the_lock),
        ("failed-admission-keeps-the-row", "A2", True, failed_admission_keeps_the_row),
        ("admitted-is-freed-as-if-it-had-failed", "A2", True, admitted_is_freed_as_if_it_had_failed),
        ("retried-chunk-takes-twice", "A3", True, retried_chunk_takes_twice),
        ("second-turn-clears-the-firsts-flight", "C2", True, second_turn_clears_the_firsts_flight),
        ("refused-turn-overwrites-the-mark", "C4", True, refused_turn_overwrites_the_mark),
        ("refused-turn-drops-the-memory", "B5", True, refused_turn_drops_the_memory),
        ("stale-event-is-accepted", "C4", True, stale_event_is_accepted),
        ("queued-abort-leaves-the-session-busy", "B4", True, queued_abort_leaves_the_session_busy),
        ("abort-advances-the-history", "A5", True, abort_advances_the_history),
        ("abort-shrinks-the-history", "A5", True, abort_shrinks_the_history),
        ("abort-wipes-the-memory", "A5", True, abort_wipes_the_memory),
        ("first-turn-abort-keeps-the-slot", "C3", True, first_turn_abort_keeps_the_slot),
        ("first-turn-abort-keeps-the-lock", "C3", True, first_turn_abort_keeps_the_lock),
        ("keep-counts-one-too-many", "A5", True, keep_counts_one_too_many),
        ("retract-clears-the-flight", "C1", True, retract_clears_the_flight),
        ("finished-turn-is-freed-again-by-retract", "A3", True, finished_turn_is_freed_again_by_retract),
        ("rewind-keeps-what-lies-past-the-cut", "A4", True, rewind_keeps_what_lies_past_the_cut),
        ("sealed-token-is-counted-twice", "A4", True, sealed_token_is_counted_twice),
    )
)
