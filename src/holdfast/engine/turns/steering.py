"""Steering: a turn that cuts the previous one after the heard tokens, and continues from there.

A running turn is aborted as soon as the steering turn arrives, which waits only for its rows in flight: at
most one step lies between the two. A finished turn is cut when the steering turn begins. A refused steering
turn cuts nothing. Used by `submission`.
"""

from __future__ import annotations

from holdfast.core.errors import NothingToKeep, SessionBusy, UnknownTurn
from holdfast.core.requirements import require_fit
from holdfast.core.session import Life, Session
from holdfast.core.turn import KEEP_ALL, Turn
from holdfast.engine.loop import EngineLoop
from holdfast.engine.turns.beginner import TurnBeginner
from holdfast.engine.turns.history import note_cut
from holdfast.engine.turns.spec import TurnSpec
from holdfast.engine.turns.waiting import is_aborting

__all__ = ["Steering"]


class Steering:
    """The steering turns of one engine."""

    __slots__ = ("_loop", "_turns")

    def __init__(self, loop: EngineLoop, turns: TurnBeginner) -> None:
        self._loop = loop
        self._turns = turns

    def stop(self, session: Session, spec: TurnSpec) -> bool:
        """Abort the turn that runs on a session, for a turn that steers.

        False if none runs, or if it was aborted already: then it is cut when the steering turn begins.
        """
        turn, keep = session.turn, spec.steers
        assert keep is not None
        if turn is None or turn.is_open:
            return False
        if session.life is Life.CLOSING or turn.request.turn_id == spec.turn_id:
            raise SessionBusy(f"session {session.id} is {session.state}, with turn {turn.request.turn_id}")
        self._require_fit(session, turn, spec, turn.generated if keep == KEEP_ALL else keep)
        if is_aborting(turn):
            return False
        now = self._loop.now()
        self._loop.scheduler.abort(session.id, turn.request.turn_id, now, keep, "steered")
        return True

    def cut(self, session: Session, spec: TurnSpec) -> None:
        """Cut the last turn of a session, which has finished, for a turn that steers."""
        last, keep = session.last, spec.steers
        assert keep is not None
        if last is None:
            raise UnknownTurn(f"session {session.id} has no turn to steer: send this one without a mode")
        if keep in (KEEP_ALL, last.generated):
            return
        self._require_fit(session, last, spec, keep)
        self._loop.session_log.require_writable()
        self._loop.scheduler.interrupt(session.id, self._loop.now(), keep)
        self._loop.dispatcher.note_opened(session)
        note_cut(self._loop, session, keep)

    def fitted(self, session: Session, spec: TurnSpec) -> TurnSpec:
        """The turn as it follows the kept tokens: an answer with its end token does not get another."""
        known, log = session.history, session.sequence.tokens
        ends = self._loop.setup.end_tokens
        if known and spec.tokens and spec.tokens[0] in ends and log[known - 1] == spec.tokens[0]:
            return spec._replace(tokens=spec.tokens[1:])
        return spec

    def _require_fit(self, session: Session, turn: Turn, spec: TurnSpec, kept: int) -> None:
        """Raise what would refuse the turn, before anything is cut."""
        if not 0 <= kept <= turn.generated:
            raise NothingToKeep(f"{kept} tokens cannot be kept: {turn.generated} were generated")
        known = turn.input_end + kept
        sampling = spec.sampling.with_defaults(self._loop.setup.defaults)
        sampling.choice(spec.choice).check_vocabulary(self._loop.setup.model.config.vocabulary)
        request = self._turns.request(spec, sampling, known)
        drafting = self._loop.speculator is not None
        require_fit(self._loop.scheduler.registry, session.tenant, known, request, drafting)
