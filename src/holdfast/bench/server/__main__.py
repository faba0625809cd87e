"""The cost of the server itself: a real server process with a model that takes no time.

    python -m holdfast.bench.server [--json] [--only NAME]

`stream`: tokens per second over 64 connections, and the time to the first token with one. `idle`: the latency
of a turn with 1,000 idle sessions, beside an empty server. `turns`: turn 150 beside turn 10 of 8 concurrent
sessions, dense and hybrid, in wall-clock time. `engine`: the same in processor time, without sockets. The
client shares the machine with the server, so the figures include it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Callable, Coroutine
from typing import Any

from holdfast.bench.served import ServerProcess
from holdfast.bench.server.connection import Connection
from holdfast.bench.server.engine_turns import engine_turns

ENDLESS = {"max_tokens": 256, "ignore_eos": True}


async def measure_stream(address: tuple[str, int]) -> dict[str, float]:
    """Throughput over 64 connections, then the time to the first token with one."""

    async def talk(number: int) -> int:
        async with Connection.open(address) as connection:
            name = f"s{number}"
            await connection.whole("/v1/sessions", {"id": name})
            said = 0
            for _ in range(4):
                body = {"input": "abcdefgh", "stream": True, "sampling": ENDLESS}
                said += (await connection.stream(f"/v1/sessions/{name}/turns", body))[2]
            return said

    began = time.perf_counter()
    tokens = sum(await asyncio.gather(*(talk(number) for number in range(64))))
    elapsed = time.perf_counter() - began
    firsts: list[float] = []
    engine: list[float] = []
    async with Connection.open(address) as connection:
        await connection.whole("/v1/sessions", {"id": "alone"})
        for _ in range(60):
            body = {"input": "abcdefgh", "stream": True, "sampling": {"max_tokens": 4}}
            firsts.append((await connection.stream("/v1/sessions/alone/turns", body))[0])
        for _ in range(20):
            turn = await connection.whole(
                "/v1/sessions/alone/turns", {"input": "x", "sampling": {"max_tokens": 4}}
            )
            engine.append(turn["timing"]["ttft_ms"])
    return {
        "streamed_tokens_per_second": tokens / elapsed,
        "first_token_ms": statistics.median(firsts) * 1000,
        "first_token_in_engine_ms": statistics.median(engine),
    }


async def turn_latency(connection: Connection, name: str, turns: int) -> list[float]:
    """The latencies of turns on one session in milliseconds."""
    taken: list[float] = []
    for _ in range(turns):
        began = time.perf_counter()
        body = {"input": "0123456789abcdef"[:8], "sampling": {"max_tokens": 8, "ignore_eos": True}}
        await connection.whole(f"/v1/sessions/{name}/turns", body)
        taken.append((time.perf_counter() - began) * 1000)
    return taken


async def measure_idle(address: tuple[str, int]) -> dict[str, float]:
    """The latency of a turn on an empty server, then with 1,000 idle sessions."""
    async with Connection.open(address) as connection:
        await connection.whole("/v1/sessions", {"id": "probe"})
        await turn_latency(connection, "probe", 20)
        empty = await turn_latency(connection, "probe", 60)
        for number in range(1000):
            await connection.whole("/v1/sessions", {"id": f"idle-{number}"})
            await connection.whole(
                f"/v1/sessions/idle-{number}/turns", {"input": "hello", "sampling": {"max_tokens": 4}}
            )
        await connection.whole("/v1/sessions", {"id": "probe2"})
        await turn_latency(connection, "probe2", 20)
        crowded = await turn_latency(connection, "probe2", 60)
    return {
        "turn_ms_empty": statistics.median(empty),
        "turn_ms_with_1000_idle": statistics.median(crowded),
        "ratio_1000_idle": statistics.median(crowded) / statistics.median(empty),
    }


async def measure_turns(address: tuple[str, int]) -> dict[str, float]:
    """Turn 150 beside turn 10 of 8 concurrent sessions: medians over ten turns around each."""

    async def talk(number: int) -> list[float]:
        async with Connection.open(address) as connection:
            name = f"t{number}"
            await connection.whole("/v1/sessions", {"id": name})
            taken: list[float] = []
            for _ in range(155):
                began = time.perf_counter()
                body = {"input": list(range(65, 81)), "sampling": {"max_tokens": 8, "ignore_eos": True}}
                await connection.whole(f"/v1/sessions/{name}/turns", body)
                taken.append((time.perf_counter() - began) * 1000)
            return taken

    sessions = await asyncio.gather(*(talk(number) for number in range(8)))
    early = statistics.median(turn for session in sessions for turn in session[5:15])
    late = statistics.median(turn for session in sessions for turn in session[145:155])
    return {"turn_10_ms": early, "turn_150_ms": late, "ratio_turn_150_to_10": late / early}


Measure = Callable[[tuple[str, int]], Coroutine[Any, Any, dict[str, float]]]

UNITS = {"streamed_tokens_per_second": "tokens/s"}

SERVER_RUNS: dict[str, tuple[tuple[str, ...], Measure]] = {
    "stream": (("echo", "--max-running", "64"), measure_stream),
    "idle": (("echo",), measure_idle),
    "turns dense": (("echo", "--overlap"), measure_turns),
    "turns hybrid": (("echo-hybrid", "--overlap"), measure_turns),
}
ENGINE_RUNS = {"engine dense": "echo", "engine hybrid": "echo-hybrid"}


def measure_server(arguments: tuple[str, ...], measure: Measure) -> dict[str, float]:
    """The figures of one measurement on a new server."""
    with ServerProcess(*arguments) as server:
        return asyncio.run(measure(server.address))


def show(run: str, model: str, figures: dict[str, float], as_json: bool) -> None:
    """Print the figures of one measurement."""
    load = round(os.getloadavg()[0], 1)
    for name, value in figures.items():
        unit = UNITS.get(name, "ratio" if name.startswith("ratio") else "ms")
        if as_json:
            line = {"name": name, "value": value, "unit": unit, "run": run, "model": model, "load": load}
            print(json.dumps(line), flush=True)
        else:
            print(f"{run:<14} {name:<28} {value:10.2f} {unit}  (load {load})", flush=True)


def main() -> None:
    """Run the measurements that the arguments select."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.add_argument("--only", default="", help="run only measurements whose name starts with this")
    chosen = parser.parse_args()
    for name, (arguments, measure) in SERVER_RUNS.items():
        if name.startswith(chosen.only):
            show(name, arguments[0], measure_server(arguments, measure), chosen.json)
    for name, model in ENGINE_RUNS.items():
        if name.startswith(chosen.only):
            show(name, model, engine_turns(model), chosen.json)


if __name__ == "__main__":
    main()
