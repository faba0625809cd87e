"""The timings of a model's steps and sessions on the GPU.

Each returns milliseconds or tokens per second. Decode steps overlap planning with the device, as in the
server; the first token of a turn is timed from its submission to its event.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from triton import knobs
from triton.compiler import ASTSource

from holdfast.bench.loops import Talk
from holdfast.core.audit import Audit, Finding
from holdfast.core.registry import Event
from holdfast.engine.loop import EngineLoop

MANY_ROWS = 64
"""Rows beyond which turns are admitted in large steps before they are measured."""


NEW = itertools.count(10_000)
"""Seeds of prompts that no turn before them had: nothing of them is in the prefix tree."""


def words(count: int, seed: int) -> list[int]:
    """Input tokens, the same for the same seed."""
    return [(seed * 7919 + 31 * place) % 50_000 for place in range(count)]


def settle(loop: EngineLoop) -> None:
    """Step until the loop is idle."""
    while loop.busy:
        loop.step()
    torch.cuda.synchronize()


def close(loop: EngineLoop, talks: list[Talk]) -> None:
    """Close the sessions and wait until their memory is free."""
    for talk in talks:
        loop.scheduler.close(talk.name, loop.now())
    settle(loop)


def fill_up(loop: EngineLoop, talks: list[Talk], tokens: int = 4) -> None:
    """Step until all turns generate; beyond 64 in steps of any size, so that none ends before the last."""
    registry = loop.scheduler.registry
    usual = registry.policy
    while not all(len(talk.said) >= tokens for talk in talks):
        if len(registry.running) > MANY_ROWS:
            registry.policy = replace(usual, mixed_tokens=1 << 31)
        loop.step()
    registry.policy = usual


def decode_step(loop: EngineLoop, batch: int, steps: int = 128) -> float:
    """Milliseconds of one decode step after inputs of 128 tokens: the median of the means of 16 steps."""
    talks = [Talk(loop, f"decode {batch} {number}") for number in range(batch)]
    for number, talk in enumerate(talks):
        # Inputs are admitted a few at a time: the first must still decode when the last begins.
        talk.begin(words(128, number), steps + 128)
    fill_up(loop, talks)
    means = []
    for _ in range(max(1, steps // 16)):
        before = sum(len(talk.said) for talk in talks)
        begun = time.perf_counter()
        for _ in range(min(steps, 16)):
            loop.step()
        took = time.perf_counter() - begun
        means.append(took / (sum(len(talk.said) for talk in talks) - before) * batch * 1e3)
    assert not any(talk.over for talk in talks), "a turn ended while it was measured"
    close(loop, talks)
    return statistics.median(means)


def first_token(loop: EngineLoop, talk: Talk, seed: int, count: int = 32) -> float:
    """Milliseconds from a turn's submission to its first token."""
    begun = time.perf_counter()
    talk.begin(words(32, seed), count)
    talk.finish()
    assert talk.first is not None
    took = talk.first - begun
    settle(loop)
    return took * 1e3


def turns(loop: EngineLoop, history: int) -> dict[str, float]:
    """First tokens of turns on one history: of a normal turn, after an aborted one, and on a fork."""
    talk = Talk(loop, f"history {history}")
    talk.begin(words(history, 3), 8)
    talk.finish()
    settle(loop)
    first_token(loop, talk, 5)
    usual = [first_token(loop, talk, seed) for seed in range(7)]
    after: list[float] = []
    for seed in range(5):
        talk.begin(words(32, 40 + seed), 64)
        while len(talk.said) < 8:
            loop.step()
        loop.scheduler.interrupt(talk.name, loop.now(), None)
        talk.finish()
        settle(loop)
        after.append(first_token(loop, talk, 60 + seed))
    forks: list[float] = []
    forked: list[Talk] = []
    for seed in range(3):
        begun = time.perf_counter()
        name = f"fork {history} {seed}"
        loop.scheduler.fork(talk.name, name, loop.now())
        fork = Talk(loop, name, opened=True)
        made = (time.perf_counter() - begun) * 1e3
        forks.append(made + first_token(loop, fork, 80 + seed))
        forked.append(fork)
    close(loop, [talk, *forked])
    return {
        "turn": statistics.median(usual),
        "turn after abort": statistics.median(after),
        "turn on a fork": statistics.median(forks),
    }


def prefill(loop: EngineLoop, prompts: int, length: int) -> float:
    """Tokens per second of new prompts, until all have their first token."""
    rates = []
    for trial in range(3):
        torch.cuda.synchronize()
        talks = [Talk(loop, f"prefill {length} {trial} {number}") for number in range(prompts)]
        begun = time.perf_counter()
        for talk in talks:
            talk.begin(words(length, next(NEW)), 1)
        while not all(talk.first for talk in talks):
            loop.step()
        rates.append(prompts * length / (max(talk.first or 0.0 for talk in talks) - begun))
        for talk in talks:
            talk.finish()
        close(loop, talks)
    return statistics.median(rates)


def sessions(loop: EngineLoop, count: int, rounds: int, history: int) -> dict[str, float]:
    """Sessions that each begin their next turn as soon as the last has ended."""
    talks = [Talk(loop, f"session {number}") for number in range(count)]
    for number, talk in enumerate(talks):
        talk.begin(words(history, number), 8)
    for talk in talks:
        talk.finish()
    settle(loop)
    left = {talk.name: rounds for talk in talks}
    begun_at: dict[str, float] = {}
    firsts: list[float] = []
    begun = time.perf_counter()

    def begin(talk: Talk) -> None:
        begun_at[talk.name] = time.perf_counter()
        left[talk.name] -= 1
        talk.begin(words(32, left[talk.name]), 32)

    for talk in talks:
        begin(talk)
    going = list(talks)
    while going:
        loop.step()
        for talk in [each for each in going if each.over]:
            assert talk.first is not None
            firsts.append((talk.first - begun_at[talk.name]) * 1e3)
            if left[talk.name]:
                begin(talk)
            else:
                going.remove(talk)
    took = time.perf_counter() - begun
    close(loop, talks)
    firsts.sort()
    return {
        "tokens/s": count * rounds * 32 / took,
        "first token median": statistics.median(firsts),
        "first token p90": firsts[int(0.9 * len(firsts))],
    }


@contextmanager
def compilations() -> Iterator[list[str]]:
    """The names of the Triton kernels compiled inside the context; each compilation delays a turn."""
    names: list[str] = []

    def heard(*, src: ASTSource, cache_hit: bool, **_: object) -> None:
        names.append(f"{src.name} (cached)" if cache_hit else src.name)

    before = knobs.compilation.listener
    knobs.compilation.listener = heard
    try:
        yield names
    finally:
        knobs.compilation.listener = before


class Witness(Talk):
    """A session that records the time of each token."""

    def __init__(self, loop: EngineLoop, name: str) -> None:
        super().__init__(loop, name)
        self.times: list[float] = []

    def hear(self, event: Event) -> None:
        """Listen to the events of the turn."""
        super().hear(event)
        self.times.append(time.perf_counter())

    @property
    def pauses(self) -> list[float]:
        """Milliseconds from token to token."""
        return [(later - earlier) * 1e3 for earlier, later in itertools.pairwise(self.times)]


def spill_and_restore(loop: EngineLoop, history: int) -> dict[str, float]:
    """First tokens of turns whose sessions are spilled to the host, since not all of them fit.

    Then the same while another session decodes: its longest and its median pause between tokens.
    """
    talks = [Talk(loop, f"spilled {number}") for number in range(3)]
    for number, talk in enumerate(talks):
        talk.begin(words(history, 500 + number), 8)
        talk.finish()
        settle(loop)
    counters = loop.scheduler.registry.counters
    computed = counters.computed_tokens
    times = [first_token(loop, talk, 7) for talk in (*talks, *talks)]
    witness = Witness(loop, "witness")
    witness.begin(words(1024, 11), 6000)
    while len(witness.said) < 4:
        loop.step()
    witness.times.clear()
    spills = counters.spills
    for talk in talks:
        talk.begin(words(32, 9), 32)
        talk.finish()
    assert not witness.over and counters.spills > spills >= 3, "the pool is too large for this measurement"
    assert counters.computed_tokens - computed < history, "a history was recomputed"
    pauses = witness.pauses
    close(loop, [*talks, witness])
    return {
        "turn after a spill": statistics.median(times),
        "longest pause of an answer beside it": max(pauses),
        "usual pause of an answer beside it": statistics.median(pauses),
    }


def pauses_beside_a_prompt(loop: EngineLoop, batch: int, length: int) -> dict[str, float]:
    """Milliseconds between the tokens of an answer among many, while a long prompt of another turn comes.

    The usual and the longest pause, how many steps the longest is, and the first token of the prompt.
    """
    witness = Witness(loop, f"witness of {length}")
    talks: list[Talk] = [witness, *(Talk(loop, f"beside {length} {number}") for number in range(batch - 1))]
    for number, talk in enumerate(talks):
        talk.begin(words(128, 300 + number), 4096)
    fill_up(loop, talks)
    witness.times.clear()
    while len(witness.times) < 64:
        loop.step()
    usual = statistics.median(witness.pauses)
    witness.times.clear()
    prompt = Talk(loop, f"prompt {length}")
    begun = time.perf_counter()
    prompt.begin(words(length, next(NEW)), 8)
    while not prompt.over:
        loop.step()
    longest = max(witness.pauses)
    assert not any(talk.over for talk in talks) and prompt.first is not None, "a turn ended while measured"
    close(loop, [*talks, prompt])
    return {
        "usual pause": usual,
        "longest pause": longest,
        "longest pause in steps": longest / usual,
        "first token of the prompt": (prompt.first - begun) * 1e3,
    }


def share_of_audit(loop: EngineLoop, batch: int) -> float:
    """The share of a decode step that the host spends in the audit."""
    spent = 0.0
    tick = Audit.tick

    def timed(self: Audit, rows: int) -> list[Finding]:
        nonlocal spent
        begun = time.perf_counter()
        answer = tick(self, rows)
        spent += time.perf_counter() - begun
        return answer

    steps = 128
    Audit.tick = timed  # type: ignore[method-assign]
    try:
        begun = time.perf_counter()
        decode_step(loop, batch, steps)
        took = time.perf_counter() - begun
    finally:
        Audit.tick = tick  # type: ignore[method-assign]
    return spent / took


def kernel_times(loop: EngineLoop, batch: int) -> list[tuple[str, float, int]]:
    """Microseconds and launches of each kernel in one decode step, longest first.

    A kernel may start before the preceding ones end, so it is charged with the time by which it ends later.
    The time in which none ran is charged to `(idle)`.
    """
    talks = [Talk(loop, f"profile {batch} {number}") for number in range(batch)]
    for number, talk in enumerate(talks):
        talk.begin(words(128, number), 40)
    fill_up(loop, talks)
    steps = 8
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            loop.step()
        torch.cuda.synchronize()
    for talk in talks:
        talk.finish()
    close(loop, talks)
    times: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    ran = [event for event in profile.events() if event.device_type.name == "CUDA"]
    ran.sort(key=lambda event: event.time_range.end)
    last = ran[0].time_range.start if ran else 0.0
    for event in ran:
        name, begun, ended = event.name[:70], event.time_range.start, event.time_range.end
        times["(idle)"] += max(0.0, begun - last)
        times[name] += ended - max(begun, last)
        counts[name] += 1
        last = ended
    return sorted(
        ((name, times[name] / steps, counts[name] // steps) for name in times), key=lambda row: -row[1]
    )
