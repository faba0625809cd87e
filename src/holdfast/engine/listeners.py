"""The listeners of the engine: the caller of a verb, the caller of a turn, and an observer of sessions.

`engine.engine` implements them for callers in this process, `server.link.results` for the API process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Protocol

from holdfast.core.errors import Refused
from holdfast.core.events import Event
from holdfast.core.session import Session
from holdfast.core.turn import Turn
from holdfast.engine.durable.records import FinishedTurn
from holdfast.engine.sampling import SamplingError
from holdfast.engine.text.stream import TurnStream

__all__ = ["Refusal", "Refusing", "Reply", "SessionObserver", "TurnListener", "Unobserved"]

Refusal = Refused | SamplingError
"""Why a verb was not carried out; it has changed nothing."""


class Reply(Protocol):
    """The caller of a verb. Exactly one of the two methods is called, once."""

    def done(self, session_id: str | None, answer: object = None) -> None:
        """The verb has been carried out and is durable; `session_id` is the session that came of it."""

    def refused(self, refusal: Refusal) -> None:
        """The verb was refused."""


class TurnListener(ABC):
    """The caller of a turn.

    One of `refused`, `replayed`, `dropped` and `begun` is called once; after `begun`, `hear` is called for
    each event of the turn, the last of which is its end.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def turn(self) -> Turn | None:
        """The turn, once it has begun."""

    @abstractmethod
    def begun(self, turn: Turn, stream: TurnStream) -> None:
        """The turn is queued; its output will be in `stream`."""

    @abstractmethod
    def refused(self, refusal: Refusal) -> None:
        """The turn was refused."""

    @abstractmethod
    def hear(self, event: Event) -> None:
        """Tokens of the turn, or its end. An end that stands is durable."""

    def replayed(self, finished: FinishedTurn, session: Session) -> None:
        """The turn has been carried out before; only a turn with a fingerprint is."""
        raise AssertionError(f"turn {finished.turn_id} of {session.id} has no fingerprint")

    def dropped(self, reason: str) -> None:
        """The turn was aborted while it waited for its session."""
        raise AssertionError(f"a turn that cannot wait was dropped: {reason}")


class SessionObserver(Protocol):
    """Hears of what happens to sessions without a verb or a turn."""

    def session_closed(self, session_id: str, reason: str, expired: bool, moved: bool) -> None:
        """A session was closed, durably: by a verb, at its time to live, or at the end of its one turn.

        One that has `moved` is another server's now.
        """

    def finding(self) -> None:
        """The audit has found something."""


class Unobserved:
    """A `SessionObserver` that ignores everything."""

    def session_closed(self, session_id: str, reason: str, expired: bool, moved: bool) -> None:
        """Ignored."""

    def finding(self) -> None:
        """Ignored; the log has it."""


class Refusing:
    """A block of a verb that may be refused: the caller is told, and the block has changed nothing."""

    __slots__ = ("_reply",)

    def __init__(self, reply: Reply | TurnListener) -> None:
        self._reply = reply

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Refusal):
            return False
        self._reply.refused(error)
        return True
