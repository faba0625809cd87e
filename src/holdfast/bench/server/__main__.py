"""What the server itself costs: a real server process with a model that takes no time.

    python benchmarks/server.py [--json] [--only NAME]

`stream`: tokens a second over 64 connections, and the time to the first token with one. `idle`: a turn's
latency with 1,000 idle sessions beside an empty server's. `turns`: turn 150 beside turn 10, 8 sessions in
parallel, dense and hybrid, on the clock. `engine`: the same in processor time, without sockets, the median of
several rounds. One line of JSON for each figure with `--json`. The client shares the machine with the server,
so the figures are what both together reach.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from holdfast.engine.echo import open_echo
from holdfast.engine.options import make_options
from holdfast.server.link import wire
from holdfast.server.link.commands import Desk


class Server:
    """`holdfast serve` with a model without weights."""

    def __init__(self, model: str, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "holdfast.cli", "serve", model, "--port", "0", *options],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        host, _, port = line.split("http://")[1].strip().partition(":")
        self.address = (host, int(port))

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)


class Connection:
    """One HTTP connection that is kept; as little of HTTP as this needs."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.address = address

    async def __aenter__(self) -> Connection:
        self.reader, self.writer = await asyncio.open_connection(*self.address)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    async def post(self, path: str, body: Any) -> tuple[int, dict[str, str]]:
        """Send a request and read the head of its answer."""
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        self.writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {
            name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])
        }
        return int(lines[0].split()[1]), headers

    async def whole(self, path: str, body: Any) -> Any:
        """A request and its JSON."""
        status, headers = await self.post(path, body)
        answer = json.loads(await self.reader.readexactly(int(headers["content-length"])))
        assert status in (200, 201), answer
        return answer

    async def stream(self, path: str, body: Any) -> tuple[float, float, int]:
        """A streamed turn: seconds to its first token, seconds in all, tokens."""
        began = time.perf_counter()
        status, _ = await self.post(path, body)
        assert status == 200, status
        first = 0.0
        tokens = 0
        while True:
            size = int(await self.reader.readline(), 16)
            chunk = await self.reader.readexactly(size + 2)
            if size == 0:
                return first, time.perf_counter() - began, tokens
            for line in chunk.split(b"\n"):
                if line.startswith(b"data: ") and b'"index"' in line:
                    first = first or time.perf_counter() - began
                    tokens += len(json.loads(line[6:])["token_ids"])


ENDLESS = {"max_tokens": 256, "ignore_eos": True}


async def measure_stream(address: tuple[str, int]) -> dict[str, float]:
    """Throughput over 64 connections; then the first token alone."""

    async def talk(number: int) -> int:
        async with Connection(address) as connection:
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
    async with Connection(address) as connection:
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
    """Latencies of turns on one session, in milliseconds."""
    taken: list[float] = []
    for _ in range(turns):
        began = time.perf_counter()
        body = {"input": "0123456789abcdef"[:8], "sampling": {"max_tokens": 8, "ignore_eos": True}}
        await connection.whole(f"/v1/sessions/{name}/turns", body)
        taken.append((time.perf_counter() - began) * 1000)
    return taken


async def measure_idle(address: tuple[str, int]) -> dict[str, float]:
    """A turn on a server with few sessions, then on one with a thousand that rest: alternating blocks."""
    async with Connection(address) as connection:
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
    """Turn 150 beside turn 10: medians over a few turns around each, of 8 sessions in parallel."""

    async def talk(number: int) -> list[float]:
        async with Connection(address) as connection:
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


def engine_turns(model: str) -> dict[str, float]:
    """Turn 150 beside turn 10 inside the engine, in processor time."""
    rounds = [one_engine_round(model) for _ in range(7)]
    middle = sorted(rounds, key=lambda figures: figures["ratio_engine_turn_150_to_10"])
    return middle[len(middle) // 2]


def one_engine_round(model: str) -> dict[str, float]:
    """160 turns of 8 sessions on a fresh engine."""
    loop = open_echo(model, make_options(overlap=True))
    desk = Desk(loop)
    for number in range(8):
        desk.receive(wire.OpenSession(0, f"public/{number}", "public"))
    sampling = wire.SamplingFields(max_tokens=8, ignore_eos=True)
    taken: list[float] = []
    for turn in range(160):
        began = time.thread_time()
        for number in range(8):
            call = turn * 8 + number + 1
            session = f"public/{number}"
            said = list(range(65, 81))
            desk.receive(wire.StartTurn(call, f"t-{call}", "public", said, sampling, session=session))
        while loop.busy:
            loop.step()
            desk.settled()
            desk.take_reports()
        taken.append((time.thread_time() - began) * 1000)
    early, late = statistics.median(taken[5:15]), statistics.median(taken[145:155])
    return {
        "engine_turn_10_ms": early,
        "engine_turn_150_ms": late,
        "ratio_engine_turn_150_to_10": late / early,
    }


UNITS = {"streamed_tokens_per_second": "tokens/s"}

Measure = Callable[[tuple[str, int]], Any]

RUNS: dict[str, tuple[str, tuple[str, ...], Measure | None]] = {
    "stream": ("echo", ("--max-running", "64"), measure_stream),
    "idle": ("echo", (), measure_idle),
    "turns dense": ("echo", ("--overlap",), measure_turns),
    "turns hybrid": ("echo-hybrid", ("--overlap",), measure_turns),
    "engine dense": ("echo", (), None),
    "engine hybrid": ("echo-hybrid", (), None),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    for name, (model, options, measure) in RUNS.items():
        if not name.startswith(arguments.only):
            continue
        figures: dict[str, float]
        if measure is None:
            figures = engine_turns(model)
        else:
            server = Server(model, *options)
            try:
                figures = asyncio.run(measure(server.address))
            finally:
                server.stop()
        for figure, value in figures.items():
            unit = UNITS.get(figure, "ratio" if figure.startswith("ratio") else "ms")
            load = round(os.getloadavg()[0], 1)
            if arguments.json:
                line = {
                    "name": figure,
                    "value": value,
                    "unit": unit,
                    "run": name,
                    "model": model,
                    "load": load,
                }
                print(json.dumps(line), flush=True)
            else:
                print(f"{name:<14} {figure:<28} {value:10.2f} {unit}  (load {load})", flush=True)


if __name__ == "__main__":
    main()
