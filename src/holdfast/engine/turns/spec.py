"""A turn as its client asks for it, and the refusals of one that does not fit its session's history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from holdfast.core.errors import Refused
from holdfast.core.session import Session
from holdfast.engine.constraints.grammar import Grammar
from holdfast.engine.sampling import Sampling
from holdfast.engine.tools.answer import AnswerSpec

__all__ = ["HistoryChanged", "HistoryRefused", "HistoryRepeated", "NotesTooLarge", "TurnSpec"]


class HistoryRefused(Refused):
    """A turn does not fit the history of its `session`."""

    def __init__(self, message: str, session: Session) -> None:
        super().__init__(message)
        self.session = session


class HistoryChanged(HistoryRefused):
    """The history has changed since the turn's input was written."""

    code = "history_changed"


class HistoryRepeated(HistoryRefused):
    """The turn opens a history, and the session has one already."""

    code = "history_repeated"
    param = "messages"


class NotesTooLarge(Refused):
    """The notes of a session's turns would take too much memory."""

    code = "notes_too_large"


class TurnSpec(NamedTuple):
    """A turn as its client asks for it: on a session, or (without one) a request of its own.

    `known` is the length of the history that the input was written for; a turn is refused if the history has
    changed, or if it `opens` a history that exists. `fits` shortens `max_tokens` to the rest of the
    context instead of refusing the turn. A turn that `keeps` its output keeps it when it is
    aborted; `timeout` in seconds aborts it. A `fingerprint` of the request makes the turn's id an idempotency
    key: a finished turn with both is replayed instead of being run. The turn's text must match its `grammar`.
    `answer` specifies how reasoning and tool calls are parsed; without it, all of the answer is text.
    `expect_return` is the number of seconds until the client's next turn, with a tool's result. `tools` are
    the session's from now on; None leaves them as they are. A `note` is kept with the turn and its result. A
    `volatile` turn follows the first `keep` tokens of its session, whose other tokens are cut, or of
    `parent`, from which its session is forked; where its session is not open, and there is no parent, the
    turn opens it. A turn that `steers` cuts the turn before it, running or finished, after the first `steers`
    generated tokens (`KEEP_ALL`: all), and continues from there; its tokens are written to follow an
    answer without its end token. `keep_reasoning` says whether the history keeps the reasoning; None:
    the session's setting.
    """

    turn_id: str
    tenant: str
    tokens: Sequence[int]
    sampling: Sampling
    session_id: str | None = None
    choice: int = 0
    known: int | None = None
    opens: bool = False
    goes_on: bool = False
    keeps: bool = False
    fits: bool = False
    timeout: float | None = None
    computes_from: int | None = None
    fingerprint: str | None = None
    grammar: Grammar | None = None
    answer: AnswerSpec | None = None
    expect_return: float | None = None
    tools: list[dict[str, Any]] | None = None
    note: str | None = None
    volatile: bool = False
    keep: int | None = None
    parent: str | None = None
    steers: int | None = None
    keep_reasoning: bool | None = None
