"""Many clients on more sessions than fit on the device: every turn finds its session on the host.

    python -m holdfast.bench.cpu.storm                                                 # small model, CPU
    python -m holdfast.bench.gpu --timings --model qwen3-8b --part storm               # H200

`clients` at a time begin a turn on a session that nobody uses, chosen at random, as soon as their last turn
has ended; some turns are interrupted. The figures are turns per second, first tokens, pauses between the
tokens of an answer, and the bytes that moved between the tiers. Histories are computed beforehand.
"""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass
from random import Random
from typing import Any

from holdfast.bench.loops import Talk
from holdfast.core.events import Event
from holdfast.core.layout import Tier
from holdfast.engine.loop import EngineLoop
from holdfast.engine.options import make_options
from holdfast.engine.start.memory_plan import plan_memory, session_units
from holdfast.models.available import available_bytes
from holdfast.models.model import Model

__all__ = ["Storm", "host_room", "storm"]

HOST_SHARE = 0.85
"""Most of the host's free memory that the host tier takes."""
HOST_SLACK = 1.1
"""Room beyond the sessions' own memory, for what is on its way."""


@dataclass(frozen=True, slots=True)
class Storm:
    """How many sessions of how many tokens, and what clients do with them.

    A turn has `said` tokens of input and `answer` tokens of output; one in `cut_every` is interrupted.
    """

    sessions: int = 300
    history: int = 4096
    clients: int = 96
    turns: int = 1500
    said: int = 32
    answer: int = 32
    cut_every: int = 10
    seed: int = 7

    @property
    def tokens_max(self) -> int:
        """Tokens of the longest session, if no session has many more turns than others."""
        return self.history + 4 * (self.said + self.answer) * -(-self.turns // self.sessions)


class Client(Talk):
    """A session of the storm: the times of its tokens, and after how many its turn is interrupted."""

    def __init__(self, loop: EngineLoop, name: str) -> None:
        super().__init__(loop, name)
        self.begun_at = 0.0
        self.times: list[float] = []
        self.cut_at: int | None = None

    def ask(self, tokens: list[int], count: int, cut_at: int | None) -> None:
        """Begin a turn."""
        self.times, self.cut_at = [], cut_at
        self.begun_at = time.perf_counter()
        self.begin(tokens, count)

    def hear(self, event: Event) -> None:
        """Listen to the events of the turn."""
        before = len(self.said)
        super().hear(event)
        if len(self.said) > before:
            self.times.append(time.perf_counter())

    def cut_if_due(self) -> None:
        """Interrupt the turn, once, when it has said enough."""
        if self.cut_at is not None and len(self.said) >= self.cut_at and not self.over:
            self.cut_at = None
            self.loop.scheduler.interrupt(self.name, self.loop.now(), None)


def words(count: int, seed: int, vocabulary: int) -> list[int]:
    """Input tokens, the same for the same seed."""
    return [(seed * 7919 + 31 * place) % vocabulary for place in range(count)]


def prepare(loop: EngineLoop, shape: Storm) -> list[Client]:
    """Sessions with their histories."""
    vocabulary = loop.setup.model.config.vocabulary
    sessions = [Client(loop, f"storm {number}") for number in range(shape.sessions)]
    for first in range(0, shape.sessions, 8):
        group = sessions[first : first + 8]
        for number, session in enumerate(group, first):
            session.ask(words(shape.history - 8, number, vocabulary), 8, None)
        for session in group:
            session.finish()
    settle(loop)
    return sessions


def settle(loop: EngineLoop) -> None:
    """Step until nothing is left to do."""
    while loop.busy:
        loop.step()


def storm(loop: EngineLoop, shape: Storm) -> dict[str, float]:
    """Run all turns; returns the figures."""
    rng, vocabulary = Random(shape.seed), loop.setup.model.config.vocabulary
    sessions = prepare(loop, shape)
    counters, tier = loop.scheduler.registry.counters, loop.executor.host_tier
    computed, spills, dropped = counters.computed_tokens, counters.spills, counters.dropped
    retracts, moved = counters.retracts, dict(tier.bytes_copied)
    free, going = list(sessions), list[Client]()
    begun_turns, firsts, pauses = 0, list[float](), list[float]()
    begun = time.perf_counter()

    def ask() -> None:
        nonlocal begun_turns
        session = free.pop(rng.randrange(len(free)))
        cut = rng.randrange(1, shape.answer) if rng.randrange(shape.cut_every) == 0 else None
        session.ask(words(shape.said, 1000 + begun_turns, vocabulary), shape.answer, cut)
        begun_turns += 1
        going.append(session)

    while begun_turns < shape.turns or going:
        while len(going) < shape.clients and begun_turns < shape.turns:
            ask()
        loop.step()
        for session in going:
            session.cut_if_due()
        for session in [each for each in going if each.over]:
            assert session.first is not None, "every turn has a first token"
            firsts.append((session.first - session.begun_at) * 1e3)
            pauses += [(later - sooner) * 1e3 for sooner, later in itertools.pairwise(session.times)]
            going.remove(session)
            free.append(session)
    took = time.perf_counter() - begun
    settle(loop)
    firsts.sort()
    figures = {
        "turns/s": shape.turns / took,
        "first token median": statistics.median(firsts),
        "first token p90": firsts[int(0.9 * len(firsts))],
        "longest pause": max(pauses),
        "usual pause": statistics.median(pauses),
        "bytes to the host": tier.bytes_copied[Tier.HOST] - moved[Tier.HOST],
        "bytes to the device": tier.bytes_copied[Tier.DEVICE] - moved[Tier.DEVICE],
        "tokens computed per turn": (counters.computed_tokens - computed) / shape.turns,
        "sessions that left": counters.spills - spills,
        "sessions dropped": counters.dropped - dropped,
        "turns retracted": counters.retracts - retracts,
    }
    for session in sessions:
        loop.scheduler.close(session.name, loop.now())
    settle(loop)
    return figures


def host_room(model: Model, shape: Storm, **options: Any) -> tuple[int, int]:
    """Bytes of a host tier for all sessions, and how many sessions that is where not all fit."""
    plan = plan_memory(model, make_options(device=model.device.type, **options))
    units = session_units(plan.layout, shape.tokens_max)
    each = sum(count * plan.unit_bytes[component] for component, count in units.items())
    sessions = min(shape.sessions, int(available_bytes() * HOST_SHARE / (each * HOST_SLACK)))
    return int(sessions * each * HOST_SLACK), sessions
