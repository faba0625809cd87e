"""One run of Holdfast beside other systems: start them, measure in rounds, stop them.

A run ends early when its minutes are over or a signal arrives; the systems are stopped in any case, and the
figures measured so far are returned.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.bench.beside.cases import Case
from holdfast.bench.beside.http import BenchError
from holdfast.bench.beside.rounds import INTERRUPTED, Measured, run
from holdfast.bench.beside.systems import CONTEXT, Holdfast, LlamaServer, System
from holdfast.bench.figures import Progress
from holdfast.bench.models import BenchModel

__all__ = ["Comparison", "Limits", "Others", "compare"]

NOT_INSTALLED = (
    "transformers is not installed; install it with pip install 'holdfast[bench]', or pass --alone"
)


@dataclass(frozen=True, slots=True)
class Others:
    """The systems beside Holdfast; `second` are the options of a second Holdfast, `context` is for all."""

    transformers: bool = True
    llama_server: Path | None = None
    second: tuple[str, ...] = ()
    context: int = CONTEXT


@dataclass(frozen=True, slots=True)
class Limits:
    """How many rounds, for how long at most, and with how many threads in each system."""

    rounds: int
    minutes: float
    threads: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outcome of a run; `signal_number` is the signal that ended it, or 0."""

    model: str
    measured: Measured
    signal_number: int


def compare(
    cases: Sequence[Case], model: BenchModel, others: Others, limits: Limits, progress: Progress
) -> Comparison:
    """Measure the cases with Holdfast and the others. Raises `BenchError`."""
    systems = make_systems(cases, model, others, limits.threads)
    measured, signal_number = asyncio.run(run_systems(cases, systems, limits, progress))
    return Comparison(model.path.name, measured, signal_number)


def make_systems(cases: Sequence[Case], model: BenchModel, others: Others, threads: int) -> list[System]:
    """The systems of a run, none of them started."""
    path, context = model.path, others.context
    systems: list[System] = [Holdfast(str(path), options=model.arguments(), context=context)]
    if others.second:
        name = f"holdfast {' '.join(others.second)}"
        systems.append(Holdfast(str(path), name, (*model.arguments(), *others.second), context))
    if others.transformers:
        if importlib.util.find_spec("transformers") is None:
            raise BenchError(NOT_INSTALLED)
        # Imports torch and transformers, which take seconds.
        theirs = importlib.import_module("holdfast.bench.beside.transformers_system")
        systems.append(theirs.Transformers(path, threads))
        if any(case.parameters.get("streams", 1) > 1 for case in cases):
            systems.append(theirs.ContinuousBatching(path, threads))
    if others.llama_server is not None:
        systems.append(LlamaServer(others.llama_server, path, threads, context))
    return systems


async def run_systems(
    cases: Sequence[Case], systems: Sequence[System], limits: Limits, progress: Progress
) -> tuple[Measured, int]:
    """Start the systems, measure, stop them; returns what was measured and the signal that ended it, or 0.

    The first signal ends the measuring. Signals that arrive while the systems stop are ignored.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    signals: list[int] = []

    def end(number: int) -> None:
        signals.append(number)
        if len(signals) == 1 and not time_over.cancelled():
            task.cancel()

    time_over = loop.call_later(60 * limits.minutes, task.cancel)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end, number)
    started: list[System] = []
    try:
        for system in systems:
            progress(f"starting {system.name}")
            started.append(system)
            await system.start()
        measured = await run(cases, systems, limits.rounds, progress, time_over.when() - loop.time())
    except asyncio.CancelledError:
        measured = Measured([], INTERRUPTED)
    finally:
        time_over.cancel()
        for system in started:
            await system.stop()
    if measured.ended == INTERRUPTED and not signals:
        measured = replace(measured, ended=f"ended after {limits.minutes:g} minutes")
    return measured, signals[0] if signals else 0
