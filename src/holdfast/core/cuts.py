"""Cuts of a session's history while no turn runs on it, and the memory that a fork shares with its parent.

A cut falls back to a resume point (fallback.py) and forgets the tokens after it. It needs one page or slot at
most, for a copy; where there is no room for it, the session's memory goes and its tokens stay. Called by the
scheduler alone, which has advanced the clock.
"""

from __future__ import annotations

from holdfast.core import errors
from holdfast.core.fallback import fall_back, resume_length
from holdfast.core.ledger import OutOfUnits
from holdfast.core.pressure import Pressure
from holdfast.core.registry import Registry
from holdfast.core.requirements import require_fit
from holdfast.core.session import Life, LifeEvent, Place, Session
from holdfast.core.sharing import fork
from holdfast.core.turn import KEEP_ALL, TurnRequest


class Cuts:
    """Cuts and shares the histories of sessions at rest."""

    __slots__ = ("pressure", "registry")

    def __init__(self, registry: Registry, pressure: Pressure) -> None:
        self.registry = registry
        self.pressure = pressure

    def interrupt(self, session: Session, keep: int | None, turn_id: str | None) -> None:
        """Cut the last turn, which has finished: keep some of its tokens, none (None) or all of them."""
        last = session.last
        if last is None or (turn_id is not None and last.request.turn_id != turn_id):
            raise errors.UnknownTurn(f"session {session.id} has no turn to interrupt")
        if keep is not None and keep != KEEP_ALL and not 0 <= keep <= last.generated:
            raise errors.NothingToKeep(f"{keep} tokens cannot be kept: {last.generated} were generated")
        self.require_idle(session)
        if keep == KEEP_ALL:
            return
        known = last.known_before if keep is None else last.input_end + keep
        self.cut(session, known)
        session.boundaries.pop()
        if keep is None:
            session.last = None
        else:
            last.generated = keep
            session.boundaries.append(known)

    def rewind(self, session: Session, turns: int) -> None:
        """Go back to the end of turn `turns`."""
        if not 0 <= turns <= len(session.boundaries):
            raise errors.UnknownBoundary(f"session {session.id} has only {len(session.boundaries)} turns")
        self.require_idle(session)
        if turns == len(session.boundaries):
            return  # Nothing changes: the last turn can still be cut.
        self.cut(session, session.boundaries[turns - 1] if turns else 0)
        del session.boundaries[turns:]
        session.last = None

    def compact(
        self, session: Session, first: int, last: int, tokens: tuple[int, ...], keep: int | None
    ) -> int:
        """Replace turns by one; returns how many tokens have to be computed again (`Scheduler.compact`)."""
        boundaries, sequence = session.boundaries, session.sequence
        if not 1 <= first <= last <= len(boundaries):
            raise errors.UnknownBoundary(f"session {session.id} has only {len(boundaries)} turns")
        cut = (keep or 0) + (boundaries[first - 2] if first > 1 else 0)
        end, known = boundaries[last - 1], sequence.known
        assert keep is None or 0 <= cut <= cut + len(tokens) <= end, "what fits is made shorter"
        if session.turn is None and keep is None:
            # Nothing is to be generated: what has to fit is what is known afterwards.
            require_fit(self.registry, session.tenant, cut + known - end, TurnRequest("", tokens, 0), False)
        self.require_idle(session)
        later = sequence.tokens.slice(end, known)
        self.cut(session, cut)
        sequence.tokens.extend(tokens)
        sequence.tokens.extend(later)
        moved = cut + len(tokens) - end
        boundaries[first - 1 :] = [cut + len(tokens), *(each + moved for each in boundaries[last:])]
        session.last = None
        return sequence.known - sequence.computed

    def cut(self, session: Session, known: int) -> None:
        """Cut a resting session's history, and its memory as far as it must."""
        registry, sequence = self.registry, session.sequence
        if session.place is Place.LEAVING:
            registry.moves.discard(session)
        pending = registry.in_flight.has_copies_of(session)
        away = known < sequence.computed and (session.place is not Place.HOME or pending)
        # Where none of its own memory can be resumed from, the tree may have some.
        if away or (known and not resume_length(sequence, known)):
            registry.drop_memory(session)
        registry.ledger.purpose = "cut copy"
        while True:
            try:
                registry.in_flight.add_copies(fall_back(sequence, known), session)
                break
            except OutOfUnits as shortfall:
                if not self.pressure.make_room(shortfall, session, may_retract=False):
                    registry.give_up(session)
        sequence.tokens.cut(known)

    def require_idle(self, session: Session) -> None:
        """Raise unless nothing is happening on a session; a seal that has not been planned is given up."""
        if session.life is Life.SEALING and not session.unsettled:
            self.registry.queues.seals.pop(session, None)
            session.on(LifeEvent.END)
        if session.life is not Life.IDLE or session.unsettled:
            raise errors.SessionBusy(f"session {session.id} is {session.state}")

    def share(self, parent: Session, child: Session, known: int) -> None:
        """Let a forked session lean on its parent's memory; without room it starts with its tokens alone."""
        registry = self.registry
        registry.ledger.purpose = "fork copy"
        while True:
            try:
                copies = fork(registry.tree, parent.sequence, child.sequence, known)
            except OutOfUnits as shortfall:
                if (
                    self.pressure.make_room(shortfall, parent, may_retract=False)
                    and parent.sequence.lease is not None
                ):
                    continue
                return
            registry.in_flight.add_copies(copies, child)
            registry.queues.rest(child)
            return
