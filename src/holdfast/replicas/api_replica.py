"""The deployment of API processes: each replica is an actor that serves HTTP with our own server.

In HAProxy mode Serve gives each replica of an ingress a port, where HAProxy sends requests, and starts its
own HTTP server there, which hands requests through queues and threads to the deployment. Here the server of
`holdfast serve` listens on that port instead: the same limits and WebSockets, and no token passes Ray.
Serve's application is still asked for its two health paths. Requests that come the other way, through Serve's
own proxy while HAProxy knows no replica yet, get 503 and may be tried again.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast.engine.options import make_options
from holdfast.engine.pauses import bound_pauses
from holdfast.replicas import surroundings
from holdfast.replicas.plan import Plan, read_plan
from holdfast.replicas.registry import Told, open_registry
from holdfast.replicas.serve_patches import bind_handles_to_machine, serve_http_with
from holdfast.replicas.targets import TARGETS_PATH, MetricsTargets
from holdfast.server.http.answers import json_answer
from holdfast.server.http.keys import Keys
from holdfast.server.http.problems import engine_unavailable
from holdfast.server.link.engine_set import EngineSet
from holdfast.server.options import ServerOptions
from holdfast.server.serve import BACKLOG, Serving
from holdfast.server.service import Service
from holdfast.server.telemetry.logs import set_up_logging

__all__ = ["ApiReplica", "api_deployment"]

log = logging.getLogger("holdfast.replica")

SERVE_PATHS = ("/-/healthz", "/-/routes")
RETRY_SECONDS = 1.0


class ApiReplica:
    """One API process of the cluster."""

    def __init__(self, application: str, values: dict[str, Any], _engines: Any) -> None:
        """`_engines` is the handle of the other deployment, which makes it part of the application."""
        self._plan = read_plan(values)
        self._application = application
        self._serving: asyncio.Task[int] | None = None
        bind_handles_to_machine()
        serve_http_with(self._start)

    async def _start(
        self, app: ASGIApp, http_options: Any, *, event_loop: asyncio.AbstractEventLoop, **_: Any
    ) -> tuple[asyncio.Task[int], ServerEnd]:
        """Serve HTTP on the port that Serve has chosen, in place of Serve's own server."""
        listeners = _listen(http_options.port)
        told = await _first_engines(self._application)
        serving = ReplicaServing(self._plan, app, self._application, told)
        self._serving = event_loop.create_task(serving.serve_on(listeners, _silent))
        ready = event_loop.create_task(serving.ready.wait())
        await asyncio.wait({self._serving, ready}, return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done():
            ready.cancel()
            self._serving.result()
        return self._serving, ServerEnd(serving.stop)

    def check_health(self) -> None:
        """Serve's health check."""
        if self._serving is not None and self._serving.done():
            raise RuntimeError("the server has ended")

    async def __call__(self, _request: Any) -> Any:
        """A request that came through Ray."""
        problem = engine_unavailable()
        return json_answer(problem.body(), problem.status, {"Retry-After": "1"})


class ServerEnd:
    """What Serve needs of an HTTP server: to tell it to end."""

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._told = False

    @property
    def should_exit(self) -> bool:
        """Whether it was told to end."""
        return self._told

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        if value and not self._told:
            self._told = True
            self._stop()


class ReplicaServing(Serving):
    """The server of an API process, with engines that come and go."""

    def __init__(self, plan: Plan, inner: ASGIApp, application: str, told: Told) -> None:
        """`inner` is Serve's application, `told` what the registry said first."""
        options = served_options(plan, tuple(told[2].values()))
        keys = Keys.read(options)
        most = make_options(**plan.engine).max_sessions
        options = replace(options, tenant_sessions=keys.session_limit(options.tenant_sessions, most))
        set_up_logging(options.log_level, options.log_format, sys.stderr)
        super().__init__(plan.model, "", plan.engine, options, keys)
        self.ready = asyncio.Event()
        self._inner = inner
        self._application = application
        self._told = told
        self._address = ""
        self._apis: list[str] = []

    def build(self, service: Service) -> ASGIApp:
        """The application, with Serve's for its two paths."""
        app = super().build(service)
        own: dict[str, ASGIApp] = dict.fromkeys(SERVE_PATHS, self._health)
        own[TARGETS_PATH] = MetricsTargets(self.keys, lambda: self._apis)

        async def either(scope: Scope, receive: Receive, send: Send) -> None:
            chosen = own.get(scope["path"], app) if scope["type"] == "http" else app
            await chosen(scope, receive, send)

        return either

    async def _health(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve's own answer; 503 before Serve has noticed that this replica serves."""
        try:
            await self._inner(scope, receive, send)
        except AssertionError:
            await json_answer(engine_unavailable().body(), 503)(scope, receive, send)

    async def _announce(self, service: Service, listeners: list[socket.socket]) -> None:
        """Say when an engine is connected, and follow the registry."""
        assert service.engines is not None, "the engines are apart"
        host, port = listeners[-1].getsockname()[:2]
        self._address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        following = asyncio.create_task(self._follow(service.engines))
        try:
            await service.supervisor.wait_ready()
            bound_pauses()
            self.ready.set()
            await following
        finally:
            following.cancel()

    async def _follow(self, engines: EngineSet) -> None:
        """Keep links to the engines that the registry knows."""
        registry = open_registry(self._application)
        version, _, known = self._told
        while True:
            try:
                version, expected, new = await registry.engines.remote(version, self._address)
                self._apis = await registry.apis.remote()
            except ray.exceptions.RayError as error:
                log.warning("the registry of engines cannot be asked: %s", error)
                await asyncio.sleep(RETRY_SECONDS)
                continue
            if len(new) < expected:
                new = {
                    **known,
                    **new,
                }  # The registry was lost with an engine, and cannot know where that was.
            if new != known:
                moved = {known[name]: new[name] for name in known.keys() & new.keys()}
                engines.change(tuple(new.values()), moved)
                known = new


def served_options(plan: Plan, addresses: tuple[str, ...]) -> ServerOptions:
    """The options of an API process with engines at some addresses."""
    return replace(
        plan.options, engine=addresses, link_keys=plan.link_keys, admin_key=surroundings.admin_key()
    )


async def _first_engines(application: str) -> Told:
    """Wait until the registry knows an engine."""
    registry = open_registry(application)
    version: int = 0
    while True:
        try:
            version, expected, known = await registry.engines.remote(version)
        except ray.exceptions.RayError:
            await asyncio.sleep(RETRY_SECONDS)
            continue
        if known:
            return version, expected, known


def _listen(port: int) -> list[socket.socket]:
    """Listen where HAProxy connects: at loopback from this machine, at the machine's address from others.

    Raises what Serve takes for a port in use.
    """
    listeners: list[socket.socket] = []
    for host in dict.fromkeys(("127.0.0.1", ray.util.get_node_ip_address())):
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        listeners.append(listener)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            for each in listeners:
                each.close()
            raise RuntimeError(f"port {port} on {host} is not available") from error
        listener.listen(BACKLOG)
        listener.setblocking(False)
    return listeners


def _silent(_stage: str, _done: int, _total: int) -> None:
    """Ignore progress."""


def api_deployment(plan: Plan) -> Any:
    """The deployment of a plan's API processes."""
    options = plan.options
    return serve.deployment(ApiReplica, name="Api").options(
        num_replicas=plan.cluster.api_count,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=1_000_000,
        health_check_period_s=1,
        health_check_timeout_s=5,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=options.drain_seconds + 20,
    )
