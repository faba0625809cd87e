"""Supervises the engine process: starts it, watches it, and restarts it when it dies or hangs.

The process is a child with a private socket, made for each start in a directory that only this user may
enter. One that dies, or sends nothing for too long, is replaced, and calls that wait for it fail. Silence is
counted in time that this process was running: a pause of both is not a hang. A process that reports that it
cannot start ends the server, with its reason. Everything here runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.engine.pauses import collect_when_idle
from holdfast.server.link import wire
from holdfast.server.link.channel import Channel
from holdfast.server.link.engine_client import EngineClient
from holdfast.server.link.lived_time import LivedTime, wait_lived
from holdfast.server.link.scratch import Scratch

__all__ = ["EngineUnable", "Supervisor"]

log = logging.getLogger("holdfast.server")

RESTART_SECONDS = (0.2, 1.0, 5.0, 15.0)
STOP_SECONDS = 60.0
REAP_SECONDS = 0.5

Progress = Callable[[str, int, int], None]


class EngineUnable(RuntimeError):
    """The engine cannot start; the message says why. `model`: the model's files cannot be used."""

    def __init__(self, message: str, model: bool = False) -> None:
        super().__init__(message)
        self.model = model


class Supervisor:
    """One engine process at a time, behind one client."""

    def __init__(
        self, client: EngineClient, configure: wire.Configure, hang_seconds: float, progress: Progress
    ) -> None:
        self.client = client
        self.configure = configure
        self.hang_seconds = hang_seconds
        self.progress = progress
        self.facts: wire.ModelFacts | None = None
        self.restarts = 0
        self.pid: int | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        self._tick = min(1.0, hang_seconds / 4)
        self._silence = LivedTime(self._tick)
        self._ready = asyncio.Event()

    @property
    def up(self) -> bool:
        """Whether an engine process serves."""
        return self.client.connected

    @property
    def engine_options(self) -> dict[str, Any]:
        """The options that the engine was started with."""
        return self.configure.options

    async def run(self) -> None:
        """Keep an engine process running until `stop`; raises `EngineUnable` if it cannot start."""
        scratch = Scratch()
        failures = 0
        try:
            while not self._stopping:
                try:
                    served = await self._one_life(scratch.path / f"engine-{self.restarts}.sock")
                except EngineUnable as error:
                    if self.facts is None or failures >= len(RESTART_SECONDS):
                        raise
                    # It has served before: memory that the last process held may become free.
                    log.error("the engine cannot start: %s", error)
                    served = False
                if self._stopping:
                    return
                failures = 0 if served else failures + 1
                if failures > len(RESTART_SECONDS):
                    raise EngineUnable("the engine process ended repeatedly; see the server log")
                self.restarts += 1
                log.error(
                    "the engine process ended; starting it again",
                    extra={"fields": {"restarts": self.restarts}},
                )
                await asyncio.sleep(RESTART_SECONDS[max(0, failures - 1)])
        finally:
            scratch.remove()

    async def _one_life(self, path: Path) -> bool:
        """One engine process from its start to its end; whether it came to serve."""
        channel = Channel(lambda frame: self._hear(frame, channel))
        await channel.listen(path)
        # It is sent when the process has connected, which one that dies early never does.
        channel.send(wire.encode(self.configure))
        served = False
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "holdfast.server.link.worker", str(path), str(os.getpid())
        )
        self._process, self.pid = process, process.pid
        self._silence.reset()
        try:
            listening = channel.ended
            ending = asyncio.create_task(process.wait())
            watching = asyncio.create_task(self._watch(process))
            try:
                either: set[asyncio.Future[Any]] = {listening, ending}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                served = self.up
                if listening.done():
                    listening.result()
            finally:
                watching.cancel()
                await self._reap(process, ending)
        finally:
            self._process, self.pid = None, None
            self.client.lose()
            self._ready.clear()
            channel.close()
            path.unlink(missing_ok=True)
        return served

    async def _reap(self, process: asyncio.subprocess.Process, ending: asyncio.Task[int]) -> None:
        """Leave no process behind."""
        patience = STOP_SECONDS if self._stopping else REAP_SECONDS
        if process.returncode is None and not await wait_lived(ending, patience, self._tick):
            process.kill()
        await ending

    def _hear(self, frame: bytes, channel: Channel) -> None:
        """One report of the engine."""
        self._silence.reset()
        report = wire.decode_report(frame)
        match report:
            case wire.Progress():
                self.progress(report.stage, report.done, report.total)
            case wire.Unable():
                raise EngineUnable(report.message, report.model)
            case wire.Ready():
                self.facts = report.facts
                self.client.connect(lambda command: channel.send(wire.encode(command)))
                self.client.hear(report)
                self._ready.set()
            case _:
                self.client.hear(report)

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Kill an engine that has sent nothing for too long."""
        while True:
            await asyncio.sleep(self._tick)
            if not self.client.turns:
                collect_when_idle()
            silent = self._silence.tick()
            if self.up and silent > self.hang_seconds:
                log.error(
                    "the engine process hangs; killing it",
                    extra={"fields": {"silent_seconds": round(silent)}},
                )
                process.kill()
                return

    async def wait_ready(self) -> None:
        """Wait until an engine serves."""
        await self._ready.wait()

    async def stop(self) -> None:
        """End the engine process; `run` returns after it."""
        self._stopping = True
        if self.client.send(wire.Stop()):
            return
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def hurry(self) -> None:
        """Have an engine process that is ending write no more sessions to disk."""
        self.client.send(wire.Stop(at_once=True))
