"""N-gram speculation: drafts for a turn's next tokens from its own history.

Text that repeats itself (edited code, quotations) is predicted by finding the last few tokens earlier in the
history and proposing what followed them. The executor computes the drafts together with the next token and
keeps those that the model agrees with; sampling is a function of logits, seed and position, so a turn's
tokens are the same with and without speculation.

A rejected draft costs part of a step. A turn whose drafts are rejected pauses, twice as long each time; one
whose drafts are accepted drafts more. Drafts of a constrained turn end before the first token that its
constraint refuses or forces. The loop makes a `Speculator`, and the core's planner calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.core.session import Session
from holdfast.core.tokens import TokenLog
from holdfast.core.turn import Turn
from holdfast.engine.sampling import Sampling
from holdfast.engine.text.stream import TurnStream

GRAM = 3
"""Length of the n-gram that must match."""

LENGTH_FIRST, LENGTH_MAX = 3, 12
PAUSE_MAX = 64
TRACES_MAX = 1024
HISTORY_MAX = 32_768
"""Tokens of history that are indexed; older ones are not worth the time."""

Gram = tuple[int, int, int]


@dataclass(slots=True)
class Trace:
    """A turn's acceptance record and its index.

    `places` maps a trigram to the position after its last occurrence. It covers the history up to `seen`.
    `pending` are the last drafts, for the positions from `asked` on.
    """

    places: dict[Gram, int] = field(default_factory=dict)
    seen: int = 0
    length: int = LENGTH_FIRST
    pause: int = 0
    next_pause: int = 1
    asked: int = 0
    pending: list[int] = field(default_factory=list)


class Speculator:
    """Proposes drafts for the turns of one engine; a `core.planner.Proposer`."""

    __slots__ = ("_stream_of", "_traces", "accepted", "proposed")

    def __init__(self, stream_of: Callable[[Turn], TurnStream]) -> None:
        self._stream_of = stream_of
        self._traces: dict[int, Trace] = {}
        self.proposed = 0
        self.accepted = 0

    def __call__(self, session: Session, turn: Turn) -> list[int]:
        """Drafts for the tokens after the session's known ones; empty where none are worth it."""
        trace = self._traces.get(turn.number)
        if trace is None:
            if is_penalised(self._stream_of(turn).sampling):
                return []
            trace = self._trace(turn)
        tokens = session.sequence.tokens
        self._learn(trace, tokens)
        self._read(trace, tokens)
        if trace.pause:
            trace.pause -= 1
            return []
        guesses = self._guess(trace, tokens)
        constraint = self._stream_of(turn).constraint if guesses else None
        if constraint is not None:
            guesses = constraint.cut(guesses)
        trace.asked, trace.pending = len(tokens), guesses
        return guesses

    def release(self, turn: Turn) -> None:
        """Drop the trace of a finished turn."""
        self._traces.pop(turn.number, None)

    def _trace(self, turn: Turn) -> Trace:
        """A trace for a new turn; those of the oldest turns are evicted."""
        while len(self._traces) >= TRACES_MAX:
            del self._traces[next(iter(self._traces))]
        trace = self._traces[turn.number] = Trace()
        return trace

    def _learn(self, trace: Trace, tokens: TokenLog) -> None:
        """Update the record with the last drafts: draft more, or less, or pause."""
        if not trace.pending:
            return
        made, trace.pending = trace.pending, []
        said = tokens.slice(trace.asked, trace.asked + len(made))
        right = 0
        while right < len(said) and said[right] == made[right]:
            right += 1
        self.proposed += len(made)
        self.accepted += right
        if right == len(made):
            trace.length = min(LENGTH_MAX, 2 * trace.length)
        else:
            trace.length = max(2, min(trace.length, right + 1))
        if 2 * right >= len(made):
            trace.next_pause = 1
        elif not right:
            trace.pause = trace.next_pause
            trace.next_pause = min(PAUSE_MAX, 2 * trace.next_pause)

    def _read(self, trace: Trace, tokens: TokenLog) -> None:
        """Index the new history; the continuation of the last tokens is not known yet."""
        length = len(tokens)
        # After a retraction the history may be shorter: positions past its end are never followed.
        first = max(min(trace.seen, length), GRAM, length - HISTORY_MAX)
        trace.seen = length
        if first >= length:
            return
        window = tokens.slice(first - GRAM, length)
        places = trace.places
        for index in range(length - first):
            places[window[index], window[index + 1], window[index + 2]] = first + index

    def _guess(self, trace: Trace, tokens: TokenLog) -> list[int]:
        length = len(tokens)
        if length < GRAM:
            return []
        one, two, three = tokens.slice(length - GRAM, length)
        place = trace.places.get((one, two, three))
        if place is None or place >= length:
            return []
        found = tokens.slice(place, min(length, place + trace.length))
        # In periodic text the match overlaps the end: continue periodically.
        return [found[index % len(found)] for index in range(trace.length)]


def is_penalised(sampling: Sampling) -> bool:
    """Whether sampling depends on the preceding tokens in ways that drafts would disturb."""
    repeated = sampling.repetition_penalty not in (None, 1.0)
    return repeated or bool(sampling.frequency_penalty or sampling.presence_penalty)
