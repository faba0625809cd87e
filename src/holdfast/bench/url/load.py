"""The load: many conversations at once, some turns aborted, every turn timed by its client.

`run_load` drives the conversations through an `Api` (apis.py). Aborted turns are interrupted, or their client
disconnects.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from holdfast.client import HoldfastError

__all__ = ["WORDS", "Api", "Ask", "Conversation", "Load", "Sample", "percentile", "run_load"]

WORDS = (
    "river", "stone", "light", "garden", "window", "paper", "music", "winter", "bridge", "market", "silver",
    "morning", "letter", "island", "engine", "forest", "harbour", "simple", "yellow", "between", "every",
    "carry", "follow", "answer", "listen", "remember", "travel", "number", "question",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Load:
    """The size of a load: concurrent conversations, turns of each, and the share of aborted turns.

    The input of a turn is `input_tokens` common words, mostly of one token; `output_tokens` is the maximum.
    """

    sessions: int = 8
    turns: int = 10
    input_tokens: int = 32
    output_tokens: int = 32
    aborts: float = 0.0
    idle: int = 0
    ignore_eos: bool = True
    seed: int = 1


@dataclass(slots=True)
class Sample:
    """One turn, in seconds since its request was sent; `pieces` are the times at which text arrived.

    `known_tokens` are those that the conversation had before it.
    """

    turn: int
    pieces: list[float] = field(default_factory=list)
    total: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    known_tokens: int = 0
    cut: bool = False
    error: str | None = None

    @property
    def first(self) -> float | None:
        """The time to the first token."""
        return self.pieces[0] if self.pieces else None

    @property
    def between(self) -> float | None:
        """The mean time between two tokens."""
        if self.tokens < 2 or len(self.pieces) < 2:
            return None
        return (self.pieces[-1] - self.pieces[0]) / (self.tokens - 1)


@dataclass(frozen=True, slots=True)
class Ask:
    """One planned turn; after `cut_after` tokens it is aborted by disconnecting (`leave`) or interrupting."""

    words: str
    output_tokens: int
    ignore_eos: bool
    cut_after: int | None
    leave: bool


class Conversation(Protocol):
    """One conversation with a server."""

    async def turn(self, ask: Ask, sample: Sample) -> None:
        """Run a turn and fill in the sample, except for `total`."""

    async def close(self) -> None:
        """Close the conversation."""


class Api(Protocol):
    """A way to converse with a server."""

    name: str

    async def open(self) -> Conversation:
        """Open a conversation."""

    async def close(self) -> None:
        """Close the connections."""


async def run_load(api: Api, load: Load, told: Callable[[Sample], None]) -> tuple[list[Sample], float]:
    """Returns all samples and the seconds of the whole load; `told` is called with each turn as it ends."""
    # Each API has its own words: the server's prefix tree caches those of the other.
    chance = random.Random(f"{load.seed} {api.name}")
    plans = [[_ask(load, chance) for _ in range(load.turns)] for _ in range(load.sessions)]
    idle = [await api.open() for _ in range(load.idle)]
    conversations = [await api.open() for _ in range(load.sessions)]
    began = time.perf_counter()
    try:
        lists = await asyncio.gather(
            *(_converse(each, plan, told) for each, plan in zip(conversations, plans, strict=True))
        )
    finally:
        seconds = time.perf_counter() - began
        for conversation in (*conversations, *idle):
            await conversation.close()
    return [sample for samples in lists for sample in samples], seconds


async def _converse(
    conversation: Conversation, asks: list[Ask], told: Callable[[Sample], None]
) -> list[Sample]:
    samples = []
    for number, ask in enumerate(asks):
        sample = Sample(number)
        began = time.perf_counter()
        try:
            await conversation.turn(ask, sample)
        except HoldfastError as error:
            sample.error = f"{type(error).__name__}: {error}"
        sample.total = time.perf_counter() - began
        samples.append(sample)
        told(sample)
    return samples


def _ask(load: Load, chance: random.Random) -> Ask:
    words = " ".join(chance.choice(WORDS) for _ in range(load.input_tokens))
    cut = chance.random() < load.aborts
    after = chance.randint(1, max(1, load.output_tokens // 2)) if cut else None
    return Ask(words, load.output_tokens, load.ignore_eos, after, leave=chance.random() < 0.5)


def percentile(values: list[float], share: float) -> float:
    """The nearest-rank percentile: one of the values, without interpolation."""
    assert values and 0.0 <= share <= 1.0
    ordered = sorted(values)
    return ordered[max(0, math.ceil(round(share * len(ordered), 6)) - 1)]
