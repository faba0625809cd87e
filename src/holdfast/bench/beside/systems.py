"""The systems that are measured: Holdfast and llama-server as server processes, transformers in this process.

All of them take prompts as token ids and decode greedily. Servers are started on a free port and stopped at
the end. A conversation keeps its history where the system keeps it: Holdfast in a session, llama-server in a
slot, transformers in its KV cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from holdfast.bench.beside.http import HOST, BenchError, Busy, Timing, ask, stream

__all__ = ["CONTEXT", "Conversation", "Holdfast", "LlamaServer", "System"]

CONTEXT = 4096
SLOTS = 16
START_SECONDS_MAX = 180.0
BUSY_SECONDS_MAX = 30.0


class Conversation(Protocol):
    """One conversation, turn by turn."""

    async def say(self, tokens: Sequence[int], count: int, leave_after: int | None = None) -> Timing:
        """A turn of `tokens` in and `count` out; with `leave_after` it is aborted after so many tokens."""
        ...

    async def close(self) -> None: ...


class System(Protocol):
    """A system that completes prompts."""

    name: str

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def complete(self, prompts: Sequence[Sequence[int]], count: int) -> list[Timing]:
        """Complete all prompts concurrently, `count` tokens each."""
        ...

    async def conversation(self) -> Conversation: ...


class _Server(ABC):
    """A server process; it is ready when a GET of `ready` succeeds."""

    name: str
    ready = "/health"

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            self.port: int = probe.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://{HOST}:{self.port}"

    @property
    def process(self) -> int:
        """The id of its first process, once started."""
        assert self._process is not None, "not started"
        return self._process.pid

    @abstractmethod
    def command(self) -> list[str]:
        """The command line that starts it."""

    async def start(self) -> None:
        """Start it and wait until it is healthy; in its own session, so that Ctrl-C does not reach it."""
        self._process = subprocess.Popen(
            self.command(), stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )
        deadline = time.monotonic() + START_SECONDS_MAX
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise BenchError(f"{self.name} ended while it started: {self._last_words()}")
            with contextlib.suppress(OSError, BenchError):
                await ask(self.port, "GET", self.ready)
                return
            await asyncio.sleep(0.2)
        raise BenchError(f"{self.name} did not start within {START_SECONDS_MAX:.0f} seconds")

    async def stop(self) -> None:
        """Terminate it, and kill it if it does not end."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            await asyncio.to_thread(self._process.wait, 20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _last_words(self) -> str:
        self._log.seek(0)
        return self._log.read()[-2000:].decode(errors="replace")

    async def complete(self, prompts: Sequence[Sequence[int]], count: int) -> list[Timing]:
        async def one(prompt: Sequence[int]) -> Timing:
            body = {
                "prompt": list(prompt),
                "max_tokens": count,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
            timing = await stream(self.port, "/v1/completions", body)
            if failures := [payload["error"] for payload in timing.payloads() if payload.get("error")]:
                raise BenchError(f"{self.name} broke an answer off: {failures[0]}")
            return timing

        return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))


class Holdfast(_Server):
    """`holdfast serve`, on a CPU with room for `slots` whole contexts unless its options say otherwise."""

    ready = "/health/ready"

    def __init__(
        self,
        model: str,
        name: str = "holdfast",
        options: Sequence[str] = (),
        context: int = CONTEXT,
        slots: int = SLOTS,
    ) -> None:
        super().__init__()
        self.name = name
        self._slots = slots
        self._model = model
        self._options = tuple(options)
        self._context = context

    def command(self) -> list[str]:
        sizes = ["--context-length", str(self._context), "--kv-tokens", str(self._slots * self._context)]
        start = [sys.executable, "-m", "holdfast.cli", "serve", self._model, "--port", str(self.port)]
        return [*start, "--device", "cpu", *sizes, *self._options]

    async def conversation(self) -> Conversation:
        opened = await ask(self.port, "POST", "/v1/sessions", {})
        return _HoldfastSession(self.port, opened["id"])


class _HoldfastSession:
    def __init__(self, port: int, name: str) -> None:
        self._port = port
        self._path = f"/v1/sessions/{name}"

    async def say(self, tokens: Sequence[int], count: int, leave_after: int | None = None) -> Timing:
        sampling = {"max_tokens": count, "temperature": 0, "ignore_eos": True}
        body: dict[str, Any] = {"input": list(tokens), "sampling": sampling, "stream": True}
        began = time.perf_counter()
        while True:
            waited = time.perf_counter() - began
            try:
                timing = await stream(self._port, f"{self._path}/turns", body, leave_after)
            except Busy:  # The server has not noticed the abort of the last turn; the wait counts.
                if waited > BUSY_SECONDS_MAX:
                    raise
                await asyncio.sleep(0.0005)
                continue
            timing.first += waited
            timing.total += waited
            return timing

    async def close(self) -> None:
        await ask(self._port, "DELETE", self._path)


class LlamaServer(_Server):
    """llama.cpp's server."""

    name = "llama-server"

    def __init__(
        self, binary: Path, model: Path, threads: int, context: int = CONTEXT, slots: int = SLOTS
    ) -> None:
        super().__init__()
        self._slots = slots
        self._binary = binary
        self._model = model
        self._threads = threads
        self._context = context

    def command(self) -> list[str]:
        room = ["-c", str(self._slots * self._context), "-np", str(self._slots)]
        sizes = [*room, "-t", str(self._threads)]
        return [str(self._binary), "-m", str(self._model), "--host", HOST, "--port", str(self.port), *sizes]

    async def conversation(self) -> Conversation:
        return _PinnedSlot(self.port)


class _PinnedSlot:
    """Every turn sends the whole history to one slot, whose cache has the earlier turns."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._history: list[int] = []

    async def say(self, tokens: Sequence[int], count: int, leave_after: int | None = None) -> Timing:
        prompt = [*self._history, *tokens]
        body: dict[str, Any] = {
            "prompt": prompt,
            "n_predict": count,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "cache_prompt": True,
            "id_slot": 0,
            "return_tokens": True,
        }
        timing = await stream(self._port, "/completion", body, leave_after)
        if leave_after is None:
            said = [token for payload in timing.payloads() for token in payload.get("tokens", [])]
            self._history = prompt + said[:count]
        return timing

    async def close(self) -> None:
        self._history = []
