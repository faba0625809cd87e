"""What the agents of a load do, planned before anything runs.

An agent has a system prompt with the descriptions of its tools, which all agents share, and takes turns: the
result of a tool comes in, a short answer goes out, and the next tool takes its time. Some agents have a
sub-agent: it forks from the conversation, takes a few turns of its own, and its report comes in with the next
turn. The sizes follow published traces of coding agents: 43 turns, about 140,000 tokens in and 440 out per
session, and a sub-agent in 44 % of the sessions.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from holdfast.bench.url.load import WORDS

__all__ = ["Agent", "AgentLoad", "Step", "plan"]

SYSTEM_SHARE = 0.08
"""The part of a session's input that is the common system prompt."""
SPREAD = 1.0
"""How much the sizes of tool results differ: the sigma of their logarithm."""


@dataclass(frozen=True, slots=True)
class AgentLoad:
    """The size of a load; `input_tokens` and `output_tokens` are those of a whole session.

    Words of the input have one token each in most vocabularies. `pause` is the mean time of a tool in
    seconds.
    """

    sessions: int = 8
    turns: int = 43
    input_tokens: int = 140_000
    output_tokens: int = 440
    forks: float = 0.44
    fork_turns: int = 4
    pause: float = 1.0
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Step:
    """One turn: after `pause` seconds so many words come in, and at most `wanted` tokens go out.

    `fork` are the steps of a sub-agent that runs before it.
    """

    words: int
    wanted: int
    pause: float
    fork: tuple[Step, ...] = ()


@dataclass(frozen=True, slots=True)
class Agent:
    """One session. `seed` draws its words."""

    seed: str
    steps: tuple[Step, ...] = field(default_factory=tuple)


def system_prompt(load: AgentLoad) -> str:
    """The text that all agents begin with."""
    return words_of(random.Random(load.seed), max(1, round(load.input_tokens * SYSTEM_SHARE)))


def words_of(chance: random.Random, count: int) -> str:
    """So many common words."""
    return " ".join(chance.choice(WORDS) for _ in range(count))


def plan(load: AgentLoad) -> list[Agent]:
    """The agents of a load; the same for the same load."""
    return [_agent(load, number) for number in range(load.sessions)]


def _agent(load: AgentLoad, number: int) -> Agent:
    chance = random.Random(f"{load.seed} {number}")
    steps = _steps(load, chance, load.turns)
    # Spread evenly over the sessions, so that a small load has its share too.
    if int((number + 1) * load.forks) > int(number * load.forks) and load.turns > 1:
        place = chance.randrange(1, load.turns)
        own = _steps(load, chance, load.fork_turns)
        before = steps[place]
        steps[place] = Step(before.words, before.wanted, before.pause, tuple(own))
    return Agent(f"{load.seed} {number}", tuple(steps))


def _steps(load: AgentLoad, chance: random.Random, count: int) -> list[Step]:
    """Turns with results of very different sizes, whose sum is that of a session's part."""
    weights = [chance.lognormvariate(0.0, SPREAD) for _ in range(count)]
    total = load.input_tokens * (1 - SYSTEM_SHARE) * count / load.turns
    wanted = max(1, round(load.output_tokens / load.turns))
    return [
        Step(
            max(1, round(total * weight / sum(weights))),
            wanted,
            chance.expovariate(1 / load.pause) if load.pause else 0.0,
        )
        for weight in weights
    ]
