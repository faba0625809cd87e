"""What the journal adds to the end of a turn, and what it costs the engine's loop.

    python -m holdfast.bench.server.commits [--journal FILE|URL] [--durability commit] [--json]

Makes steps at a fixed interval; in each, some sessions end a turn. `added` is the time from the end of the
step to the acknowledgement of its ends, `loop_step` the processor time that the loop spends on the journal in
a step. Without a model and without sockets. The sessions of the benchmark are removed at its end.
"""

from __future__ import annotations

import argparse
import json
import secrets
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import quantiles

from holdfast.engine.durable.places import shown
from holdfast.engine.durable.records import FinishedTurn
from holdfast.engine.durable.session_log import SessionLog
from holdfast.engine.durable.store import Durability
from holdfast.engine.durable.stores import open_store

__all__ = ["commits", "main"]

VOCABULARY = "benchmark"
IN_TOKENS = OUT_TOKENS = 32


def commits(
    place: str, durability: Durability, sessions: int, steps: int, ends: int, step_seconds: float
) -> dict[str, float]:
    """Figures of one run: milliseconds that the end of a turn waits, microseconds of the loop in a step."""
    journal = open_store(place, durability, VOCABULARY)
    log = SessionLog(journal)
    for _ in journal.sessions():
        continue
    log.start()
    run = secrets.token_hex(4)
    names = [f"bench-{run}-{number}" for number in range(sessions)]
    waited: list[float] = []
    loop_seconds = 0.0
    try:
        for name in names:
            log.opened(name, "bench")
        log.sync()
        for step in range(steps):
            deadline = time.perf_counter() + step_seconds
            began = time.thread_time()
            ended = time.perf_counter()
            for place_in_step in range(ends):
                name = names[(step * ends + place_in_step) % sessions]
                turn = FinishedTurn(
                    f"t{step}-{place_in_step}", "body", "finished", "length", "words " * OUT_TOKENS,
                    *([7] * OUT_TOKENS, IN_TOKENS, 0, IN_TOKENS),
                )  # fmt: skip
                log.ended(name, (5,) * IN_TOKENS, turn)
                log.when_durable(name, partial(_note, waited, ended))
            log.flush()
            loop_seconds += time.thread_time() - began
            while (left := deadline - time.perf_counter()) > 0:
                _rest(log, left)
        log.sync()
    finally:
        for name in names:
            if name in log.sessions:
                log.closed(name, "benchmark")
        log.close()
    cut = quantiles(waited, n=100)
    return {
        "added_p50_ms": 1000 * cut[49],
        "added_p99_ms": 1000 * cut[98],
        "loop_step_us": 1e6 * loop_seconds / steps,
        "turns": float(len(waited)),
    }


def _note(waited: list[float], ended: float) -> None:
    waited.append(time.perf_counter() - ended)


def _rest(log: SessionLog, seconds: float) -> None:
    """Wait as an engine does: until something is durable, or the next step is due."""
    if log.writing:
        log.wait(seconds)
    else:
        time.sleep(seconds)
    log.flush()


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m holdfast.bench.server.commits",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--journal", help="a file, or postgresql://user@host/db (default: a temporary file)")
    parser.add_argument("--durability", choices=("off", "commit", "fsync"), default="commit")
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--ends", type=int, default=2, help="turns that end in a step")
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        place = asked.journal or str(Path(directory) / "journal")
        counts = (asked.sessions, asked.steps, asked.ends)
        figures = commits(place, asked.durability, *counts, asked.step_ms / 1000)
    if asked.json:
        print(json.dumps({"journal": shown(place), "durability": asked.durability, **figures}))
        return
    print(f"{shown(place)}, durability {asked.durability}, {figures['turns']:.0f} turns")
    middle, late = figures["added_p50_ms"], figures["added_p99_ms"]
    print(f"  added to a turn's end   p50 {middle:.2f} ms   p99 {late:.2f} ms")
    print(f"  loop, per step          {figures['loop_step_us']:.0f} us")


if __name__ == "__main__":
    main()
