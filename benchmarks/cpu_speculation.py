"""What guessing brings on texts that repeat themselves, and costs on one that does not.

    python -m benchmarks.cpu_speculation [--repeats 5] [--tokens 160]

The same engine with and without `speculate="ngram"`, in turns; greedy, so that both must say the same tokens.
Shown are medians of the rounds' ratios, in wall-clock and in processor time, and the numbers of steps.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from holdfast import Engine, Sampling
from holdfast.engine.pull import pull

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
    """One answer: what was said, in how many steps and how much time."""

    tokens: list[int]
    steps: int
    wall: float
    processor: float


def run(engine: Engine, text: str, count: int) -> Run:
    """One turn in a session of its own."""
    ledger = engine.loop.scheduler.registry.ledger
    began, processor, step = time.perf_counter(), time.process_time(), ledger.step
    with engine.session() as session:
        sampling = Sampling(max_tokens=count, temperature=0.0, ignore_eos=True)
        tokens = session.say(text, sampling).token_ids
        return Run(tokens, ledger.step - step, time.perf_counter() - began, time.process_time() - processor)


def main() -> None:
    """Measure every text and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--threads", type=int, default=2)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    path = str(pull("smollm2"))
    options: dict[str, object] = {"kv_tokens": 8192, "context_length": 4096, "leave_history": False}
    plain, guessing = Engine(path, **options), Engine(path, speculate="ngram", **options)
    table = Table(title=f"--speculate ngram over none, SmolLM2-135M-Instruct, {chosen.tokens} tokens")
    for heading in ("text", "steps without", "steps with", "wall-clock ratio", "processor ratio"):
        table.add_column(heading, justify="left" if heading == "text" else "right")
    for name, text in TEXTS.items():
        pairs = [
            (run(plain, text, chosen.tokens), run(guessing, text, chosen.tokens))
            for _ in range(chosen.repeats + 1)
        ][1:]  # The first round warms up.
        assert all(one.tokens == other.tokens for one, other in pairs), "guesses must change nothing"
        without, with_guesses = pairs[0]
        table.add_row(
            name,
            str(without.steps),
            str(with_guesses.steps),
            f"{median(one.wall / other.wall for one, other in pairs):.2f}",
            f"{median(one.processor / other.processor for one, other in pairs):.2f}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
