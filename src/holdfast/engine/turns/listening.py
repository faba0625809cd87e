"""Computing the input of a session's next turn while it arrives.

`Ahead` keeps the open turns of the core (`core/listening.py`): `hear` sets the tokens of a session's open
input, `begin` commits it with its turn, `stop` rolls it back. An open turn is also rolled back after
`LISTENING_SECONDS` without input. It is not journaled and has no events. Used by `verbs` and
`turn_beginner`.

Tokens of text are not final before the text is: `settled` omits the last word, and `ahead_of` the tokens
that depend on it. Tokens that change nevertheless are recomputed.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from holdfast.core.events import Event
from holdfast.core.listening import common
from holdfast.core.session import Session
from holdfast.core.turn import Turn, TurnEvent, TurnRequest
from holdfast.engine.listeners import Refusal, TurnListener
from holdfast.engine.sampling import Sampling
from holdfast.engine.text.stream import TurnStream
from holdfast.engine.turns.spec import HistoryChanged

if TYPE_CHECKING:
    from holdfast.engine.loop import EngineLoop

__all__ = ["LISTENING_SECONDS", "Ahead", "ahead_of", "settled"]

LISTENING_SECONDS = 60.0
"""How long an open turn waits for more input, or its commit."""

EXPECTED_SECONDS = 10.0
"""Within what time a turn is expected of a client that connects, or begins to speak."""

WORD_CHARACTERS = 16
"""A last word that is longer may be a script without spaces: then only its end is left out."""
LAST_CHARACTERS = 4


class Unheard(TurnListener):
    """The listener of an open turn; it ignores all events."""

    __slots__ = ()

    @property
    def turn(self) -> Turn | None:
        """None: nobody asked for it."""
        return None

    def begun(self, turn: Turn, stream: TurnStream) -> None:
        """Not told."""

    def refused(self, refusal: Refusal) -> None:
        """Not told."""

    def hear(self, event: Event) -> None:
        """Not told."""


class Ahead:
    """The open turns of one engine."""

    __slots__ = ("_loop",)

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop

    def hear(self, session: Session, said: Sequence[int] | None, known: int | None) -> None:
        """Let the open input of a session be what is `said`, written for a history of `known` tokens.

        Raises a refusal if the session has a turn in flight, or another history. None says that a turn is
        expected: the session's memory comes back, if it is on another tier and nobody needs the room.
        """
        scheduler, now = self._loop.scheduler, self._loop.now()
        if said is None:
            scheduler.planner.prefetch.expect(session, EXPECTED_SECONDS)
            return
        tokens = tuple(said)
        if known not in (None, session.history):
            raise HistoryChanged("the history has changed", session)
        if not tokens:
            self.stop(session.id)
            return
        turn, deadline = _open_turn(session), now + LISTENING_SECONDS
        if turn is not None:
            start = common(turn.request.tokens, tokens)
            scheduler.hear(session.id, turn.request.turn_id, start, tokens[start:], now)
            scheduler.listening.put_off(session, turn, deadline)
            return
        request = TurnRequest(f"open-{secrets.token_hex(4)}", tokens, 1, deadline=deadline)
        turn = scheduler.listen(session.id, request, now)
        setup = self._loop.setup
        stream = TurnStream(setup.tokenizer, Sampling(), setup.end_tokens)
        self._loop.dispatcher.listen(turn, stream, Unheard())

    def begin(self, session: Session, request: TurnRequest) -> Turn:
        """Queue a turn on a session. The computed part of its input stays."""
        scheduler, now = self._loop.scheduler, self._loop.now()
        turn = _open_turn(session)
        if turn is None:
            return scheduler.submit(session.id, request, now)
        number = turn.number
        scheduler.commit(session.id, turn.request.turn_id, request, now)
        del self._loop.dispatcher.live.turns[number]
        return turn

    def stop(self, session_id: str) -> bool:
        """Take back the open turn of a session; whether none is left. It ends when its rows have settled."""
        scheduler = self._loop.scheduler
        session = scheduler.registry.sessions.get(session_id)
        if session is None or session.turn is None or not session.turn.is_open:
            return True
        if _open_turn(session) is not None:
            scheduler.abort(
                session_id, session.turn.request.turn_id, self._loop.now(), reason="not committed"
            )
            self._loop.dispatcher.tell()
        return session.turn is None


def _open_turn(session: Session) -> Turn | None:
    """The open turn of a session, unless it is about to end."""
    turn = session.turn
    if turn is None or not turn.is_open:
        return None
    ending = turn.ending
    return turn if ending is None or ending.event is TurnEvent.RETRACT else None


def settled(text: str) -> str:
    """The part of a text whose tokens more text will hardly change: its whole words, without the space after.

    A last word that no space follows yet may go on.
    """
    words = text.rstrip()
    if len(words) < len(text):
        return words
    begin = max(words.rfind(" "), words.rfind("\n")) + 1
    return words[: begin if len(words) - begin <= WORD_CHARACTERS else -LAST_CHARACTERS].rstrip()


def ahead_of(write: Callable[[str], Sequence[int]], text: str) -> tuple[int, ...]:
    """The tokens of a message that is not complete which may be computed now; `write` makes tokens of one."""
    part = settled(text)
    if not part:
        return ()
    whole, begun = tuple(write(text)), tuple(write(part))
    return whole[: common(whole, begun)]
