"""KV caches in the model's type and in eight bits: decode steps of long contexts, and sessions that fit.

Both types are measured in one process, one after the other. Part `kv8` of `holdfast.bench.gpu`.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from holdfast.bench.gpu.report import report
from holdfast.bench.gpu.timings import NEW, close, words
from holdfast.bench.loops import Talk, open_loop
from holdfast.engine.loop import EngineLoop
from holdfast.engine.options import make_options
from holdfast.engine.start.memory_plan import plan_memory
from holdfast.engine.step.executor import Executor
from holdfast.models.model import Model

__all__ = ["measure_kv8"]

ROWS, CONTEXT = 64, 8192
SPARE = 1024
"""Tokens that a row may generate while the others' prompts are computed, and while it is measured."""
STEPS = 64
TYPES = ("auto", "fp8")
RATE_AIM, SESSIONS_AIM = 1.6, 1.9


def measure_kv8(name: str, model: Model) -> None:
    """Decode at 64 x 8k and the sessions of 8k that fit, with both types, and their ratios."""
    rates, fitting = [], []
    for kind in TYPES:
        loop = _loop(model, kind)
        step, prompt = _decode_step(loop)
        rates.append(ROWS / step * 1e3)
        report(
            model=name,
            kv_dtype=kind,
            measure=f"decode {ROWS} x {CONTEXT}",
            step_ms=round(step, 2),
            tokens_per_second=round(rates[-1]),
            prefill_tokens_per_second=round(prompt),
        )
        del loop
        gc.collect()
        torch.cuda.empty_cache()
    _compare(name, f"decode {ROWS} x {CONTEXT}, tokens/s", rates, RATE_AIM)
    for kind in TYPES:
        fitting.append(plan_memory(model, make_options(kv_dtype=kind, session_tokens=CONTEXT)).sessions)
        report(model=name, kv_dtype=kind, measure=f"sessions of {CONTEXT} that fit", value=fitting[-1])
    _compare(name, f"sessions of {CONTEXT} that fit", fitting, SESSIONS_AIM)


def _compare(name: str, measure: str, values: Sequence[float], aim: float) -> None:
    ratio = values[1] / values[0]
    report(
        model=name, measure=f"{measure}, fp8 to auto", ratio=round(ratio, 3), aim=aim, reached=ratio >= aim
    )


def _loop(model: Model, kind: str) -> EngineLoop:
    tokens = ROWS * (CONTEXT + SPARE + 64)
    loop = open_loop(
        model,
        False,
        kv_dtype=kind,
        page_size=64,
        kv_tokens=tokens,
        window_tokens=tokens if model.memory_shape.window is not None else None,
        state_slots=4 * ROWS,
        overlap=True,
        max_running=ROWS,
        chunk_tokens=8192,
        step_tokens=8192,
        checkpoints=0,
        leave_history=False,
    )
    assert isinstance(loop.executor, Executor)
    loop.executor.capture(first_only=True)  # decode steps of 64 rows are among them
    return loop


def _decode_step(loop: EngineLoop) -> tuple[float, float]:
    """Milliseconds of a decode step of all rows, and tokens per second of their prompts."""
    registry = loop.scheduler.registry
    talks = [Talk(loop, f"long {number}") for number in range(ROWS)]
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for talk in talks:
        talk.begin(words(CONTEXT, next(NEW)), SPARE)
    usual = registry.policy
    registry.policy = replace(usual, mixed_tokens=1 << 31)
    while not all(talk.said for talk in talks):
        loop.step()
    torch.cuda.synchronize()
    rate = ROWS * CONTEXT / (time.perf_counter() - begun)
    registry.policy = usual
    for _ in range(8):
        loop.step()
    means = []
    for _ in range(STEPS // 16):
        before = sum(len(talk.said) for talk in talks)
        begun = time.perf_counter()
        for _ in range(16):
            loop.step()
        took = time.perf_counter() - begun
        means.append(took / (sum(len(talk.said) for talk in talks) - before) * ROWS * 1e3)
    assert not any(talk.over for talk in talks), "a turn ended while it was measured"
    close(loop, talks)
    return statistics.median(means), rate
