"""More conversations than fit on the device: what it costs that most of them lie elsewhere.

An engine in this process, so that what is measured is the moving of memory and nothing else. Two things are
compared within each round, and the figures are medians over the rounds:

    restoring      a long session is brought back from host memory and from disk, beside computing its tokens
    a crowd        ten times as many sessions as fit, a tenth of which talk at a time until all have talked,
                   beside the same conversations on a device that holds them all

Imported only where it is asked for, since it loads torch.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from holdfast.cli.compare.machine import ForeignLoad
from holdfast.cli.compare.measurements import prompt
from holdfast.engine.engine import Engine, Session, Turn
from holdfast.engine.sampling import Sampling

__all__ = ["Sizes", "measure"]

Values = dict[str, tuple[float, str]]
Told = Callable[[str], None]

SLOTS_PER_SESSION = 3
"""States that a session needs while a turn of it runs, with one older resume point."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much: tokens of a long history, and a crowd of `times` as many sessions as the `fit` that fit."""

    history: int = 6000
    fit: int = 4
    times: int = 10
    crowd_history: int = 512
    turns: int = 4
    given: int = 32
    wanted: int = 32

    @property
    def sessions(self) -> int:
        """How many are open."""
        return self.fit * self.times


def measure(
    model: str, loading: dict[str, Any], sizes: Sizes, rounds: int, threads: int, told: Told
) -> list[dict[str, object]]:
    """The figures of some rounds, one object each."""
    torch.set_num_threads(threads)
    taken: dict[str, tuple[str, list[float]]] = {}
    load = ForeignLoad()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            told(f"round {number + 1} of {rounds}: restoring {sizes.history} tokens")
            _note(taken, restoring(model, loading, sizes, Path(folder) / f"disk-{number}", number))
        for values in crowd(model, loading, sizes, rounds, told):
            _note(taken, values)
    common = {
        "sessions": sizes.sessions,
        "fit": sizes.fit,
        "history": sizes.history,
        "crowd_history": sizes.crowd_history,
        "turns": sizes.turns,
        "input_tokens": sizes.given,
        "output_tokens": sizes.wanted,
        "model": Path(model).name,
        "threads": threads,
        "foreign_load": round(load.cores(), 2),
        "system": "engine",
    }
    return [
        {
            "name": name,
            "value": round(median(values), 3),
            "unit": unit,
            "min": round(min(values), 3),
            "max": round(max(values), 3),
            **common,
        }
        for name, (unit, values) in taken.items()
    ]


def _note(taken: dict[str, tuple[str, list[float]]], values: Values) -> None:
    for name, (value, unit) in values.items():
        taken.setdefault(name, (unit, []))[1].append(value)


# --- one long session -----------------------------------------------------------------------------


def restoring(model: str, loading: dict[str, Any], sizes: Sizes, disk: Path, seed: int) -> Values:
    """Compute a long history, and bring it back from either tier; its next turn must compute only itself."""
    per = _room(sizes.history + 8 * sizes.given)
    engine = Engine(
        model,
        kv_tokens=per,
        state_slots=8,
        context_length=per,
        session_tokens=per,
        host_memory=4 << 30,
        disk=str(disk),
        snapshot_seconds=3600.0,
        **loading,
    )
    values: Values = {}
    with engine:
        session = engine.session()
        seconds = _timed(lambda: session.say(prompt(sizes.history, 1000 + seed), _limit(1)).wait())
        values["computing"] = (1e3 * seconds, "ms")
        for tier in ("host", "disk"):
            if not session.spill(tier):
                raise RuntimeError(f"the session did not move to {tier}")
            back = _timed(session.restore)
            turn = session.say(prompt(sizes.given, 2000 + seed), _limit(1)).wait()
            assert turn.usage.computed_tokens <= sizes.given + 2, "what was restored is computed again"
            values[f"restoring_from_{tier}"] = (1e3 * back, "ms")
            values[f"computing_over_restoring_from_{tier}"] = (seconds / back, "ratio")
    return values


# --- a crowd --------------------------------------------------------------------------------------


def crowd(model: str, loading: dict[str, Any], sizes: Sizes, rounds: int, told: Told) -> list[Values]:
    """All talk, a tenth at a time, on a device that holds them all and on one that holds a tenth."""
    per = _room(sizes.crowd_history + (rounds + 1) * sizes.turns * (sizes.given + sizes.wanted))
    common: dict[str, Any] = {**loading, "context_length": per, "session_tokens": per, "checkpoints": 0}
    whole = Engine(
        model,
        kv_tokens=sizes.sessions * per,
        state_slots=sizes.sessions * SLOTS_PER_SESSION,
        **common,
    )
    small = Engine(
        model,
        kv_tokens=sizes.fit * per,
        state_slots=sizes.fit * SLOTS_PER_SESSION,
        host_memory=8 << 30,
        **common,
    )
    found: list[Values] = []
    with whole, small:
        audiences = []
        for name, engine in (("all resident", whole), ("a tenth resident", small)):
            told(f"{name}: {sizes.sessions} histories of {sizes.crowd_history} tokens")
            audiences.append([_begin(engine, sizes, number) for number in range(sizes.sessions)])
        for number in range(rounds + 1):
            told(f"round {number} of {rounds}: {sizes.sessions} sessions, {sizes.fit} at a time")
            order = (0, 1) if number % 2 else (1, 0)
            rates = {place: _talk(audiences[place], sizes, number) for place in order}
            if number:
                found.append(
                    {
                        "all_resident": (rates[0][0], "tokens/s"),
                        "a_tenth_resident": (rates[1][0], "tokens/s"),
                        "a_tenth_over_all": (rates[1][0] / rates[0][0], "ratio"),
                        "computed_a_turn": (rates[1][1], "tokens"),
                    }
                )
    return found


def _begin(engine: Engine, sizes: Sizes, number: int) -> Session:
    session = engine.session()
    session.say(prompt(sizes.crowd_history, 6000 + number), _limit(1)).wait()
    return session


def _talk(sessions: list[Session], sizes: Sizes, seed: int) -> tuple[float, float]:
    """Everybody talks, some at a time: tokens a second, and tokens computed in a turn."""
    done: list[Turn] = []

    def group(first: int) -> None:
        for turn in range(sizes.turns):
            asked = [
                session.say(prompt(sizes.given, seed * 10_000 + turn * 100 + place), _limit(sizes.wanted))
                for place, session in enumerate(sessions[first : first + sizes.fit])
            ]
            done.extend(each.wait() for each in asked)

    began = time.perf_counter()
    for first in range(0, len(sessions), sizes.fit):
        group(first)
    seconds = time.perf_counter() - began
    assert len(done) == sizes.sessions * sizes.turns
    said = sum(len(turn.token_ids) for turn in done)
    assert said == len(done) * sizes.wanted, "every one answers"
    return said / seconds, sum(turn.usage.computed_tokens for turn in done) / len(done)


def _timed(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def _limit(count: int) -> Sampling:
    return Sampling(temperature=0.0, max_tokens=count, ignore_eos=True)


def _room(tokens: int) -> int:
    """Tokens, and some more, in whole pages of any size."""
    return -(-(tokens + 64) // 256) * 256
