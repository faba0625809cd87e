"""The parts of an answer as the journal keeps them: plain values, with the places of its calls.

A finished turn keeps its whole answer, so that it can be replayed. The turn's row in the history keeps what
was asked of its output (grammar, formats) and its complete calls, so that a session can go on with their
results after a restart or a fork. The row of a turn with a note keeps the note and the whole result: unlike
those that are kept to be replayed, it stays as long as the turn. Used by the session log and the journal.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from holdfast.engine.constraints.grammar import Grammar
from holdfast.engine.tools.answer import Answer, AnswerSpec
from holdfast.engine.tools.events import Call, Outcome

__all__ = [
    "NotedTurn",
    "StoredAnswer",
    "StoredCall",
    "calls_in",
    "details_of",
    "noted_in",
    "read_answer",
    "stored_answer",
    "without_tokens",
]

COMPLETE = Outcome.COMPLETE.value


class StoredCall(NamedTuple):
    """A tool call; `end` is how many generated tokens its turn has up to the end of the call."""

    id: str
    name: str
    arguments: str
    outcome: str
    end: int

    @property
    def call(self) -> Call:
        """The call as templates take it."""
        return Call(self.id, self.name, self.arguments, Outcome(self.outcome))


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """The parts of an answer besides its text."""

    reasoning: str
    calls: tuple[StoredCall, ...]
    reasoning_tokens: int


@dataclass(frozen=True, slots=True)
class NotedTurn:
    """A note, and the result of its turn as it ended. `answer` if the turn was read for parts."""

    turn_id: str
    note: str
    outcome: str
    reason: str
    text: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    answer: StoredAnswer | None = None


def stored_answer(answer: Answer) -> StoredAnswer:
    """An answer as it is kept."""
    calls = tuple(
        StoredCall(call.id, call.name, call.arguments, call.outcome.value, end)
        for call, end in zip(answer.calls, answer.call_ends, strict=True)
    )
    return StoredAnswer(answer.reasoning, calls, answer.reasoning_tokens)


def without_tokens(answer: StoredAnswer | None, dropped: Collection[int]) -> StoredAnswer | None:
    """An answer of which some generated tokens, by their numbers, are gone: its calls end earlier."""
    if answer is None:
        return None
    calls = tuple(
        call._replace(end=call.end - sum(each < call.end for each in dropped)) for call in answer.calls
    )
    return replace(answer, calls=calls)


def read_answer(value: object) -> StoredAnswer:
    """An answer from JSON; raises ValueError for a value of the wrong type."""
    if not isinstance(value, dict) or value.keys() != {"reasoning", "calls", "reasoning_tokens"}:
        raise ValueError("not an answer")
    reasoning, count = value["reasoning"], value["reasoning_tokens"]
    if not isinstance(reasoning, str) or not isinstance(count, int):
        raise ValueError("not an answer")
    return StoredAnswer(reasoning, _calls(value["calls"]), count)


def _calls(value: object) -> tuple[StoredCall, ...]:
    if not isinstance(value, list):
        raise ValueError("not a list of calls")
    return tuple(_call(each) for each in value)


def _call(value: object) -> StoredCall:
    if not isinstance(value, list) or len(value) != len(StoredCall._fields):
        raise ValueError("not a call")
    *texts, end = value
    if not all(isinstance(text, str) for text in texts) or not isinstance(end, int):
        raise ValueError("not a call")
    call = StoredCall(*value)
    Outcome(call.outcome)  # Raises ValueError for any other word.
    return call


def details_of(
    grammar: Grammar | None,
    spec: AnswerSpec | None,
    answer: StoredAnswer | None,
    noted: NotedTurn | None = None,
) -> str:
    """The data of a turn's row besides its tokens, as JSON; empty for a plain turn."""
    if grammar is None and spec is None and noted is None:
        return ""
    details: dict[str, Any] = {}
    if grammar is not None:
        details["grammar"] = grammar.to_values()
    if spec is not None:
        details["answer"] = asdict(spec)
    complete = [call for call in answer.calls if call.outcome == COMPLETE] if answer is not None else []
    if complete:
        details["calls"] = complete
    if noted is not None:
        details["noted"] = asdict(noted)
    return json.dumps(details)


def noted_in(details: str) -> NotedTurn | None:
    """The note of a turn's row with the result; None if it has none, or the value is damaged."""
    if not details:
        return None
    try:
        values = json.loads(details).get("noted")
        if values is None:
            return None
        if values.get("answer") is not None:
            values["answer"] = read_answer(values["answer"])
        noted = NotedTurn(**values)
    except (ValueError, TypeError, AttributeError):
        return None
    texts = (noted.turn_id, noted.note, noted.outcome, noted.reason, noted.text)
    counts = (noted.prompt_tokens, noted.cached_tokens, noted.completion_tokens)
    valid = all(isinstance(text, str) for text in texts) and all(isinstance(count, int) for count in counts)
    return noted if valid else None


def calls_in(details: str, tokens: int) -> Sequence[StoredCall]:
    """The calls of a turn's row that end within its first tokens; none if the value is damaged."""
    if not details:
        return ()
    try:
        found = _calls(json.loads(details).get("calls", []))
    except (ValueError, AttributeError):
        return ()
    return [call for call in found if call.end <= tokens]
