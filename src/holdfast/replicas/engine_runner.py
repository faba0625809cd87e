"""One engine process as its replica runs it: started, watched over a link, drained. Knows nothing of Ray.

The process is `holdfast engine`, the very same that `holdfast serve --engine` uses. The replica has a link to
it like an API process, on which it sends nothing: heartbeats tell that it lives and how loaded it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import re
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass

from holdfast.cluster.autoscaling import Load
from holdfast.server.link import wire
from holdfast.server.link.engine_client import EngineClient, GiveUp, TurnFeed
from holdfast.server.link.loads import fullest_pool
from holdfast.server.link.remote_engine import RemoteEngine, turn_lost
from holdfast.server.link.tls import client_context

__all__ = ["EngineCommand", "EngineNotStarted", "EngineRunner"]

log = logging.getLogger("holdfast.replica")

LISTENS = re.compile(r"Holdfast engine \S+ listens on (\S+)")
LAST_LINES = 20
END_SECONDS = 10.0
"""How long an engine may take to write its sessions after its turns have ended."""


class EngineNotStarted(RuntimeError):
    """An engine process has ended before it served; the message is its last line."""


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """How an engine is started. `arguments` are those of `holdfast engine`, without name and address."""

    host: str
    link_keys: str
    arguments: tuple[str, ...]
    environment: dict[str, str]
    drain_seconds: float
    link_seconds: float


class EngineRunner:
    """An engine process and the link that watches it. All methods run on one event loop."""

    def __init__(self, command: EngineCommand, name: str) -> None:
        self.name = name
        self.address = ""
        self._command = command
        self._process: asyncio.subprocess.Process | None = None
        self._lines: list[str] = []
        self._link: RemoteEngine | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._draining = False

    @property
    def process_id(self) -> int | None:
        """The number of the engine's process."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the process and wait until it serves."""
        command = self._command
        self._process = process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "holdfast.cli.child", str(os.getpid()), "engine"),
            *command.arguments,
            *("--listen", f"{_bracketed(command.host)}:0", "--link-keys", command.link_keys),
            *("--link-seconds", str(command.link_seconds), "--drain-seconds", str(command.drain_seconds)),
            *("--engine-id", self.name),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **command.environment},
        )
        listens: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._tasks.append(asyncio.create_task(self._read(process, listens)))
        self.address = await listens
        self._link = self._watch(self.address)
        self._tasks.append(asyncio.create_task(self._link.run()))

    async def restart(self) -> None:
        """Start again after the process has ended, under the same name."""
        await self.close()
        self._link = None
        await self.start()

    async def _read(self, process: asyncio.subprocess.Process, listens: asyncio.Future[str]) -> None:
        """Pass the engine's log on, and find its address in it."""
        assert process.stdout is not None
        async for line in lines_of(process.stdout):
            self._lines = [*self._lines[1 - LAST_LINES :], line]
            sys.stderr.write(f"{self.name}: {line}\n")
            found = LISTENS.search(line)
            if found is not None and not listens.done():
                listens.set_result(found[1])
        status = await process.wait()
        if not listens.done():
            said = next((line for line in reversed(self._lines) if line.strip()), "it said nothing")
            listens.set_exception(EngineNotStarted(f"{self.name} ended with status {status}: {said}"))

    def _watch(self, address: str) -> RemoteEngine:
        identity, prefix = secrets.token_hex(16), 1 + secrets.randbelow((1 << (63 - wire.CALL_BITS)) - 1)
        client = EngineClient(Deaf(), itertools.count(prefix << wire.CALL_BITS), turn_lost)
        return RemoteEngine(
            address,
            client,
            client_context(self._command.link_keys),
            self._command.link_seconds,
            lambda link: wire.Greeting(wire.PROTOCOL, identity, prefix, "", link),
            lambda _engine, _welcome: None,
        )

    async def ended(self) -> int:
        """Wait until the process has ended; returns its status."""
        assert self._process is not None, "it was started"
        return await self._process.wait()

    # --- health and load --------------------------------------------------------------------------

    def problem(self) -> str | None:
        """Why the engine does not serve; None if it does."""
        if self._process is None or self._link is None:
            return f"{self.name} has not started"
        if self._process.returncode is not None:
            return f"{self.name} ended with status {self._process.returncode}"
        if self._draining:
            return None
        if self._link.facts is not None and not self._link.up:
            return f"{self.name} gives no sign of life"
        return None

    def load(self) -> Load | None:
        """How loaded the engine is, as it said last."""
        pulse = None if self._link is None else self._link.last_pulse
        return None if pulse is None else Load(fullest_pool(pulse).free_share, pulse.queued, pulse.running)

    # --- the end ----------------------------------------------------------------------------------

    async def drain(self) -> int | None:
        """Let turns in flight end, have sessions written, and end the process; returns its status."""
        process = self._process
        if process is None:
            return None
        self._draining = True
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(self._command.drain_seconds + END_SECONDS):
                    await process.wait()
            except TimeoutError:
                log.warning("%s did not end in time and is killed", self.name)
                process.kill()
                await process.wait()
        await self.close()
        return process.returncode

    async def close(self) -> None:
        """Stop watching; a process that still runs is killed."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()


async def lines_of(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """The lines of a stream. One that is longer than the stream's limit comes in pieces.

    `readline` would raise there, and a process whose output nobody reads stops when its pipe is full.
    """
    while True:
        try:
            raw = await stream.readuntil()
        except asyncio.LimitOverrunError as error:
            raw = await stream.read(error.consumed)
        except asyncio.IncompleteReadError as error:
            if error.partial:
                yield error.partial.decode(errors="replace")
            return
        yield raw.decode(errors="replace").rstrip("\n")


class Deaf:
    """Hears reports that concern API processes, and does nothing with them."""

    def session_seen(self, view: wire.SessionView) -> None:
        """A report carried the view of a session."""

    def session_gone(self, session: str, reason: str) -> None:
        """A session was closed, or has expired."""

    def session_stored(self, stored: wire.StoredSession) -> None:
        """An API process has opened or changed a session."""

    def session_taken_up(self, _session: str, give: GiveUp, /) -> None:
        """This process has no clients."""
        give(0, [])

    def turn_ended(self, feed: TurnFeed) -> None:
        """This process starts no turns."""

    def engine_ready(self, ready: wire.Ready, others: Collection[str] = ()) -> None:
        """The engine serves."""

    def engine_lost(self, volatile: Collection[str] | None = None) -> None:
        """The link to the engine is lost."""


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
