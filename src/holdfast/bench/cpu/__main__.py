"""All figures of the default model on the CPU in one run: the table of docs/benchmarks.md.

    python -m holdfast.bench.cpu --llama-server PATH [--lines cpu.jsonl] [--minutes 6] [--tiny]

Runs `holdfast bench throughput`, `turns` and `abort`, `holdfast.bench.cpu.speculation` and
`holdfast.bench.cpu.constrained`, each for `--minutes` at most, and prints one Markdown table with the
targets. Every figure is appended to `--lines`. A signal ends the running command; the table shows the figures
measured so far. `--tiny` is a smoke test.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.bench.figures import OURS

Figure = dict[str, Any]

LLAMA = "llama-server"
LOOP = "transformers"
BATCH = "generate_batch"

STOP_SECONDS_MAX = 60.0
"""How much longer than its limit a command may run, to stop the systems that it started."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: which figure, and the targets, as ratios of Holdfast to other systems."""

    title: str
    name: str
    aims: dict[str, tuple[str, float]]
    where: Callable[[Figure], bool] = lambda _: True


ROWS = (
    Row("1 stream, 64 in, 128 out, tokens/s", "throughput", {LLAMA: (">=", 1.1), LOOP: (">=", 3.0)},
        lambda figure: figure["streams"] == 1),
    Row("16 streams, tokens/s", "throughput", {LLAMA: (">=", 2.5), BATCH: (">=", 4.0)},
        lambda figure: figure["streams"] > 1),
    Row("16 streams, first token, ms", "first_token", {}, lambda figure: figure["streams"] > 1),
    Row("16 streams, between tokens, ms", "between_tokens", {}, lambda figure: figure["streams"] > 1),
    Row("prompt of 512, tokens/s", "prefill", {LLAMA: (">=", 3.0), LOOP: (">=", 1.0)}),
    Row("first token of turn 2 (32 in, 32 out), ms", "first_token_of_turn_2", {}),
    Row("first token of turn 20, ms", "first_token_of_turn_20", {LLAMA: ("<=", 0.4)}),
    Row("first token of a normal turn, ms", "first_token_of_a_turn", {}),
    Row("first token of the turn right after an abort, ms", "first_token_at_once_after_abort", {}),
    Row("the same to a normal turn", "at_once_after_abort_over_normal", {"": ("<=", 1.2)}),
    Row("asked for 0.1 s later, to a normal turn", "after_abort_over_normal", {}),
    Row("`--speculate ngram`, code edit, to none", "speculation",
        {"": (">=", 1.5)}, lambda figure: figure["text"] == "code edit"),
    Row("`--speculate ngram`, extraction, to none", "speculation",
        {"": (">=", 1.5)}, lambda figure: figure["text"] == "extraction"),
    Row("`--speculate ngram`, free text, to none", "speculation",
        {}, lambda figure: figure["text"] == "free text"),
    Row("16 rows with JSON schemas, tokens/s, to none", "constrained", {"": (">=", 0.95)}),
    Row("object with six fixed keys, steps per token", "steps_per_token_of_fixed_keys", {"": ("<=", 0.6)}),
)  # fmt: skip


def commands(llama_server: str | None, minutes: float, threads: int | None, tiny: bool) -> list[list[str]]:
    """The command lines to run, in order."""
    bench = [sys.executable, "-m", "holdfast.cli", "bench"]
    common = ["--json", "--minutes", str(minutes)]
    if llama_server is not None:
        common += ["--llama-server", llama_server]
    if threads is not None:
        common += ["--threads", str(threads)]
    small = ["--rounds", "1", "--output-tokens", "4"] if tiny else []
    few = ["--streams", "1", "--streams", "2", "--prefill", "64"] if tiny else []
    guesses = [sys.executable, "-m", "holdfast.bench.cpu.speculation", "--json"]
    constrained = [sys.executable, "-m", "holdfast.bench.cpu.constrained", "--json"]
    for command in (guesses, constrained):
        command += ["--threads", str(threads)] if threads is not None else []
    return [
        [*bench, "throughput", *common, *small, *few],
        [*bench, "turns", *common, *small, *(["--turns", "2"] if tiny else [])],
        [*bench, "abort", *common, *small, *(["--turn", "3"] if tiny else ["--rounds", "4"])],
        [*guesses, *(["--repeats", "1", "--tokens", "16"] if tiny else [])],
        [*constrained, *(["--repeats", "1", "--tokens", "16", "--rows", "4"] if tiny else [])],
    ]


def run(command: list[str], minutes: float, lines: Path | None) -> tuple[list[Figure], bool]:
    """The figures of a command, and whether it was not interrupted; an interrupt is passed on to it."""
    print("$", " ".join(command), file=sys.stderr, flush=True)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    said, interrupted, deadline = "", False, time.monotonic() + 60 * minutes + STOP_SECONDS_MAX
    while True:
        try:
            said, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
            break
        except subprocess.TimeoutExpired:
            process.terminate()
        except KeyboardInterrupt:
            interrupted = True
            process.terminate()
    if lines is not None:
        with lines.open("a", encoding="utf-8") as file:
            file.write(said)
    figures = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    if process.returncode:
        print(f"ended with {process.returncode}, {len(figures)} figures", file=sys.stderr, flush=True)
    return figures, not interrupted


def number(value: float) -> str:
    """A number with three significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def cell(figure: Figure | None) -> str:
    """A median with its range."""
    if figure is None:
        return ""
    return f"{number(figure['value'])} ({number(figure['min'])}-{number(figure['max'])})"


def aim(kind: str, wanted: float, found: float | None) -> str:
    """A target, and whether it is met."""
    met = found is not None and (found >= wanted if kind == ">=" else found <= wanted)
    return f"{kind} {wanted:g}: {'met' if met else 'not measured' if found is None else 'missed'}"


def line(row: Row, figures: list[Figure]) -> str:
    """One line of the table."""
    found = {
        figure["system"]: figure for figure in figures if figure["name"] == row.name and row.where(figure)
    }
    ours = found.get(OURS)
    ratios = {other: ours.get(f"ratio_to_{other}") if ours else None for other in (LLAMA, BATCH, LOOP)}
    aims = []
    for other, (kind, wanted) in row.aims.items():
        value = (ours["value"] if ours else None) if not other else ratios[other]
        aims.append(aim(kind, wanted, value) + (f" ({other})" if other else ""))
    foreign = max((figure["foreign_load"] for figure in found.values()), default=0.0)
    cells = [row.title, *(cell(found.get(system)) for system in (OURS, LLAMA, BATCH, LOOP))]
    cells += ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios.values()]
    return "| " + " | ".join([*cells, "; ".join(aims), f"{foreign:.2f}"]) + " |"


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--llama-server", help="path of a llama-server to measure too")
    parser.add_argument("--lines", type=Path, help="append every figure to this file, one JSON object a line")
    parser.add_argument("--minutes", type=float, default=6.0, help="time limit of each command")
    parser.add_argument("--threads", type=int, help="threads of each system (default: all cores)")
    parser.add_argument("--tiny", action="store_true", help="smoke test: measure very little")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    figures: list[Figure] = []
    for command in commands(chosen.llama_server, chosen.minutes, chosen.threads, chosen.tiny):
        more, whole = run(command, chosen.minutes, chosen.lines)
        figures += more
        if not whole:
            break
    headings = ["work", OURS, LLAMA, BATCH, LOOP, *(f"to {other}" for other in (LLAMA, BATCH, LOOP))]
    headings += ["aim", "foreign load, cores"]
    print("| " + " | ".join(headings) + " |")
    print("|" + " --- |" * len(headings))
    for row in ROWS:
        print(line(row, figures))


if __name__ == "__main__":
    main()
