"""What is measured of each system: throughput, prefill, turns of a conversation, turns after an abort."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import count
from statistics import median
from typing import Any

from holdfast.bench.beside.systems import System
from holdfast.bench.figures import Values
from holdfast.bench.prompts import prompt

__all__ = ["Case", "abort", "prefill", "throughput", "turns"]

BATCHES_ONLY = "generate_batch"
"""The system that takes part only where several streams run at once."""

WARM_TOKENS = 4
MOMENT = 0.1
"""Seconds between an abort and the next turn, where that does not follow at once."""

PAUSES = (MOMENT, 0.0, 0.0, MOMENT, MOMENT, 0.0)
"""The pauses after the aborts of one conversation."""


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement with its parameters.

    `measure` takes a system, a seed for the prompts, and whether this is the warm-up, which does less.
    """

    parameters: dict[str, Any]
    measure: Callable[[System, int, bool], Awaitable[Values]]

    def fits(self, system: System) -> bool:
        """Whether a system takes part."""
        return system.name != BATCHES_ONLY or self.parameters.get("streams", 1) > 1


def throughput(streams: int, given: int, wanted: int) -> Case:
    """Concurrent streams, each with its own prompt."""

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
    """A client aborts turns: the first token of the turn after an abort, beside that of a normal turn.

    The turn after an abort starts a moment later or at once, while the system still cleans up. Normal and
    aborted turns alternate, so that their histories have about the same length. With a `history` the
    conversation begins with so many tokens; their first token shows what recomputing a history would cost.
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
