"""Settling a step: the results of its rows become tokens, ends of turns, and memory at rest.

A row that went well advances its sequence. Forced tokens are known at once, and a later row computes them
like a prompt; a row in flight that was to sample at their positions no longer samples. A turn that is to end
does so when none of its rows is in flight. A step that failed takes its turns back to their marks, voids the
plans made after it, and is tried again once; the turns of a second failure fail. Nothing here lets an
executor's fault touch another session.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.events import Event, EventKind
from holdfast.core.fallback import fall_back, forget_rows, keep, rollback
from holdfast.core.in_flight import Plan
from holdfast.core.ledger import OutOfUnits
from holdfast.core.listening import carry_out_revision, revise_log
from holdfast.core.plan import Row, RowResult, StepResult
from holdfast.core.pressure import take_back
from holdfast.core.registry import Registry
from holdfast.core.session import Life, LifeEvent, Place, PlaceEvent, Session
from holdfast.core.sharing import leave_history, publish
from holdfast.core.tiers import finish_restore
from holdfast.core.turn import KEEP_ALL, NEVER, Ending, Turn, TurnEvent, TurnState

FAILURES_MAX = 2
EXPECTED_SECONDS_MAX = 365 * 86400.0

# Named here because looking up a member of an enum costs as much as the rest of a row's checks.
RUNNING = TurnState.RUNNING
TOKENS = EventKind.TOKENS


class Settler:
    """Applies the results of steps.

    Turns `ahead` have taken forced tokens in this step while a row of theirs is in flight.
    """

    __slots__ = ("ahead", "registry")

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.ahead: set[Turn] = set()

    def settle(self, plan: Plan, result: StepResult) -> None:
        """Apply one step's result. Steps settle in the order in which they were planned."""
        registry = self.registry
        error = result.error
        if error is None and len(result.rows) != len(plan.rows):
            error = f"{len(result.rows)} results came back for {len(plan.rows)} rows"
        if plan.void:
            self._lose_moves(plan)
        elif error is not None:
            self._fail_step(plan, error)
        else:
            self._settle_moves(plan, result.moved)
            for owner in plan.copied:
                if owner.sequence.lease is not None:
                    owner.sequence.lease.unlock_tail(plan.step)
            for row, out in zip(plan.rows, result.rows, strict=True):
                self._settle_row(row, out)
            if self.ahead:
                self._withdraw_samples()
        registry.ledger.settle(plan.step)

    # --- rows -------------------------------------------------------------------------------------

    def _settle_row(self, row: Row[Turn], out: RowResult) -> None:
        registry = self.registry
        turn = row.turn
        session = registry.sessions[turn.session_id]
        session.unsettled -= 1
        if turn.state is not RUNNING:
            assert not session.unsettled, "one row at most outlives its turn"
            if out.error is not None:
                self._unseal(session)
                return
            registry.counters.computed_tokens += row.count
            sequence = session.sequence
            sequence.advance(row.count)
            if sequence.computed < sequence.known and session.life is Life.SEALING and not session.one_shot:
                self._queue_seal(session)
            else:
                self._sealed(session)
            return
        if row.sample:
            turn.awaiting -= 1
        ending = turn.ending
        if ending is None or ending.trusted:
            fault = out.error or self._fault(row, out)
            if fault is None:
                self._advance(session, turn, row, out)
            else:
                self._note_fault(turn, out.error, fault)
        if turn.ending is not None and not session.unsettled:
            self.end(session)

    def _advance(self, session: Session, turn: Turn, row: Row[Turn], out: RowResult) -> None:
        """A row succeeded: its tokens are in memory, its sampled token is known."""
        sequence = session.sequence
        registry = self.registry
        tokens = out.tokens
        count = row.count
        registry.counters.computed_tokens += count
        if row.drafts:
            accepted = len(tokens) - out.forced - 1
            registry.counters.drafted_tokens += row.drafts
            registry.counters.accepted_tokens += accepted
            sequence.settle_drafts(count, count - row.drafts + accepted)
        else:
            sequence.advance(count)
        if sequence.computed >= turn.publish_at and turn.revised == NEVER:
            turn.publish_at = NEVER
            self._publish(session, turn)
        if not row.sample:
            if turn.revised != NEVER:
                if turn.ending is None:
                    carry_out_revision(registry, session, turn)
            elif not turn.request.max_tokens and sequence.computed == sequence.known:
                self._finish_computing(session, turn)
            return
        sequence.tokens.extend(tokens)
        turn.generated += len(tokens)
        registry.counters.generated_tokens += len(tokens)
        if out.forced and session.unsettled:
            self.ahead.add(turn)
        ending = turn.ending
        if turn.first_token is None:
            turn.first_token = registry.now
        if ending is None or ending.event is TurnEvent.RETRACT or ending.keep == KEEP_ALL:
            registry.events.append(Event(TOKENS, session.id, turn, tokens, ""))
        if ending is not None and ending.event is not TurnEvent.RETRACT:
            return
        if out.finish is not None:
            self._finish(session, turn, out.finish)
        elif turn.generated >= turn.request.max_tokens:
            self._finish(session, turn, "length")

    def _withdraw_samples(self) -> None:
        """Withdraw samples in flight of turns that are ahead: forced tokens are at their positions."""
        for plan in self.registry.in_flight.plans:
            for row in plan.rows:
                if row.sample and row.turn in self.ahead:
                    row.sample = False
                    row.turn.awaiting -= 1
        self.ahead.clear()

    def _publish(self, session: Session, turn: Turn) -> None:
        """A first turn's prompt is computed: others may lean on its whole pages from now on."""
        page_size = self.registry.ledger.layout.page_size
        end = (turn.input_end - 1) // page_size * page_size
        lease = session.sequence.lease
        if lease is not None and lease.length < end and lease.record.tail is None:
            publish(self.registry.tree, session.sequence, end, rank=0 if session.one_shot else 1)

    def _fault(self, row: Row[Turn], out: RowResult) -> str | None:
        """A fault in a row's result, or None."""
        tokens = out.tokens
        if not row.sample:
            return f"{len(tokens)} tokens came back where none was asked for" if tokens else None
        if out.forced or not 1 <= len(tokens) <= row.drafts + 1:
            miscount = _miscount(row, out)
            if miscount is not None:
                return miscount
        vocabulary = self.registry.policy.vocabulary
        for token in tokens:
            if not 0 <= token < vocabulary:
                return f"token {token} is not in the vocabulary of {vocabulary}"
        return None

    def _note_fault(self, turn: Turn, error: str | None, fault: str) -> None:
        """A row went wrong: its turn is tried again once, unless the row itself says that it cannot be."""
        turn.failures += 1
        if error is not None or turn.failures >= FAILURES_MAX:
            turn.ending = Ending(TurnEvent.FAIL, fault, trusted=False)
        elif turn.ending is None or turn.ending.event is TurnEvent.RETRACT:
            turn.ending = Ending(TurnEvent.RETRACT, fault, trusted=False)
        else:
            turn.ending = Ending(turn.ending.event, turn.ending.reason, turn.ending.keep, trusted=False)

    # --- ends of turns ----------------------------------------------------------------------------

    def _finish_computing(self, session: Session, turn: Turn) -> None:
        """The whole input of a turn that samples nothing is computed: it ends, unless it ends otherwise."""
        if turn.ending is None or turn.ending.event is TurnEvent.RETRACT:
            self._finish(session, turn, "length")

    def _finish(self, session: Session, turn: Turn, reason: str) -> None:
        """A turn ends well. A row still in flight, or further rows, compute its last tokens."""
        registry, sequence = self.registry, session.sequence
        turn.ending = None
        turn.on(TurnEvent.FINISH)
        sequence.commit(session.holder, session.checkpoints)
        session.boundaries.append(sequence.known)
        session.last = turn
        turn.unsealed = sequence.known - sequence.planned
        session.durable = session.volatile or not registry.policy.durable_turns
        self._depart(session)
        if turn.request.expect_return is not None:
            session.expected = registry.now + min(EXPECTED_SECONDS_MAX, turn.request.expect_return)
            registry.watch_return(session)
        registry.emit(EventKind.FINISHED, session, turn, reason)
        if session.unsettled:
            session.on(LifeEvent.SEAL)
        elif session.one_shot:
            session.on(LifeEvent.END)
            self.close(session, "finished")
        else:
            session.on(LifeEvent.SEAL)
            if turn.request.max_tokens:
                assert sequence.computed < sequence.known, "what was sampled last is not computed yet"
                self._queue_seal(session)
            else:
                assert sequence.computed == sequence.known, "there is nothing to seal"
                self._sealed(session)

    def _queue_seal(self, session: Session) -> None:
        """Let one more row compute tokens at the end of a finished turn."""
        self.registry.queues.seals[session] = None
        self.registry.queues.rest(session)

    def _depart(self, session: Session) -> None:
        """A session's turn is over: it no longer runs, and its idle time counts."""
        self.registry.queues.stop(session)
        self.registry.over(session)

    def _sealed(self, session: Session) -> None:
        """The last row in flight of a turn that is over has settled."""
        registry = self.registry
        if session.life is Life.CLOSING:
            self.close(session, "closed")
        elif session.one_shot and session.turn is None:
            self.close(session, "finished")
        else:
            if session.life is Life.SEALING:
                session.on(LifeEvent.END)
            registry.queues.rest(session)
            self.let_go(session)

    def let_go(self, session: Session) -> None:
        """The last turn is sealed: its mark becomes an ordinary checkpoint, once the turn is durable."""
        if not session.durable or not session.at_rest:
            return
        for point in session.sequence.points:
            point.pinned = False
        session.sequence.thin_points(self.registry.policy.checkpoints)

    def end(self, session: Session) -> None:
        """Carry out how a running turn is to end; none of its rows is in flight."""
        turn = session.turn
        assert turn is not None and turn.ending is not None and not session.unsettled
        ending, turn.ending = turn.ending, None
        certain = None if ending.trusted else forget_rows(session.sequence)
        if turn.revised != NEVER:
            agreed = revise_log(session.sequence, turn)
            certain = agreed if certain is None else min(agreed, certain)
        if ending.event is TurnEvent.RETRACT:
            take_back(self.registry, session, certain)
            return
        if ending.keep is None:
            rollback(session.sequence, session.holder, session.checkpoints, certain)
            if not turn.is_open:
                session.last = None
        else:
            self._keep(session, turn, ending.keep, certain)
        turn.on(ending.event)
        self._depart(session)
        kind = EventKind.ABORTED if ending.event is TurnEvent.ABORT else EventKind.FAILED
        self.registry.emit(kind, session, turn, ending.reason)
        if session.life is Life.CLOSING or session.one_shot:
            if session.life is not Life.CLOSING:
                session.on(LifeEvent.END)
            self.close(session, ending.reason)
            return
        session.on(LifeEvent.END)
        self.registry.queues.rest(session)
        self.let_go(session)

    def _keep(self, session: Session, turn: Turn, generated: int, certain: int | None) -> None:
        """End a turn with what is to be kept of it.

        A first turn that began at a tail has since published more than that: going back to where it began
        cuts inside the lease, and copies a page. Without a page for that, it is all computed again.
        """
        registry, sequence = self.registry, session.sequence
        known = sequence.known if generated == KEEP_ALL else min(sequence.known, turn.input_end + generated)
        registry.ledger.purpose = "cut copy"
        try:
            copies = keep(sequence, known, session.holder, session.checkpoints, certain)
        except OutOfUnits:
            copies = keep(sequence, known, session.holder, session.checkpoints, certain=0)
        registry.in_flight.add_copies(copies, session)
        turn.generated = known - turn.input_end
        session.boundaries.append(known)
        session.last = turn
        session.durable = session.volatile or not registry.policy.durable_turns

    def close(self, session: Session, reason: str) -> None:
        """Give back everything a session has; its history may stay in the tree."""
        registry, sequence = self.registry, session.sequence
        assert session.turn is None and not session.unsettled, "end the turn first"
        keeps = session.one_shot or registry.policy.leave_history
        # Memory that a copy has yet to complete cannot be shared.
        if (
            keeps
            and sequence.lease is not None
            and not sequence.away
            and not registry.in_flight.is_copying(session)
        ):
            leave_history(registry.tree, sequence)
        registry.in_flight.purge_copies(session)
        registry.moves.discard(session)
        sequence.close()
        session.on(LifeEvent.CLOSE)
        registry.leave(session)
        registry.emit(EventKind.CLOSED, session, None, reason)

    # --- steps that failed ------------------------------------------------------------------------

    def _fail_step(self, plan: Plan, error: str) -> None:
        """Take the turns of a failed step, and of all plans made after it, back to their marks."""
        registry, in_flight = self.registry, self.registry.in_flight
        touched: dict[str, bool] = {}
        for row in plan.rows:
            touched[row.turn.session_id] = True
        for later in in_flight.plans:
            later.void = True
            for row in later.rows:
                touched.setdefault(row.turn.session_id, False)
        lost = (plan, *in_flight.plans)
        in_flight.uncopied = {owner: None for each in lost for owner in each.copied}
        self._lose_moves(plan)
        for session_id, guilty in touched.items():
            self._take_from_failed_step(registry.sessions[session_id], guilty, error)
        for owner in [owner for owner in in_flight.uncopied if owner.life is not Life.CLOSED]:
            registry.drop_memory(owner)
        in_flight.uncopied = {}

    def _take_from_failed_step(self, session: Session, guilty: bool, error: str) -> None:
        session.unsettled = 0
        session.sequence.changed = 0  # The executor may not have seen the table changes of a lost plan.
        turn = session.turn
        if turn is not None and session.life in (Life.RUNNING, Life.CLOSING):
            turn.awaiting = 0
            if guilty:
                turn.failures += 1
            ending = turn.ending
            if turn.failures >= FAILURES_MAX and (ending is None or ending.event is TurnEvent.RETRACT):
                ending = Ending(TurnEvent.FAIL, error)
            elif ending is None:
                ending = Ending(TurnEvent.RETRACT, error)
            turn.ending = Ending(ending.event, ending.reason, ending.keep, trusted=False)
            self.end(session)
            return
        self._unseal(session)

    def _unseal(self, session: Session) -> None:
        """A sealing row was lost or failed: fall back to a certain length, or to nothing."""
        registry, sequence = self.registry, session.sequence
        certain = forget_rows(sequence)
        try:
            registry.in_flight.add_copies(fall_back(sequence, certain), session)
        except OutOfUnits:
            sequence.drop_memory()
        self._sealed(session)

    # --- moves between tiers ----------------------------------------------------------------------

    def _settle_moves(self, plan: Plan, moved: Sequence[bool | None]) -> None:
        """Parcels have arrived, or not, or are still under way, all components of one together."""
        outcome: dict[int, bool | None] = {}
        for index, move in enumerate(plan.moves):
            arrived = moved[index] if index < len(moved) else False
            before = outcome.get(move.number, True)
            outcome[move.number] = False if before is False or arrived is False else before and arrived
        for number, arrived in outcome.items():
            if arrived is not None:
                self.arrive(number, arrived)

    def arrive(self, number: int, arrived: bool) -> None:
        """Settle a parcel's move, complete or failed. No effect if the move was cancelled meanwhile."""
        session = self.registry.moves.transits.get(number)
        if session is not None:
            self._settle_parcel(session, arrived)

    def _lose_moves(self, plan: Plan) -> None:
        self._settle_moves(plan, [])

    def _settle_parcel(self, session: Session, arrived: bool) -> None:
        registry, parcel = self.registry, session.parcel
        assert parcel is not None
        del registry.moves.transits[parcel.transit]
        if session.place is Place.LEAVING:
            if arrived:
                registry.has_left(session)
            else:
                registry.moves.discard(session)
        elif arrived:
            finish_restore(session.sequence, parcel)
            session.parcel = None
            registry.moves.came_back(session)
            registry.queues.unheard = registry.queues.unheard or session in registry.queues.listening
            session.moved(PlaceEvent.SETTLE)
            registry.emit(EventKind.RESTORED, session, None)
        else:
            # A parcel that cannot be read is dropped: the session is computed again.
            registry.drop_memory(session)


def _miscount(row: Row[Turn], out: RowResult) -> str | None:
    """A fault in the number of a row's tokens, sampled or forced, or None."""
    sampled = len(out.tokens) - out.forced
    if not 1 <= sampled <= row.drafts + 1:
        return f"{sampled} tokens came back where 1 to {row.drafts + 1} were possible"
    left = row.turn.request.max_tokens - row.turn.generated - sampled
    if not 0 < out.forced <= left:
        return f"{out.forced} forced tokens came back where at most {left} were possible"
    return None
