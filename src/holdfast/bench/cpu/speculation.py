"""The speed-up of n-gram speculation on texts that repeat themselves, and its cost on one that does not.

    python -m holdfast.bench.cpu.speculation [--repeats 5] [--tokens 160] [--threads 2] [--json]

Two engines, with and without `speculate="ngram"`, in turn; greedy, so that both generate the same tokens. The
figures are medians of the rounds' ratios in wall-clock and in processor time, the numbers of steps, and the
foreign load. An interrupt prints the texts that are complete.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from statistics import median
from typing import Any, NamedTuple

import torch
from rich.console import Console

from holdfast.bench.figures import OURS, Spread
from holdfast.bench.machine import ForeignLoad
from holdfast.bench.tables import make_table
from holdfast.engine.engine import Engine
from holdfast.engine.sampling import Sampling
from holdfast.engine.start.pull import pull

CODE = """def area(width, height):
    return width * height

def volume(width, height, depth):
    return area(width, height) * depth

def surface(width, height, depth):
    return 2 * (area(width, height) + area(width, depth) + area(height, depth))
"""
RIVERS = {"Nile": 6650, "Amazon": 6400, "Yangtze": 6300, "Mississippi": 6275, "Yenisei": 5539, "Ob": 5410}
TEXTS = {
    "code edit": f"Repeat this Python code exactly, but rename width to w:\n```python\n{CODE}```",
    "extraction": "Copy the list of rivers word by word.\n"
    + "\n".join(f"The river {name} is {length} kilometres long." for name, length in RIVERS.items()),
    "free text": "Write a short story about a lighthouse keeper.",
}


class Run(NamedTuple):
    """One answer: its tokens, its steps and its time."""

    tokens: list[int]
    steps: int
    wall: float
    processor: float


def run(engine: Engine, text: str, count: int) -> Run:
    """One turn in a new session."""
    ledger = engine.loop.scheduler.registry.ledger
    began, processor, step = time.perf_counter(), time.process_time(), ledger.step
    with engine.session() as session:
        sampling = Sampling(max_tokens=count, temperature=0.0, ignore_eos=True)
        tokens = session.say(text, sampling).token_ids
        return Run(tokens, ledger.step - step, time.perf_counter() - began, time.process_time() - processor)


def measure(plain: Engine, guessing: Engine, name: str, repeats: int, count: int) -> dict[str, Any]:
    """The speed-up of one text, after a warm-up round."""
    load = ForeignLoad()
    pairs = [(run(plain, TEXTS[name], count), run(guessing, TEXTS[name], count)) for _ in range(repeats + 1)][
        1:
    ]
    assert all(one.tokens == other.tokens for one, other in pairs), "speculation changed the tokens"
    ratio = Spread.of([one.wall / other.wall for one, other in pairs])
    return {
        "name": "speculation",
        "value": ratio.median,
        "unit": "ratio",
        "text": name,
        "output_tokens": count,
        "system": OURS,
        "min": ratio.least,
        "max": ratio.most,
        "rounds": repeats,
        "processor_ratio": round(median(one.processor / other.processor for one, other in pairs), 3),
        "steps_without": pairs[0][0].steps,
        "steps_with": pairs[0][1].steps,
        "foreign_load": round(load.cores(), 2),
    }


def main() -> None:
    """Measure every text and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", dest="as_json", help="print one JSON object a line")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    torch.set_num_threads(chosen.threads)
    path = str(pull("smollm2"))
    options: dict[str, Any] = {"kv_tokens": 8192, "context_length": 4096, "leave_history": False}
    found: list[dict[str, Any]] = []
    try:
        plain, guessing = Engine(path, **options), Engine(path, speculate="ngram", **options)
        for name in TEXTS:
            found.append(measure(plain, guessing, name, chosen.repeats, chosen.tokens))
            if chosen.as_json:
                print(json.dumps(found[-1]), flush=True)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    if chosen.as_json:
        return
    title = f"--speculate ngram over none, SmolLM2-135M-Instruct, {chosen.tokens} tokens"
    numbers = ("steps without", "steps with", "wall-clock ratio", "processor ratio", "foreign load")
    table = make_table(title, None, ("text",), numbers)
    for figure in found:
        keys = ("text", "steps_without", "steps_with", "value", "processor_ratio", "foreign_load")
        table.add_row(*(str(figure[key]) for key in keys))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
