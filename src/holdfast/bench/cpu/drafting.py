"""Speculation by a draft model: steps at planted agreement, the cost of verification, and real acceptance.

    python -m holdfast.bench.cpu.drafting [--tokens 96] [--repeats 3] [--layers 8,15,24] [--json]

Planted: an engine of SmolLM2 is told three drafts a step, each right with a given probability; no draft model
runs. The figures are steps per token, the ratio in wall-clock time to an engine without drafts, and what a
step with drafts costs beside one without. Real: SmolLM2 drafts for itself, shortened to its first layers. The
figures are the part of drafts that is accepted, with drafts forced and as the engine decides, and how often
it has switched them off. Answers are compared with those without drafts.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from rich.console import Console

from holdfast.bench.cpu.speculation import TEXTS
from holdfast.bench.machine import ForeignLoad
from holdfast.bench.shortened import shorten
from holdfast.bench.tables import make_table
from holdfast.core.session import Session
from holdfast.core.turn import Turn
from holdfast.engine.draft.gain import Costs
from holdfast.engine.engine import Engine
from holdfast.engine.sampling import Sampling
from holdfast.engine.start.pull import pull

__all__ = ["main", "plant", "planted", "real"]

AGREEMENTS = (0.6, 0.8)
DRAFTS = 3
ROWS = (1, 4)
ALWAYS = Costs(0.01, 0.0)
"""Costs under which drafts always pay."""


class Run(NamedTuple):
    """The answers of some rows: their tokens, the steps that they took, and the time."""

    tokens: list[list[int]]
    steps: int
    seconds: float


def run(engine: Engine, text: str, rows: int, count: int) -> Run:
    """The same turn in so many new sessions at a time."""
    ledger = engine.loop.scheduler.registry.ledger
    sessions = [engine.session() for _ in range(rows)]
    began, step = time.perf_counter(), ledger.step
    sampling = Sampling(max_tokens=count, temperature=0.0, ignore_eos=True)
    turns = [session.say(text, sampling) for session in sessions]
    tokens = [turn.token_ids for turn in turns]
    found = Run(tokens, ledger.step - step, time.perf_counter() - began)
    for session in sessions:
        session.close()
    return found


def plant(engine: Engine, answer: list[int], agreement: float, drafts: int = DRAFTS) -> None:
    """Propose an answer that is known, each of its tokens wrong with a probability, the same in each run."""
    vocabulary = engine.loop.setup.model.config.vocabulary
    dice = random.Random(1)
    right = [dice.random() < agreement for _ in answer]

    def propose(_: Session, turn: Turn) -> list[int]:
        """The next tokens, some of them changed."""
        first = turn.generated
        return [
            token if right[first + place] else (token + 1) % vocabulary
            for place, token in enumerate(answer[first : first + drafts])
        ]

    engine.loop.scheduler.planner.propose = propose


def planted(
    plain: Engine, told: Engine, agreement: float, rows: int, count: int, repeats: int
) -> dict[str, Any]:
    """Steps and time at a planted agreement, beside an engine without drafts."""
    text, load = TEXTS["free text"], ForeignLoad()
    plant(told, run(plain, text, 1, count).tokens[0], agreement)
    pairs = [(run(plain, text, rows, count), run(told, text, rows, count)) for _ in range(repeats)]
    assert all(one.tokens == other.tokens for one, other in pairs), "drafts changed the answer"
    one, other = pairs[0]
    return {
        "name": "planted drafts",
        "agreement": agreement,
        "drafts": DRAFTS,
        "rows": rows,
        "steps_without": one.steps,
        "steps_with": other.steps,
        "wall_ratio": round(median(a.seconds / b.seconds for a, b in pairs), 3),
        "step_cost": round(median(b.seconds / b.steps / (a.seconds / a.steps) for a, b in pairs), 3),
        "foreign_load": round(load.cores(), 2),
    }


def real(
    path: Path, draft: Path, layers: int, count: int, options: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Acceptance of a model's first layers as its draft, for each text."""
    plain = Engine(str(path), **options)
    for forced in (True, False):
        engine = Engine(str(path), draft=str(draft), draft_tokens=4096, **options)
        drafts = engine.loop.drafts
        assert drafts is not None
        if forced:
            drafts.costs = ALWAYS
        counters = engine.loop.scheduler.registry.counters
        for name, text in TEXTS.items():
            before = counters.drafted_tokens, counters.accepted_tokens
            one, other = run(plain, text, 1, count), run(engine, text, 1, count)
            assert one.tokens == other.tokens, "drafts changed the answer"
            drafted, accepted = counters.drafted_tokens - before[0], counters.accepted_tokens - before[1]
            yield {
                "name": "shortened draft",
                "layers": layers,
                "text": name,
                "forced": forced,
                "drafted": drafted,
                "accepted": accepted,
                "part": round(accepted / drafted, 3) if drafted else None,
                "steps_without": one.steps,
                "steps_with": other.steps,
                "wall_ratio": round(one.seconds / other.seconds, 3),
            }


def main() -> None:
    """Measure and print two tables, or one JSON object a line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", default="8,15,24", help="layers of shortened models, with commas")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", dest="as_json", help="print one JSON object a line")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    path = pull("smollm2")
    options: dict[str, Any] = {"kv_tokens": 8192, "context_length": 4096, "leave_history": False}
    found: list[dict[str, Any]] = []

    def note(figure: dict[str, Any]) -> None:
        found.append(figure)
        if chosen.as_json:
            print(json.dumps(figure), flush=True)

    plain, told = Engine(str(path), **options), Engine(str(path), speculate="ngram", **options)
    for agreement in AGREEMENTS:
        for rows in ROWS:
            note(planted(plain, told, agreement, rows, chosen.tokens, chosen.repeats))
    with tempfile.TemporaryDirectory(prefix="shortened-") as folder:
        for layers in map(int, chosen.layers.split(",")):
            draft = shorten(path, layers, Path(folder) / f"first-{layers}.gguf")
            for figure in real(path, draft, layers, chosen.tokens, options):
                note(figure)
    if not chosen.as_json:
        _print(found)


def _print(found: list[dict[str, Any]]) -> None:
    """A table for each kind of figure."""
    for name in dict.fromkeys(figure["name"] for figure in found):
        rows = [figure for figure in found if figure["name"] == name]
        keys = [key for key in rows[0] if key != "name"]
        table = make_table(f"SmolLM2-135M-Instruct, {name}", None, (), tuple(keys))
        for figure in rows:
            table.add_row(*(str(figure[key]) for key in keys))
        Console(width=140).print(table)


if __name__ == "__main__":
    main()
