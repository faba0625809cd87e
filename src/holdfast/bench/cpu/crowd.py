"""`holdfast bench sessions --here`: the cost of spilling and restoring when not all sessions fit.

The engine runs in this process, so that only the moves are measured. Each round compares two things; the
figures are medians over the rounds:

    restoring      a long session is restored from host memory and from disk, beside prefilling its tokens
    a crowd        ten times as many sessions as fit, a tenth of them active at a time, beside the same
                   conversations on a device that holds all of them
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from holdfast.bench.figures import Progress, Spread, Values
from holdfast.bench.machine import ForeignLoad
from holdfast.bench.models import BenchModel
from holdfast.bench.prompts import prompt
from holdfast.bench.timing import in_turn, seconds_of
from holdfast.engine.engine import Engine, Session, Turn
from holdfast.engine.sampling import Sampling

__all__ = ["Sizes", "measure"]

SLOTS_PER_SESSION = 3
"""State slots of a session with a running turn and one older resume point."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The tokens of a long history, and a crowd of `times` as many sessions as `fit` on the device."""

    history: int = 6000
    fit: int = 4
    times: int = 10
    crowd_history: int = 512
    turns: int = 4
    given: int = 32
    wanted: int = 32

    @property
    def sessions(self) -> int:
        """How many sessions are open."""
        return self.fit * self.times


def measure(
    model: BenchModel, sizes: Sizes, rounds: int, threads: int, progress: Progress
) -> list[dict[str, object]]:
    """The figures over the rounds."""
    torch.set_num_threads(threads)
    taken: dict[str, tuple[str, list[float]]] = {}
    load = ForeignLoad()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            progress(f"round {number + 1} of {rounds}: restoring {sizes.history} tokens")
            _note(taken, restoring(model, sizes, Path(folder) / f"disk-{number}", number))
        for values in crowd(model, sizes, rounds, progress):
            _note(taken, values)
    common = {
        "sessions": sizes.sessions,
        "fit": sizes.fit,
        "history": sizes.history,
        "crowd_history": sizes.crowd_history,
        "turns": sizes.turns,
        "input_tokens": sizes.given,
        "output_tokens": sizes.wanted,
        "model": model.path.name,
        "threads": threads,
        "foreign_load": round(load.cores(), 2),
        "system": "engine",
    }
    return [_figure(name, unit, Spread.of(values), common) for name, (unit, values) in taken.items()]


def _figure(name: str, unit: str, spread: Spread, common: dict[str, object]) -> dict[str, object]:
    limits = {"min": spread.least, "max": spread.most}
    return {"name": name, "value": spread.median, "unit": unit, **limits, **common}


def _note(taken: dict[str, tuple[str, list[float]]], values: Values) -> None:
    for name, (value, unit) in values.items():
        taken.setdefault(name, (unit, []))[1].append(value)


# --- one long session -----------------------------------------------------------------------------


def restoring(model: BenchModel, sizes: Sizes, disk: Path, seed: int) -> Values:
    """Prefill a long history, then restore it from either tier; the next turn must not recompute it."""
    per = _room(sizes.history + 8 * sizes.given)
    engine = Engine(
        str(model.path),
        kv_tokens=per,
        state_slots=8,
        context_length=per,
        session_tokens=per,
        host_memory=4 << 30,
        disk=str(disk),
        snapshot_seconds=3600.0,
        **model.options(),
    )
    values: Values = {}
    with engine:
        session = engine.session()
        seconds = seconds_of(lambda: session.say(prompt(sizes.history, 1000 + seed), _limit(1)).wait())
        values["computing"] = (1e3 * seconds, "ms")
        for tier in ("host", "disk"):
            if not session.spill(tier):
                raise RuntimeError(f"the session did not move to {tier}")
            back = seconds_of(session.restore)
            turn = session.say(prompt(sizes.given, 2000 + seed), _limit(1)).wait()
            assert turn.usage.computed_tokens <= sizes.given + 2, "restored tokens were recomputed"
            values[f"restoring_from_{tier}"] = (1e3 * back, "ms")
            values[f"computing_over_restoring_from_{tier}"] = (seconds / back, "ratio")
    return values


# --- a crowd --------------------------------------------------------------------------------------


def crowd(model: BenchModel, sizes: Sizes, rounds: int, progress: Progress) -> list[Values]:
    """All sessions take turns, a tenth at a time, on a device that holds all and on one that holds few."""
    per = _room(sizes.crowd_history + (rounds + 1) * sizes.turns * (sizes.given + sizes.wanted))
    common: dict[str, Any] = {
        **model.options(),
        "context_length": per,
        "session_tokens": per,
        "checkpoints": 0,
    }
    whole = Engine(
        str(model.path),
        kv_tokens=sizes.sessions * per,
        state_slots=sizes.sessions * SLOTS_PER_SESSION,
        **common,
    )
    small = Engine(
        str(model.path),
        kv_tokens=sizes.fit * per,
        state_slots=sizes.fit * SLOTS_PER_SESSION,
        host_memory=8 << 30,
        **common,
    )
    found: list[Values] = []
    with whole, small:
        audiences = []
        for name, engine in (("all resident", whole), ("a tenth resident", small)):
            progress(f"{name}: {sizes.sessions} histories of {sizes.crowd_history} tokens")
            audiences.append([_begin(engine, sizes, number) for number in range(sizes.sessions)])
        for number in range(rounds + 1):
            progress(f"round {number} of {rounds}: {sizes.sessions} sessions, {sizes.fit} at a time")
            rates = {place: _talk(audiences[place], sizes, number) for place in in_turn((1, 0), number)}
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
    """All sessions take their turns, `fit` at a time; returns tokens/s and the tokens computed per turn."""
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
    assert said == len(done) * sizes.wanted, "an answer is shorter than asked"
    return said / seconds, sum(turn.usage.computed_tokens for turn in done) / len(done)


def _limit(count: int) -> Sampling:
    return Sampling(temperature=0.0, max_tokens=count, ignore_eos=True)


def _room(tokens: int) -> int:
    """Tokens with some slack, rounded up to whole pages of any size."""
    return -(-(tokens + 64) // 256) * 256
