"""What is measured of each system, round by round, and what the rounds come to.

A round measures every system once, the first in turn, so that a busy moment of the machine touches all; the
figures are medians over the rounds, a ratio is the median of the rounds' ratios. Before the first round every
system does a little of everything, to be warm. What goes wrong takes nothing from what was measured before.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from typing import Any

from holdfast.cli.compare.machine import ForeignLoad
from holdfast.cli.compare.systems import System
from holdfast.cli.compare.wire import BenchError

__all__ = ["INTERRUPTED", "Case", "Measured", "abort", "prefill", "run", "throughput", "turns"]

Values = dict[str, tuple[float, str]]
"""By name: a value and its unit."""

OURS = "holdfast"
PROMPT_TOKENS = (300, 32_000)
"""Tokens that prompts are drawn from: words of every vocabulary that is measured."""

BATCHES_ONLY = "generate_batch"
"""A system that is measured with several streams at once, and with nothing else."""

WARM_TOKENS = 4
MOMENT = 0.1
"""Seconds that a client who has left lets pass before it speaks again."""

PAUSES = (MOMENT, 0.0, 0.0, MOMENT, MOMENT, 0.0)
"""What passes after each abort of a conversation; one of each kind alone would be a matter of chance."""

INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to measure with its parameters.

    `measure` gets a system, a seed for its prompts, and whether it is only to warm up, with less of the same.
    """

    parameters: dict[str, Any]
    measure: Callable[[System, int, bool], Awaitable[Values]]

    def fits(self, system: System) -> bool:
        """Whether a system takes part."""
        return system.name != BATCHES_ONLY or self.parameters.get("streams", 1) > 1


@dataclass(frozen=True, slots=True)
class Measured:
    """The figures, one object each, ours with its ratios; and why it ended early, if it did."""

    figures: list[dict[str, Any]]
    ended: str | None = None
    failed: bool = False


@dataclass(slots=True)
class _Taken:
    """The values of one quantity: a list over the rounds for each system, with the load beside each."""

    unit: str
    values: dict[str, list[float]] = field(default_factory=dict)
    foreign: dict[str, list[float]] = field(default_factory=dict)


def prompt(length: int, seed: int) -> list[int]:
    """Random tokens that no round has seen before, so that nothing comes from a cache."""
    chance = random.Random(seed)
    return [chance.randrange(*PROMPT_TOKENS) for _ in range(length)]


async def run(
    cases: Sequence[Case],
    systems: Sequence[System],
    rounds: int,
    told: Callable[[str], None],
    seconds: float = float("inf"),
) -> Measured:
    """Measure all cases in rounds, as many as asked and as `seconds` have room for.

    Whoever interrupts gets the figures of the measurements that were whole by then.
    """
    taken: list[dict[str, _Taken]] = [{} for _ in cases]
    deadline, longest = time.perf_counter() + seconds, 0.0
    ended, failed = None, False
    try:
        for number in range(rounds + 1):
            began = time.perf_counter()
            if began + longest > deadline:
                ended = f"no time for more than {max(0, number - 1)} rounds"
                break
            await _round(number, cases, systems, taken, told)
            if number:
                longest = max(longest, time.perf_counter() - began)
    except asyncio.CancelledError:
        ended = INTERRUPTED
    except BenchError as error:
        ended, failed = str(error), True
    names = [system.name for system in systems]
    figures = [
        figure
        for case, found in zip(cases, taken, strict=True)
        for name, quantity in found.items()
        for figure in _figures(case, name, quantity, names)
    ]
    return Measured(figures, ended, failed)


async def _round(
    number: int,
    cases: Sequence[Case],
    systems: Sequence[System],
    taken: list[dict[str, _Taken]],
    told: Callable[[str], None],
) -> None:
    """Every case with every system that it fits; the first round warms up."""
    for index, case in enumerate(cases):
        shift = number % len(systems)
        for system in (*systems[shift:], *systems[:shift]):
            if not case.fits(system):
                continue
            what = f"round {number}" if number else "warming up"
            told(f"{what}: {system.name}, {case.parameters}")
            load = ForeignLoad()
            values = await case.measure(system, 1 + number * 1000 + index, not number)
            if number:
                _note(taken[index], system.name, values, load.cores())


def _note(taken: dict[str, _Taken], system: str, values: Values, foreign: float) -> None:
    for name, (value, unit) in values.items():
        quantity = taken.setdefault(name, _Taken(unit))
        quantity.values.setdefault(system, []).append(value)
        quantity.foreign.setdefault(system, []).append(foreign)


def _figures(case: Case, name: str, taken: _Taken, systems: Sequence[str]) -> list[dict[str, Any]]:
    figures = []
    for system in systems:
        values = taken.values.get(system, [])
        if not values:
            continue
        figure: dict[str, Any] = {
            "name": name,
            "value": round(median(values), 3),
            "unit": taken.unit,
            **case.parameters,
            "system": system,
            "min": round(min(values), 3),
            "max": round(max(values), 3),
            "rounds": len(values),
            "foreign_load": round(median(taken.foreign[system]), 2),
        }
        if system == OURS:
            for other, theirs in taken.values.items():
                if other != OURS:
                    ratios = [mine / his for mine, his in zip(values, theirs, strict=False) if his]
                    figure[f"ratio_to_{other}"] = round(median(ratios), 3)
        figures.append(figure)
    return figures


def throughput(streams: int, given: int, wanted: int) -> Case:
    """Some streams at once, each from a prompt of its own."""

    async def measure(system: System, seed: int, warm: bool) -> Values:
        prompts = [prompt(given, seed * 100 + row) for row in range(streams)]
        began = time.perf_counter()
        timings = await system.complete(prompts, min(wanted, WARM_TOKENS) if warm else wanted)
        seconds = time.perf_counter() - began
        between = [(timing.total - timing.first) / max(1, wanted - 1) for timing in timings]
        return {
            "throughput": (streams * wanted / seconds, "tokens/s"),
            "first_token": (1e3 * median(timing.first for timing in timings), "ms"),
            "between_tokens": (1e3 * median(between), "ms"),
        }

    return Case({"streams": streams, "input_tokens": given, "output_tokens": wanted}, measure)


def prefill(given: int) -> Case:
    """One prompt to its first token."""

    async def measure(system: System, seed: int, _warm: bool) -> Values:
        (timing,) = await system.complete([prompt(given, seed)], 1)
        return {"prefill": (given / timing.total, "tokens/s")}

    return Case({"input_tokens": given}, measure)


def turns(last: int, given: int, wanted: int, shown: Sequence[int]) -> Case:
    """One conversation: the first token of some of its turns."""

    async def measure(system: System, seed: int, warm: bool) -> Values:
        conversation = await system.conversation()
        values: Values = {}
        for turn in range(1, 3 if warm else last + 1):
            timing = await conversation.say(prompt(given, seed * 1000 + turn), wanted)
            if turn in shown:
                values[f"first_token_of_turn_{turn}"] = (1e3 * timing.first, "ms")
        await conversation.close()
        return values

    return Case({"turns": last, "input_tokens": given, "output_tokens": wanted}, measure)


def abort(turn: int, given: int, wanted: int, history: int = 0) -> Case:
    """A client leaves in the middle of a turn, some times: the first token of the next turn beside that of
    a normal one; the next turn asked for a moment later, and at once, while the system still lets go.

    Normal turns stand among the others, so that all of them have histories of about one length. With a
    `history` the conversation begins with so many tokens, and the first token after them tells what
    computing a history again would take.
    """

    async def measure(system: System, seed: int, warm: bool) -> Values:
        conversation = await system.conversation()
        computing = None
        if history and not warm:
            computing = (await conversation.say(prompt(history, seed * 1000), wanted)).first
        prompts = (prompt(given, seed * 1000 + number) for number in count(1))
        for _ in range(turn - 1 if warm else 1, turn):
            await conversation.say(next(prompts), wanted)
        normal: list[float] = []
        after: dict[float, list[float]] = {MOMENT: [], 0.0: []}
        for pause in PAUSES[: 2 if warm else None]:
            normal.append((await conversation.say(next(prompts), wanted)).first)
            await conversation.say(next(prompts), 4 * wanted, leave_after=wanted // 2)
            await asyncio.sleep(pause)
            after[pause].append((await conversation.say(next(prompts), wanted)).first)
        await conversation.close()
        usual, later, at_once = median(normal), median(after[MOMENT]), median(after[0.0])
        values: Values = {
            "first_token_of_a_turn": (1e3 * usual, "ms"),
            "first_token_after_abort": (1e3 * later, "ms"),
            "after_abort_over_normal": (later / usual, "ratio"),
            "first_token_at_once_after_abort": (1e3 * at_once, "ms"),
            "at_once_after_abort_over_normal": (at_once / usual, "ratio"),
        }
        if computing is not None:
            values["first_token_of_the_history"] = (1e3 * computing, "ms")
            values["history_over_after_abort"] = (computing / later, "ratio")
        return values

    parameters = {"turn": turn, "input_tokens": given, "output_tokens": wanted}
    return Case({**parameters, "history": history} if history else parameters, measure)
