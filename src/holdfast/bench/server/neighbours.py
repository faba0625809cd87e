"""How long other clients wait for their next token while one client attacks.

    python -m holdfast.bench.server.neighbours [--json] [--only NAME] [--part K/N] [--rounds 5] [--seconds 3]

A real server of the echo model with a sleep in each step (`--step-ms`), which takes time but no processor, as
a GPU does. Four neighbours stream without end. Each round measures them for some seconds without an attack,
then for as long with one. The attacker is a process of its own. A pause is measured to its end.

The table has medians over the rounds: the longest pause between two tokens of any neighbour, calm and
attacked, the number of steps by which the attack lengthens it (the target is at most two), and the median
pause. The server's processes, the attacker and this process share the processors: `processor` is a control
that only keeps one busy, and `waited` is how many milliseconds per second the server's threads were runnable
without a processor during the attack (from the kernel's schedstat), which is not the server's fault. The
garbage collector of this process is off: it would take longer than two steps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import runpy
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

from holdfast.bench.machine import run_queue_seconds
from holdfast.bench.served import ServerProcess
from holdfast.bench.server.attacks import ATTACKS, KEY, NEEDS_SESSIONS, Target, asking, attack_until, post
from holdfast.bench.timing import collector_off

MODULE = "holdfast.bench.server.neighbours"
NEIGHBOURS = 4
STANDSTILL_SECONDS = 60.0
SESSIONS = 2000
SIZES = ("--context-length", "200000", "--kv-tokens", "1600000", "--max-sessions", "20000")


# --- the server -----------------------------------------------------------------------------------


def serve_in_steps(step_ms: float, arguments: list[str]) -> None:
    """The server's process; it starts its engine through this module, which makes each step take its time."""
    with tempfile.TemporaryDirectory() as directory:
        python = Path(directory) / "python"
        engine = f'exec {sys.executable} -m {MODULE} --engine {step_ms} "$3" "$4"'
        python.write_text(
            f'#!/bin/sh\nif [ "$2" = holdfast.server.link.worker ]; then {engine}; fi\n'
            f'exec {sys.executable} "$@"\n'
        )
        python.chmod(0o700)
        sys.executable = str(python)
        sys.argv = ["holdfast", "serve", "echo", *arguments]
        runpy.run_module("holdfast.cli", run_name="__main__", alter_sys=True)


def engine_in_steps(step_ms: float, arguments: list[str]) -> None:
    """The engine's process: the worker with a model that sleeps in each step."""
    executor = import_module("holdfast.engine.echo").EchoExecutor
    plain = executor.finish

    def finish(self: Any, flight: Any) -> Any:
        time.sleep(step_ms / 1000)
        return plain(self, flight)

    executor.finish = finish
    sys.argv = ["holdfast.server.link.worker", *arguments]
    runpy.run_module("holdfast.server.link.worker", run_name="__main__", alter_sys=True)


@contextmanager
def serving(step_ms: float, keys: int) -> Iterator[tuple[Target, int]]:
    """A server and its process id; with `keys` it has that many API keys of 1,000 tenants."""
    with tempfile.TemporaryDirectory() as directory:
        options = [*SIZES]
        if keys:
            path = Path(directory) / "keys"
            path.write_text(
                "".join(f"t{number % 1000}:k-{number}\n" for number in range(keys)) + f"ann:{KEY}\n"
            )
            path.chmod(0o600)
            options += ["--api-keys", str(path)]
        command = (sys.executable, "-m", MODULE, "--serve", str(step_ms))
        with ServerProcess(*options, command=command) as server:
            yield Target(server.url), server.pid


# --- neighbours -----------------------------------------------------------------------------------


async def skip_response(reader: asyncio.StreamReader) -> None:
    """Read one response to the end of its body."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
    if length is None:
        raise ConnectionError(f"the server answered a neighbour with {head[:60]!r}")
    await reader.readexactly(int(length[1]))


@dataclass(slots=True)
class Stream:
    """One neighbour, and the times at which its tokens arrived."""

    name: str
    arrivals: list[float] = field(default_factory=list)

    async def run(self, target: Target) -> None:
        """Stream one long turn after another on a session."""
        reader, writer = await asyncio.open_connection(*target.address)
        writer.write(target.request("POST", "/v1/sessions", {"id": self.name}))
        await skip_response(reader)
        while True:
            sampling = {"max_tokens": 100_000, "ignore_eos": True}
            body = {"input": self.name, "stream": True, "sampling": sampling}
            writer.write(target.request("POST", f"/v1/sessions/{self.name}/turns", body))
            while b"event: done" not in (piece := await reader.read(1 << 16)):
                if not piece:
                    raise ConnectionError("the server closed the stream of a neighbour")
                if b'"token_ids"' in piece:
                    self.arrivals.append(time.perf_counter())
            writer.write(target.request("POST", f"/v1/sessions/{self.name}/rewind", {"to_turn": 0}))
            await skip_response(reader)

    def pauses(self, since: float, until: float) -> list[float]:
        """Pauses that overlap with a time span, in milliseconds."""
        return [(b - a) * 1000 for a, b in pairwise(self.arrivals) if b >= since and a < until]


async def measure(streams: list[Stream], seconds: float) -> list[float]:
    """All pauses of all neighbours that begin in the next seconds, measured to their ends."""
    since = time.perf_counter()
    await asyncio.sleep(seconds)
    until = time.perf_counter()
    deadline = until + STANDSTILL_SECONDS
    while any(stream.arrivals[-1] < until for stream in streams) and time.perf_counter() < deadline:
        await asyncio.sleep(0.01)
    found = [pause for stream in streams for pause in stream.pauses(since, until)]
    still = [stream for stream in streams if stream.arrivals[-1] < until]
    return [*found, *((time.perf_counter() - stream.arrivals[-1]) * 1000 for stream in still)]


async def calmed(streams: list[Stream], step_ms: float) -> None:
    """Wait until the tokens of all neighbours arrive regularly."""
    deadline = time.perf_counter() + STANDSTILL_SECONDS
    while time.perf_counter() < deadline:
        now = time.perf_counter()
        lately = [[*stream.arrivals[-20:], now] for stream in streams]
        if all(len(each) > 20 and max(b - a for a, b in pairwise(each)) < step_ms / 100 for each in lately):
            return
        await asyncio.sleep(0.05)


@dataclass(frozen=True, slots=True)
class Plan:
    """Rounds of an attack, and the seconds of each half of a round."""

    rounds: int
    seconds: float
    step_ms: float


async def run_attack(name: str, target: Target, pid: int, plan: Plan) -> dict[str, float]:
    """The pauses of the neighbours without and with an attack, alternating; medians over the rounds."""
    context = multiprocessing.get_context("spawn")
    streams = [Stream(f"neighbour-{number}") for number in range(NEIGHBOURS)]
    running = [asyncio.create_task(stream.run(target)) for stream in streams]
    calm: list[list[float]] = []
    attacked: list[list[float]] = []
    waited, count = 0.0, context.Value("q", 0)
    try:
        for _ in range(plan.rounds):
            ready, go = context.Event(), context.Event()
            attacker = context.Process(
                target=attack_until, args=(name, target, ready, go, count), daemon=True
            )
            attacker.start()
            while not ready.is_set():
                await asyncio.sleep(0.05)
            await calmed(streams, plan.step_ms)
            calm.append(await measure(streams, plan.seconds))
            before = await asyncio.to_thread(run_queue_seconds, pid)
            go.set()
            measuring = asyncio.create_task(measure(streams, plan.seconds))
            await asyncio.sleep(plan.seconds)
            attacker.kill()
            waited += await asyncio.to_thread(run_queue_seconds, pid) - before
            attacked.append(await measuring)
            for task in running:
                if task.done():
                    task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return {
        "calm_median_ms": statistics.median(pause for each in calm for pause in each),
        "calm_longest_ms": statistics.median(max(each) for each in calm),
        "attacked_median_ms": statistics.median(pause for each in attacked for pause in each),
        "attacked_longest_ms": statistics.median(max(each) for each in attacked),
        "attacked_worst_ms": max(max(each) for each in attacked),
        "waited_ms_per_s": waited * 1e3 / (plan.rounds * plan.seconds),
        "attacks": count.value,
    }


def fill(target: Target) -> None:
    """Open idle sessions, for attacks that list them."""
    requests = asking(post("/v1/sessions", {}))(target)
    for _ in range(SESSIONS):
        next(requests)


def show(name: str, figures: dict[str, float], step_ms: float, as_json: bool) -> None:
    """Print the figures of one attack."""
    steps = (figures["attacked_longest_ms"] - figures["calm_longest_ms"]) / step_ms
    load = round(os.getloadavg()[0], 1)
    if as_json:
        common = {"attack": name, "step_ms": step_ms, "neighbours": NEIGHBOURS, "load": load}
        for figure, value in figures.items():
            unit = "ms" if figure.endswith("_ms") else "ms/s" if figure.endswith("per_s") else "rounds"
            print(json.dumps({"name": figure, "value": round(value, 2), "unit": unit, **common}), flush=True)
        line = {"name": "steps_longer", "value": round(steps, 2), "unit": "steps", **common}
        print(json.dumps(line), flush=True)
        return
    print(
        f"{name:<20} {figures['calm_median_ms']:8.1f} {figures['calm_longest_ms']:8.1f} "
        f"{figures['attacked_median_ms']:9.1f} {figures['attacked_longest_ms']:9.1f} "
        f"{figures['attacked_worst_ms']:9.1f} {steps:7.1f} {figures['waited_ms_per_s']:8.0f} "
        f"{figures['attacks']:9.0f}  (load {load})",
        flush=True,
    )


def part(text: str) -> tuple[int, int]:
    """`K/N` as two numbers."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError("must be K/N, with K from 1 to N")
    return int(found[1]), int(found[2])


def chosen(starts: list[str], number: int, parts: int) -> list[str]:
    """The attacks whose names start with any of `starts`, all without; of these, one part of several."""
    names = [name for name in ATTACKS if not starts or name.startswith(tuple(starts))]
    size = -(-len(names) // parts)
    return names[(number - 1) * size : number * size]


def main() -> None:
    """Run the attacks that the arguments select."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.add_argument(
        "--only", action="append", default=[], help="run only attacks whose name starts with this; repeatable"
    )
    parser.add_argument("--part", type=part, default=(1, 1), help="run the Kth of N parts of them, as K/N")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds of each half of a round")
    parser.add_argument("--step-ms", type=float, default=20.0)
    arguments = parser.parse_args()
    plan = Plan(arguments.rounds, arguments.seconds, arguments.step_ms)
    if not arguments.json:
        print(
            f"{'attack':<20} {'calm':>8} {'longest':>8} {'attacked':>9} {'longest':>9} {'worst':>9} "
            f"{'steps':>7} {'waited':>8} {'rounds':>9}   pauses in ms, waited in ms a second"
        )
    for name in chosen(arguments.only, *arguments.part):
        with serving(arguments.step_ms, 99_000 if name == "strangers" else 0) as (target, pid):
            if name in NEEDS_SESSIONS:
                fill(target)
            with collector_off():
                figures = asyncio.run(run_attack(name, target, pid, plan))
        show(name, figures, arguments.step_ms, arguments.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve_in_steps(float(sys.argv[2]), sys.argv[3:])
    elif sys.argv[1:2] == ["--engine"]:
        engine_in_steps(float(sys.argv[2]), sys.argv[3:])
    else:
        main()
