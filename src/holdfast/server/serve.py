"""`holdfast serve`: the API process and its shutdown.

This process serves HTTP; the engine process computes. SIGTERM (or Ctrl-C) drains: new work is rejected, turns
in flight may end within a time limit and are then rolled back, the engine writes its sessions to disk, and
the process exits with 0. A second signal skips the turns in flight, a third the writing. Sessions that were
not written are recomputed from the journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import uvicorn
import uvloop
from starlette.types import ASGIApp

from holdfast.engine.options import OptionError, make_options
from holdfast.engine.pauses import bound_pauses
from holdfast.engine.start.pull import ECHO_MODELS, resolve_model
from holdfast.server.app import build_app
from holdfast.server.http.connections import Config, Connections, raise_descriptor_limit
from holdfast.server.http.keys import Keys, warn_if_readable
from holdfast.server.http.websockets import SocketConnection
from holdfast.server.link import wire
from holdfast.server.link.remote_engines import RemoteEngines
from holdfast.server.link.supervisor import Supervisor
from holdfast.server.link.tls import client_context
from holdfast.server.options import ServerOptions
from holdfast.server.service import Service
from holdfast.server.sessions import shown_name
from holdfast.server.telemetry.engine_metrics import EnginesCollector
from holdfast.server.telemetry.logs import set_up_logging
from holdfast.server.telemetry.metrics import Metrics

__all__ = ["Serving", "run"]

log = logging.getLogger("holdfast.server")

BACKLOG = 2048
GOODBYE_SECONDS = 3.0


class UvicornServer(uvicorn.Server):
    """Uvicorn without its signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


class Serving:
    """One server from its start to its end."""

    def __init__(
        self, model: str, path: str, engine_options: dict[str, Any], options: ServerOptions, keys: Keys
    ) -> None:
        """`path` is the directory or file of `model`; empty where the engines are apart."""
        self.model = model
        self.path = path
        self.options = options
        self.keys = keys
        self.engine_options = {**engine_options, "tenant_shares": keys.shares}
        self.descriptors_max = raise_descriptor_limit()
        self.stopping = asyncio.Event()
        self.hurry = asyncio.Event()

    async def run(self, progress: Callable[[str, int, int], None]) -> int:
        """Serve until a signal comes; returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        return await self.serve_on([self._listen()], progress)

    async def serve_on(
        self, listeners: list[socket.socket], progress: Callable[[str, int, int], None]
    ) -> int:
        """Serve on sockets that listen, until `stop`; closes them."""
        configure = wire.Configure(
            self.path, self.engine_options, self.options.log_level, self.options.log_format
        )
        name = self.options.served_model_name or shown_name(self.model)
        metrics = Metrics()
        keys = self.options.link_keys
        remote = None if keys is None else client_context(keys)
        service = Service(self.options, configure, metrics, name, progress, remote)
        link, supervisor, engines = service.link, service.supervisor, service.engines
        supervising = asyncio.create_task(supervisor.run())
        try:
            if engines is not None:
                metrics.registry.register(EnginesCollector(lambda: engines.remotes.engines))
            else:
                metrics.watch(lambda: link.pulse, link.totals, lambda: supervisor.up)
                metrics.watch_loop(link.loop_times)
            announcing = asyncio.create_task(self._announce(service, listeners))
            await self._serve(service, listeners, supervising)
            announcing.cancel()
            service.close()
            return 0
        finally:
            await supervisor.stop()
            await asyncio.gather(supervising, return_exceptions=True)
            for listener in listeners:
                listener.close()

    def build(self, service: Service) -> ASGIApp:
        """The application."""
        return build_app(service, self.keys, self.stopping.is_set)

    async def _serve(
        self, service: Service, listeners: list[socket.socket], supervising: asyncio.Task[None]
    ) -> None:
        """Serve until a signal; then drain and shut down."""
        connections = Connections(
            self.options.header_seconds, self.options.body_seconds, self.descriptors_max
        )
        server = UvicornServer(
            Config(
                self.build(service),
                connections,
                log_config=None,
                access_log=False,
                lifespan="off",
                ws=SocketConnection,
                ws_max_size=self.options.message_limit,
                ws_ping_interval=20.0,
                ws_ping_timeout=60.0,
                h11_max_incomplete_event_size=64 << 10,
                timeout_keep_alive=75,
                server_header=False,
            )
        )
        serving = asyncio.create_task(server.serve(sockets=listeners))
        stop = asyncio.create_task(self.stopping.wait())
        try:
            await asyncio.wait({supervising, serving, stop}, return_when=asyncio.FIRST_COMPLETED)
            if supervising.done():
                supervising.result()
            await self._drain(service)
        finally:
            stop.cancel()
            # The engine rolls back turns still in flight as it stops, and their clients get an error.
            await service.supervisor.stop()
            await self._let_write(service.supervisor, supervising)
            server.should_exit = True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(serving), GOODBYE_SECONDS)
            server.force_exit = True
            await asyncio.gather(serving, return_exceptions=True)

    def stop(self) -> None:
        """Drain and end; asked again, without waiting for turns in flight."""
        if self.stopping.is_set():
            self.hurry.set()
        self.stopping.set()

    def _listen(self) -> socket.socket:
        """Bind first: an address in use is an error before the model is loaded."""
        family = socket.AF_INET6 if ":" in self.options.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((self.options.host, self.options.port))
        except OSError as error:
            listener.close()
            host, port = self.options.host, self.options.port
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                raise OptionError(
                    "port",
                    f"{port} on {host} is not available: {error.strerror}; choose another, or 0",
                ) from error
            raise OptionError(
                "host",
                f"{host} is not an address of this machine: {error.strerror}; choose 127.0.0.1 or 0.0.0.0",
            ) from error
        listener.listen(BACKLOG)
        listener.setblocking(False)
        return listener

    async def _announce(self, service: Service, listeners: list[socket.socket]) -> None:
        """Print the address and the memory plan, or the engines, when the server is ready."""
        await service.supervisor.wait_ready()
        bound_pauses()
        facts = service.facts
        plan = facts.plan if service.engines is None else [f"engines at {', '.join(self.options.engine)}"]
        host, port = listeners[0].getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        about = f"{facts.architecture}, {facts.dtype} on {facts.device}, context {facts.context_length}"
        lines = [
            f"Holdfast serves {service.model_name} on http://{shown}:{port}",
            *(f"  {line}" for line in (about, *plan)),
        ]
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()

    async def _drain(self, service: Service) -> None:
        """Wait for the turns in flight; those that do not end in time are rolled back."""
        log.info("draining", extra={"fields": {"turns": service.link.turns}})
        draining = asyncio.create_task(service.drain(self.options.drain_seconds))
        hurry = asyncio.create_task(self.hurry.wait())
        await asyncio.wait({draining, hurry}, return_when=asyncio.FIRST_COMPLETED)
        if not draining.done():
            self.hurry.clear()  # That signal was for the turns in flight.
        for task in (draining, hurry):
            task.cancel()

    async def _let_write(
        self, supervisor: Supervisor | RemoteEngines, supervising: asyncio.Task[None]
    ) -> None:
        """Wait until the engine has written its sessions and exited; another signal stops the writing."""
        hurry = asyncio.create_task(self.hurry.wait())
        await asyncio.wait({supervising, hurry}, return_when=asyncio.FIRST_COMPLETED)
        if not supervising.done():
            supervisor.hurry()
        hurry.cancel()
        await asyncio.gather(supervising, return_exceptions=True)


def run(
    model: str,
    engine_options: dict[str, Any],
    options: ServerOptions,
    progress: Callable[[str, int, int], None] | None = None,
) -> int:
    """Serve a model until a signal; raises `OptionError` or `EngineUnable`."""
    max_sessions = make_options(**engine_options).max_sessions
    keys = Keys.read(options)
    options = replace(options, tenant_sessions=keys.session_limit(options.tenant_sessions, max_sessions))
    set_up_logging(options.log_level, options.log_format, sys.stderr)
    if options.link_keys is not None:
        client_context(options.link_keys)  # Raises if it is not a key file.
        warn_if_readable(options.link_keys)
    warn_if_readable(options.api_keys)
    told = progress or _silent
    path = model
    if options.engine:
        model = path = ""
    elif model not in ECHO_MODELS:
        cache = engine_options.get("cache")
        path = str(resolve_model(model, lambda done, total: told("fetch", done, total), cache))

    async def main() -> int:
        return await Serving(model, path, engine_options, options, keys).run(told)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


def _silent(_stage: str, _done: int, _total: int) -> None:
    """Ignore progress."""
