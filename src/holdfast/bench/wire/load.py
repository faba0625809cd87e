"""What `bench wire` runs, over HTTP and in process alike: the sizes, and the samples of each turn.

A *round* is a number of streams with a history each. Every stream takes some turns that end by their length,
one right after the other; then some that are aborted early, each followed at once by a whole turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["ABORTED_TOKENS", "ABORT_AFTER", "Round", "RoundSamples", "TurnSample", "Workload", "tokens_of"]

ABORT_AFTER = 3
"""Tokens of a turn that its client reads before it disconnects."""

ABORTED_TOKENS = 2048
"""The limit of a turn that is aborted: it is far from its end by then."""

TOKEN_LEAST = 5
TOKEN_SPAN = 240
"""Input token ids are within a range that every vocabulary has, bytes included."""


@dataclass(frozen=True, slots=True)
class Round:
    """Streams at once, and the tokens of each one's history."""

    streams: int
    history: int


@dataclass(frozen=True, slots=True)
class Workload:
    """All rounds; the turns of each stream, aborted ones besides, and the tokens of a turn."""

    rounds: Sequence[Round]
    turns: int = 8
    aborts: int = 4
    given: int = 32
    wanted: int = 32


@dataclass(slots=True)
class TurnSample:
    """One turn that ran to its end, in seconds since its client asked for it.

    `pause` is the longest time between two arrivals of output.
    """

    first: float
    total: float
    tokens: int
    pause: float
    after_abort: bool = False


@dataclass(slots=True)
class RoundSamples:
    """The turns of one round, and the seconds of the part of it without aborts.

    `processor` has the processor seconds of that part, by process.
    """

    turns: list[TurnSample] = field(default_factory=list)
    seconds: float = 0.0
    processor: dict[str, float] = field(default_factory=dict)


def tokens_of(stream: int, turn: int, count: int) -> list[int]:
    """Input of a turn; no two streams share a beginning, so that no prefix is found in memory."""
    seed = stream * 7919 + turn * 104_729
    return [TOKEN_LEAST + (seed + place * (place + stream + 3)) % TOKEN_SPAN for place in range(count)]
