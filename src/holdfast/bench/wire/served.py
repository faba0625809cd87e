"""The rounds of `bench wire` over HTTP: a real server process, driven by bare sockets.

The server writes the spans of its turns to a file (HOLDFAST_SPANS); the processor time of each of its
processes is read from /proc.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.bench.served import ServerProcess
from holdfast.bench.wire.client import Stream
from holdfast.bench.wire.load import ABORT_AFTER, ABORTED_TOKENS, Round, RoundSamples, Workload, tokens_of

__all__ = ["Spans", "processor_seconds", "run_served"]

Spans = dict[str, list[int]]
"""Microseconds of each span, turn by turn."""

Address = tuple[str, int]
ROLES = {"holdfast.server.link.worker": "engine", "holdfast.server.text.process": "text"}
TICKS = os.sysconf("SC_CLK_TCK")


def run_served(
    arguments: Sequence[str], workload: Workload, spans: Path, progress: Callable[[str], None]
) -> list[tuple[RoundSamples, Spans]]:
    """Start a server with these arguments of `serve`, run all rounds, and stop it.

    `spans` is the file that HOLDFAST_SPANS names in the environment that the server inherits.
    """
    spans.touch()
    with ServerProcess(*arguments) as server:
        found = []
        for number, each in enumerate(workload.rounds):
            progress(f"over HTTP: {each.streams} streams, history {each.history}")
            found.append(asyncio.run(_round(server, number, each, workload, spans)))
        return found


async def _round(
    server: ServerProcess, number: int, each: Round, workload: Workload, spans: Path
) -> tuple[RoundSamples, Spans]:
    """One round on sessions of its own, which are closed after it."""
    names = [f"wire-{number}-{stream}" for stream in range(each.streams)]
    pairs = [(name, await Stream.connect(server.address)) for name in names]
    for name, stream in pairs:
        await stream.ask("/v1/sessions", {"id": name})
    await asyncio.gather(
        *(
            stream.turn(name, tokens_of(number * 1000 + place, 0, each.history), 1)
            for place, (name, stream) in enumerate(pairs)
        )
    )
    # A turn of each before the first that is timed: shapes and connections are warm then.
    await asyncio.gather(*(_turns(stream, name, 1, workload, []) for name, stream in pairs))
    samples = RoundSamples()
    skipped, processor, began = spans.stat().st_size, processor_seconds(server.pid), time.perf_counter()
    await asyncio.gather(
        *(_turns(stream, name, workload.turns, workload, samples.turns) for name, stream in pairs)
    )
    samples.seconds = time.perf_counter() - began
    samples.processor = {
        role: seconds - processor.get(role, 0.0) for role, seconds in processor_seconds(server.pid).items()
    }
    found = _read_spans(spans, skipped)
    await asyncio.gather(
        *(_aborted_turns(stream, server.address, name, workload, samples) for name, stream in pairs)
    )
    closing = await Stream.connect(server.address)
    for name in names:
        await closing.ask(f"/v1/sessions/{name}", method="DELETE")
    closing.close()
    return samples, found


async def _turns(stream: Stream, name: str, count: int, workload: Workload, into: list[Any]) -> None:
    """Turns of one stream, one right after the other."""
    into += [
        await stream.turn(name, tokens_of(0, turn, workload.given), workload.wanted) for turn in range(count)
    ]


async def _aborted_turns(
    stream: Stream, address: Address, name: str, workload: Workload, samples: RoundSamples
) -> None:
    """Turns that are cut off by a disconnect, each followed at once by one on a new connection."""
    for turn in range(workload.aborts):
        await stream.turn(name, tokens_of(0, turn, workload.given), ABORTED_TOKENS, cut=ABORT_AFTER)
        after = await Stream.connect(address)
        stream.close()
        stream = after
        sample = await stream.turn(name, tokens_of(0, turn, workload.given), workload.wanted)
        sample.after_abort = True
        samples.turns.append(sample)
    stream.close()


def _read_spans(path: Path, skipped: int) -> Spans:
    """The spans of finished turns, from a place in the file on."""
    found: Spans = {}
    with path.open("rb") as file:
        file.seek(skipped)
        for line in file:
            turn = json.loads(line)
            if turn["outcome"] == "finished":
                for name, microseconds in turn["spans"].items():
                    found.setdefault(name, []).append(microseconds)
    return found


def processor_seconds(pid: int) -> Mapping[str, float]:
    """The processor time of a server so far: its API process, engine process and text processes."""
    found = {"api": _seconds_of(pid)}
    for child in _children(pid):
        words = Path(f"/proc/{child}/cmdline").read_bytes().decode(errors="replace").split("\0")
        role = next((ROLES[word] for word in words if word in ROLES), None)
        if role is not None:
            found[role] = found.get(role, 0.0) + _seconds_of(child)
    return found


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def _seconds_of(pid: int) -> float:
    """The processor time of a process; in hundredths of a second on kernels without schedstat."""
    tasks = list(Path(f"/proc/{pid}/task").iterdir())
    if (tasks[0] / "schedstat").exists():
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS
