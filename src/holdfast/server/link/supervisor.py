"""Keeps an engine process alive, and tells everyone when it is not.

The process is a child with a private socket of its own, made anew for each start in a directory that only
this user may enter. One that dies, or shows no sign of life for too long, is replaced; those who waited for
it hear that it was lost. Silence is counted in time that this process lived: a pause of both is no silence.
One that says that it *cannot* start ends the server, with its reason. Everything here runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

import zmq
import zmq.asyncio

from holdfast.server.link import wire
from holdfast.server.link.engine_client import EngineLink
from holdfast.server.link.lived_time import LivedTime, wait_lived
from holdfast.server.link.scratch import Scratch

__all__ = ["EngineUnable", "Supervisor"]

log = logging.getLogger("holdfast.server")

RESTART_SECONDS = (0.2, 1.0, 5.0, 15.0)
STOP_SECONDS = 60.0
REAP_SECONDS = 0.5

Progress = Callable[[str, int, int], None]


class EngineUnable(RuntimeError):
    """The engine says that it cannot start; the message says why. `model`: its files cannot be used."""

    def __init__(self, message: str, model: bool = False) -> None:
        super().__init__(message)
        self.model = model


class Supervisor:
    """One engine process at a time, behind one link."""

    def __init__(
        self, link: EngineLink, configure: wire.Configure, hang_seconds: float, progress: Progress
    ) -> None:
        self.link = link
        self.configure = configure
        self.hang_seconds = hang_seconds
        self.progress = progress
        self.facts: wire.ModelFacts | None = None
        self.restarts = 0
        self.pid: int | None = None
        self.on_ready: Callable[[wire.Ready], None] = _unheard
        self.on_lost: Callable[[], None] = _unheard
        self._context: zmq.asyncio.Context | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        self._tick = min(1.0, hang_seconds / 4)
        self._silence = LivedTime(self._tick)
        self._ready = asyncio.Event()

    @property
    def up(self) -> bool:
        """Whether an engine is there and serves."""
        return self.link.send is not None

    async def run(self) -> None:
        """Start the engine and keep it there until `stop`; raises `EngineUnable` if it cannot be."""
        self._context = zmq.asyncio.Context()
        scratch = Scratch()
        failures = 0
        try:
            while not self._stopping:
                try:
                    served = await self._one_life(scratch.path / f"engine-{self.restarts}.sock")
                except EngineUnable as error:
                    if self.facts is None or failures >= len(RESTART_SECONDS):
                        raise
                    # It has served before: what it lacks, memory that the one before it had, may come back.
                    log.error("the engine cannot start: %s", error)
                    served = False
                if self._stopping:
                    return
                failures = 0 if served else failures + 1
                if failures > len(RESTART_SECONDS):
                    raise EngineUnable("the engine process ends again and again; its log says why")
                self.restarts += 1
                log.error(
                    "the engine process ended; starting it again",
                    extra={"fields": {"restarts": self.restarts}},
                )
                await asyncio.sleep(RESTART_SECONDS[max(0, failures - 1)])
        finally:
            scratch.remove()
            self._context.destroy(linger=0)

    async def _one_life(self, path: Path) -> bool:
        """One engine process from its start to its end; whether it came to serve."""
        assert self._context is not None
        socket = self._context.socket(zmq.PAIR)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        before = os.umask(0o177)
        try:
            socket.bind(f"ipc://{path}")
        finally:
            os.umask(before)
        served = False
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "holdfast.server.link.worker", str(path), str(os.getpid())
        )
        self._process, self.pid = process, process.pid
        self._silence.reset()
        try:
            listening = asyncio.create_task(self._listen(socket))
            ending = asyncio.create_task(process.wait())
            watching = asyncio.create_task(self._watch(process))
            try:
                await asyncio.wait({listening, ending}, return_when=asyncio.FIRST_COMPLETED)
                served = self.up
                if listening.done():
                    listening.result()
            finally:
                for task in (listening, watching):
                    task.cancel()
                await self._reap(process, ending)
        finally:
            self._process, self.pid = None, None
            self.link.lose()
            self._ready.clear()
            if served:
                self.on_lost()
            socket.close(linger=0)
            path.unlink(missing_ok=True)
        return served

    async def _reap(self, process: asyncio.subprocess.Process, ending: asyncio.Task[int]) -> None:
        """Leave no process behind."""
        patience = STOP_SECONDS if self._stopping else REAP_SECONDS
        if process.returncode is None and not await wait_lived(ending, patience, self._tick):
            process.kill()
        await ending

    async def _listen(self, socket: zmq.asyncio.Socket) -> None:
        """Say what to load, and hear what the engine says until it ends."""
        # This waits until the process has connected, which one that dies early never does.
        await socket.send(wire.encode(self.configure))
        while True:
            frame = await socket.recv()
            self._silence.reset()
            report = wire.decode_report(frame)
            match report:
                case wire.Progress():
                    self.progress(report.stage, report.done, report.total)
                case wire.Unable():
                    raise EngineUnable(report.message, report.model)
                case wire.Ready():
                    self.facts = report.facts
                    # Frames are small and the socket has no limit of its own: sending never waits.
                    self.link.send = lambda command: self._post(socket, command)
                    self.on_ready(report)
                    self._ready.set()
                case _:
                    self.link.hear(report)

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Kill an engine that shows no sign of life, for as long as this process lived to see it."""
        while True:
            await asyncio.sleep(self._tick)
            silent = self._silence.tick()
            if self.up and silent > self.hang_seconds:
                log.error(
                    "the engine hangs; it is stopped", extra={"fields": {"silent_seconds": round(silent)}}
                )
                process.kill()
                return

    async def wait_ready(self) -> None:
        """Wait until an engine serves."""
        await self._ready.wait()

    async def stop(self) -> None:
        """End the engine process; `run` returns after it."""
        self._stopping = True
        if self.link.send is not None:
            self.link.send(wire.Stop())
        elif self._process is not None and self._process.returncode is None:
            self._process.kill()

    def hurry(self) -> None:
        """Let an engine process that was told to end do so without writing the sessions that are left."""
        if self.link.send is not None:
            self.link.send(wire.Stop(at_once=True))

    def _post(self, socket: zmq.asyncio.Socket, command: wire.Command) -> None:
        sending = asyncio.ensure_future(socket.send(wire.encode(command), zmq.NOBLOCK))
        sending.add_done_callback(self._sent)

    def _sent(self, future: asyncio.Future[zmq.MessageTracker | None]) -> None:
        """See whether a command left: it does not when the engine is gone and nobody has noticed yet.

        Whoever waits for its answer then hears of the engine's end. While the server stops, that is meant.
        """
        if not future.cancelled() and future.exception() is not None:
            level = logging.DEBUG if self._stopping else logging.ERROR
            log.log(level, "a command did not reach the engine: %s", type(future.exception()).__name__)


def _unheard(*_: object) -> None:
    """Nobody listens."""
