"""How long others wait for their next token while one client attacks.

    PYTHONPATH=src:. python benchmarks/neighbours.py [--json] [--only NAME] [--rounds 5] [--seconds 3]

A real server whose model takes a fixed time for each step (`--step-ms`) without using the processor, as one
on a GPU does: the echo model, with a sleep in each step. Four neighbours stream without end; in each round
they are measured for some seconds without an attack and then for as long with one. The attacker is a
process of its own. A pause that begins during the attack is measured to its end.

The table has medians over the rounds: the longest pause between two tokens of any neighbour, calm and
attacked, by how many steps the attack lengthens it (the aim is two at most), and the median pause. The
processors are shared by the server's two processes, the attacker and this one. `processor` is a control
that only burns one, and `waited` is how many milliseconds of each second the threads of the server were
ready to run and had no processor during the attack (from the kernel's schedstat): so much is not the
server's doing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import runpy
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from itertools import pairwise
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from tests.hostile.raw import CONTINUATION, PING, TEXT, address_of, connect, frame, head, open_socket

NEIGHBOURS = 4
STANDSTILL_SECONDS = 60.0
SESSIONS = 2000
JSON = "Content-Type: application/json"
ROOM = ("--context-length", "200000", "--kv-tokens", "1600000", "--max-sessions", "20000")
KEY = "key-of-the-neighbours"


@dataclass(frozen=True, slots=True)
class Target:
    """Where a server listens, and the key that opens it."""

    url: str
    key: str = KEY

    def request(self, method: str, path: str, body: Any = None, *headers: str) -> bytes:
        """A whole request."""
        content = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        size = f"Content-Length: {len(content)}"
        key = f"Authorization: Bearer {self.key}"
        return head(self, method, path, JSON, key, size, *headers) + content


# --- attacks: each is called again and again until its time is over -------------------------------


Attack = Callable[[Target], Iterator[None]]


def asking(*requests: Callable[[Target], bytes], connections: int = 1) -> Attack:
    """Send requests on connections that are kept, and read what is answered."""

    def attack(target: Target) -> Iterator[None]:
        sent = [request(target) for request in requests]
        opened: list[socket.socket] = []
        while True:
            while len(opened) < connections:
                opened.append(connect(target, STANDSTILL_SECONDS))
            for number, each in enumerate(list(opened)):
                try:
                    each.sendall(sent[number % len(sent)])
                except OSError:
                    opened.remove(each)
            for each in list(opened):
                if not answered(each):
                    opened.remove(each)
            yield

    return attack


def answered(connection: socket.socket) -> bool:
    """Read one answer; whether the connection can be used again."""
    said = b""
    try:
        while b"\r\n\r\n" not in said:
            piece = connection.recv(1 << 16)
            if not piece:
                return False
            said += piece
        headers, _, body = said.partition(b"\r\n\r\n")
        if b"connection: close" in headers.lower() or b"content-length:" not in headers.lower():
            connection.close()
            return False
        left = int(headers.lower().split(b"content-length:")[1].split(b"\r\n")[0]) - len(body)
        while left > 0:
            piece = connection.recv(1 << 16)
            if not piece:
                return False
            left -= len(piece)
    except OSError:
        return False
    return True


def frames(first: bytes, repeated: bytes) -> Attack:
    """Frames without end; a connection that is closed is opened again."""

    def attack(target: Target) -> Iterator[None]:
        piece = repeated * (16_384 // len(repeated))
        while True:
            with suppress(OSError, AssertionError), open_socket(target, "/v1/realtime") as connection:
                connection.sendall(first)
                while True:
                    connection.sendall(piece)
                    yield
            yield

    return attack


def unfinished(target: Target, size: int, count: int) -> Iterator[None]:
    """Requests whose end never comes."""
    begun = head(target, "POST", "/v1/sessions", JSON, "Content-Length: 16000000")
    held: list[socket.socket] = []
    while True:
        with suppress(OSError):
            held.append(connect(target, 5.0))
            held[-1].sendall(begun + b" " * size)
        if len(held) > count:
            held.pop(0).close()
        yield


def leaving(target: Target) -> Iterator[None]:
    """Turns whose clients are gone before the first token."""
    body = {"prompt": "abc" * 100, "max_tokens": 1000, "ignore_eos": True, "stream": True}
    sent = target.request("POST", "/v1/completions", body)
    while True:
        with suppress(OSError), connect(target, 5.0) as connection:
            connection.sendall(sent)
        yield


def burning(_: Target) -> Iterator[None]:
    """The control: nothing is sent, a processor is used."""
    while True:
        sum(range(100_000))
        yield


SHORT = {"max_tokens": 2, "ignore_eos": True}


def chat(size: int) -> Callable[[Target], bytes]:
    """A conversation with a message of so many bytes."""
    messages = [{"role": "user", "content": "word " * (size // 5)}]
    return lambda target: target.request("POST", "/v1/chat/completions", {"messages": messages, **SHORT})


def get(path: str) -> Callable[[Target], bytes]:
    return lambda target: target.request("GET", path)


def post(path: str, body: Any) -> Callable[[Target], bytes]:
    return lambda target: target.request("POST", path, body)


BEGUN = frame(TEXT, b"{", last=False)
ATTACKS: dict[str, Attack] = {
    "processor": burning,
    "text of 100 kB": asking(chat(100_000)),
    "text of 1 MB": asking(chat(1_000_000)),
    "text of 15 MB": asking(chat(15_000_000)),
    "system of 15 MB": asking(post("/v1/sessions", {"system": "x" * 15_000_000})),
    "4 million token ids": asking(post("/v1/completions", {"prompt": [7] * 4_000_000})),
    "stop tokens": asking(
        post("/v1/completions", {"prompt": "x", "stop_token_ids": [7] * 3_000_000, **SHORT})
    ),
    "empty frames": frames(BEGUN, frame(CONTINUATION, last=False)),
    "pings": frames(b"", frame(PING)),
    "half-open": lambda target: unfinished(target, 0, 500),
    "unfinished bodies": lambda target: unfinished(target, 15_000_000, 30),
    "lists": asking(get("/v1/sessions"), connections=8),
    "memory": asking(get("/v1/memory"), connections=8),
    "choices": asking(post("/v1/completions", {"prompt": "abc", "n": 48, **SHORT})),
    "prompts": asking(post("/v1/completions", {"prompt": ["abc"] * 48, **SHORT})),
    "leaving": leaving,
    "strangers": asking(
        lambda target: Target(target.url, "nobody").request("GET", "/v1/models"), connections=8
    ),
}
"""What a client does, from nothing at all to too much."""

NEEDS_SESSIONS = ("lists", "memory")


def attack_until(name: str, target: Target, ready: Event, go: Event, rounds: Any) -> None:
    """The attacker's process, until it is killed."""
    attacking = ATTACKS[name](target)
    ready.set()
    go.wait()
    for _ in attacking:
        rounds.value += 1


# --- the server -----------------------------------------------------------------------------------


def serve_in_steps(step_ms: float, arguments: list[str]) -> None:
    """The server's process: its engine is started through this file, so that each step takes its time."""
    with tempfile.TemporaryDirectory() as directory:
        python = Path(directory) / "python"
        engine = f'exec {sys.executable} {Path(__file__).resolve()} --engine {step_ms} "$3" "$4"'
        python.write_text(
            f'#!/bin/sh\nif [ "$2" = holdfast.server.link.worker ]; then {engine}; fi\n'
            f'exec {sys.executable} "$@"\n'
        )
        python.chmod(0o700)
        sys.executable = str(python)
        sys.argv = ["holdfast", "serve", "echo", "--port", "0", *arguments]
        import_module("holdfast.cli").main()


def engine_in_steps(step_ms: float, arguments: list[str]) -> None:
    """The engine's process: the worker, with a model that sleeps in each step."""
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
    """A server, and its process; with keys it knows that many tenants."""
    with tempfile.TemporaryDirectory() as directory:
        options = [*ROOM]
        if keys:
            path = Path(directory) / "keys"
            path.write_text(
                "".join(f"t{number % 1000}:k-{number}\n" for number in range(keys)) + f"ann:{KEY}\n"
            )
            path.chmod(0o600)
            options += ["--api-keys", str(path)]
        process = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(step_ms), *options], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert "http://" in line, line
            yield Target("http://" + line.split("http://")[1].strip()), process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
            process.stdout.close()


def waited_ns(pid: int) -> int:
    """How long the threads of a process and its children were ready to run without a processor."""
    total = 0
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[1])
            total += sum(waited_ns(int(child)) for child in (task / "children").read_text().split())
    return total


# --- neighbours -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Stream:
    """One neighbour: when its tokens came."""

    name: str
    arrivals: list[float] = field(default_factory=list)

    async def run(self, target: Target) -> None:
        """Stream one turn after another on a session, each as long as may be."""
        reader, writer = await asyncio.open_connection(*address_of(target))
        writer.write(target.request("POST", "/v1/sessions", {"id": self.name}))
        await reader.readuntil(b"}}")
        while True:
            sampling = {"max_tokens": 100_000, "ignore_eos": True}
            body = {"input": self.name, "stream": True, "sampling": sampling}
            writer.write(target.request("POST", f"/v1/sessions/{self.name}/turns", body))
            while b"event: done" not in (piece := await reader.read(1 << 16)):
                assert piece, "the neighbour was cut off"
                if b'"token_ids"' in piece:
                    self.arrivals.append(time.perf_counter())
            writer.write(target.request("POST", f"/v1/sessions/{self.name}/rewind", {"to_turn": 0}))
            await reader.readuntil(b"}}")

    def pauses(self, since: float, until: float) -> list[float]:
        """Pauses of which a part lies in a time, in milliseconds."""
        return [(b - a) * 1000 for a, b in pairwise(self.arrivals) if b >= since and a < until]


async def measure(streams: list[Stream], seconds: float) -> list[float]:
    """All pauses of all neighbours in the next seconds, to their ends."""
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
    """Wait until every neighbour has its tokens regularly again."""
    deadline = time.perf_counter() + STANDSTILL_SECONDS
    while time.perf_counter() < deadline:
        now = time.perf_counter()
        lately = [[*stream.arrivals[-20:], now] for stream in streams]
        if all(len(each) > 20 and max(b - a for a, b in pairwise(each)) < step_ms / 100 for each in lately):
            return
        await asyncio.sleep(0.05)


@dataclass(frozen=True, slots=True)
class Plan:
    """How an attack is measured."""

    rounds: int
    seconds: float
    step_ms: float


async def run_attack(name: str, target: Target, pid: int, plan: Plan) -> dict[str, float]:
    """Neighbours without and with an attack, in turns; medians over the rounds."""
    context = multiprocessing.get_context("spawn")
    streams = [Stream(f"neighbour-{number}") for number in range(NEIGHBOURS)]
    running = [asyncio.create_task(stream.run(target)) for stream in streams]
    calm: list[list[float]] = []
    attacked: list[list[float]] = []
    waited, count = 0, context.Value("q", 0)
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
            before = waited_ns(pid)
            go.set()
            measuring = asyncio.create_task(measure(streams, plan.seconds))
            await asyncio.sleep(plan.seconds)
            waited += waited_ns(pid) - before
            attacker.kill()
            attacked.append(await measuring)
            for task in running:
                assert not task.done(), f"a neighbour was cut off: {task.exception()}"
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
        "waited_ms_per_s": waited / 1e6 / (plan.rounds * plan.seconds),
        "attacks": count.value,
    }


def fill(target: Target) -> None:
    """Sessions at rest, for attacks that ask about all of them."""
    requests = asking(post("/v1/sessions", {}))(target)
    for _ in range(SESSIONS):
        next(requests)


def show(name: str, figures: dict[str, float], step_ms: float, as_json: bool) -> None:
    """One attack's figures."""
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one object a line for each figure")
    parser.add_argument("--only", default="", help="attacks whose name begins so")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each half of a round")
    parser.add_argument("--step-ms", type=float, default=20.0)
    arguments = parser.parse_args()
    plan = Plan(arguments.rounds, arguments.seconds, arguments.step_ms)
    if not arguments.json:
        print(
            f"{'attack':<20} {'calm':>8} {'longest':>8} {'attacked':>9} {'longest':>9} {'worst':>9} "
            f"{'steps':>7} {'waited':>8} {'rounds':>9}   pauses in ms, waited in ms a second"
        )
    for name in ATTACKS:
        if not name.startswith(arguments.only):
            continue
        with serving(arguments.step_ms, 99_000 if name == "strangers" else 0) as (target, pid):
            if name in NEEDS_SESSIONS:
                fill(target)
            figures = asyncio.run(run_attack(name, target, pid, plan))
        show(name, figures, arguments.step_ms, arguments.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve_in_steps(float(sys.argv[2]), sys.argv[3:])
    elif sys.argv[1:2] == ["--engine"]:
        engine_in_steps(float(sys.argv[2]), sys.argv[3:])
    else:
        main()
