"""Decode and prefill of the default model on the CPU: the engine beside transformers, in one process.

    python -m holdfast.bench.cpu.engine [--threads 2] [--repeats 5] [--prefills 512 2048] [--batches 1 4 16]

Each round measures every case of all systems, so that load on the machine affects all of them; the figures
are medians over the rounds with their range. The engine runs the quantised weights, as `holdfast chat` does,
and the dequantised float32 weights; transformers runs float32.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from rich.console import Console

from holdfast.bench.beside.transformers_system import load
from holdfast.bench.figures import Spread
from holdfast.bench.prompts import prompt
from holdfast.bench.tables import make_table
from holdfast.bench.timing import seconds_of
from holdfast.engine.engine import Engine
from holdfast.engine.sampling import Sampling
from holdfast.engine.start.pull import pull

DECODE_AFTER = 64
DECODED = 64

THEIRS = "transformers float32"

Case = Callable[[int], float]
"""Takes a seed, returns tokens per second."""


def engine_prefill(engine: Engine, length: int, seed: int) -> float:
    """Tokens per second of a prompt."""
    sampling, tokens = Sampling(max_tokens=1, temperature=0.0), prompt(length, seed)
    return length / seconds_of(lambda: engine.generate([tokens], sampling))


def engine_decode(engine: Engine, batch: int, seed: int) -> float:
    """Tokens per second of `batch` concurrent turns, after their first tokens."""
    sampling = Sampling(max_tokens=DECODED + 1, temperature=0.0, ignore_eos=True)
    turns = [engine.session().say(prompt(DECODE_AFTER, seed * 100 + row), sampling) for row in range(batch)]
    while any(not turn._stream.tokens for turn in turns):
        engine.drive()
    said = sum(len(turn._stream.tokens) for turn in turns)
    began = time.perf_counter()
    for turn in turns:
        turn.wait()
    rate = (batch * (DECODED + 1) - said) / (time.perf_counter() - began)
    engine.close()
    return rate


@torch.inference_mode()
def their_prefill(model: Any, length: int, seed: int) -> float:
    """The same with transformers."""
    tokens = torch.tensor([prompt(length, seed)])
    return length / seconds_of(lambda: model(tokens, use_cache=True, logits_to_keep=1))


@torch.inference_mode()
def their_decode(model: Any, batch: int, seed: int) -> float:
    """The same with transformers."""
    rows = [prompt(DECODE_AFTER, seed * 100 + row) for row in range(batch)]
    answer = model(torch.tensor(rows), use_cache=True, logits_to_keep=1)
    began = time.perf_counter()
    for _ in range(DECODED):
        chosen = answer.logits[:, -1].argmax(dim=-1, keepdim=True)
        answer = model(chosen, past_key_values=answer.past_key_values, use_cache=True, logits_to_keep=1)
    return batch * DECODED / (time.perf_counter() - began)


def measure(cases: dict[tuple[str, str], Case], repeats: int) -> dict[tuple[str, str], Spread]:
    """The rates of all cases over the rounds, after a warm-up round."""
    rates: dict[tuple[str, str], list[float]] = {key: [] for key in cases}
    for seed in range(repeats + 1):
        for key, case in cases.items():
            rate = case(seed + 1)
            if seed:
                rates[key].append(rate)
    return {key: Spread.of(values) for key, values in rates.items()}


def make_cases(
    engines: dict[str, Engine], theirs: Any, prefills: Sequence[int], batches: Sequence[int]
) -> dict[tuple[str, str], Case]:
    """All cases, by what is measured and the name of the system."""
    cases: dict[tuple[str, str], Case] = {}
    for length in prefills:
        for name, engine in engines.items():
            cases[f"prefill {length}", name] = partial(engine_prefill, engine, length)
        cases[f"prefill {length}", THEIRS] = partial(their_prefill, theirs, length)
    for batch in batches:
        for name, engine in engines.items():
            cases[f"decode, {batch} at once", name] = partial(engine_decode, engine, batch)
        cases[f"decode, {batch} at once", THEIRS] = partial(their_decode, theirs, batch)
    return cases


def main() -> None:
    """Measure everything and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prefills", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    path = pull("smollm2")
    options: dict[str, Any] = {"kv_tokens": 8192, "context_length": 4096, "leave_history": False}
    engines = {
        "holdfast": Engine(str(path), **options),
        "holdfast float32": Engine(str(path), dtype="float32", **options),
    }
    cases = make_cases(engines, load(path), chosen.prefills, chosen.batches)
    rates = measure(cases, chosen.repeats)
    names = [*engines, THEIRS]
    title = f"SmolLM2-135M-Instruct, tokens/s, {chosen.threads} threads, median and range"
    table = make_table(title, None, ("case",), names)
    for case_name in dict.fromkeys(name for name, _ in cases):
        table.add_row(case_name, *(shown(rates[case_name, name]) for name in names))
    Console(width=120).print(table)


def shown(rates: Spread) -> str:
    """A median with its range."""
    return f"{rates.median:.1f} [{rates.least:.0f}-{rates.most:.0f}]"


if __name__ == "__main__":
    main()
