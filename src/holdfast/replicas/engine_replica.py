"""The deployment of engines: each replica is an actor that runs one engine process. It answers no requests.

The replica takes a name from the registry, starts the engine under it, and says every second where it is. Its
health is the engine's. When Serve stops it (shutdown, a rolling update, fewer replicas), the engine drains.
If the engine's process ends by itself, the replica starts it again, which is faster than another replica; if
that happens often, or fails, the replica ends, and Serve starts another, perhaps on another machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from pathlib import Path
from typing import Any

import ray
from ray import serve

from holdfast.cluster.autoscaling import Bounds, Load, Mood, Wish, decide
from holdfast.replicas.engine_runner import EngineCommand, EngineNotStarted, EngineRunner
from holdfast.replicas.plan import Plan, read_plan, written
from holdfast.replicas.registry import open_registry
from holdfast.replicas.serve_patches import bind_handles_to_machine

__all__ = ["EngineReplica", "autoscale", "engine_command", "engine_deployment"]

log = logging.getLogger("holdfast.replica")

HOLD_SECONDS = 1.0
START_SECONDS = 300.0
"""How long an engine may take to start again."""
RESTARTS_MAX = 3
RESTARTS_WITHIN = 600.0
TAKE_SECONDS = 0.5
EXPECT_SECONDS = 5.0
FROM_SERVER = ("api_keys", "tenant_sessions", "log_level", "log_format")
"""Options of the server that an engine process takes as well."""
IN_ENVIRONMENT = ("journal", "disk")
"""Options that are given in the environment: command lines are for everybody to see."""


def engine_command(plan: Plan, host: str, name: str) -> EngineCommand:
    """How the engine of a name is started on a machine."""
    environment = {} if plan.journal is None else {"HOLDFAST_JOURNAL": plan.journal}
    if "disk" in plan.engine:
        environment["HOLDFAST_DISK"] = str(Path(plan.engine["disk"]) / name)
    own = {name: value for name, value in plan.engine.items() if name not in IN_ENVIRONMENT}
    shared = {name: value for name, value in plan.server.items() if name in FROM_SERVER}
    return EngineCommand(
        host=host,
        link_keys=plan.link_keys,
        arguments=(plan.model, *written(own), *written(shared)),
        environment=environment,
        drain_seconds=plan.options.drain_seconds,
        link_seconds=plan.options.link_seconds,
    )


class EngineReplica:
    """One engine of the cluster."""

    _started = False
    _ended = False
    _restarting: float | None = None

    async def __init__(self, application: str, values: dict[str, Any]) -> None:  # type: ignore[misc]
        bind_handles_to_machine()
        plan = read_plan(values)
        context = ray.get_runtime_context()
        self._holder = str(context.get_actor_id())
        self._registry = open_registry(application)
        self._least = plan.cluster.replicas or 1
        self._number = await self._take()
        name = f"engine-{self._number}"
        host = ray.util.get_node_ip_address()
        self._runner = EngineRunner(engine_command(plan, host, name), name)
        self._holding = asyncio.create_task(self._hold())
        self._started = True
        await self._runner.start()
        self._watching = asyncio.create_task(self._watch())

    async def _take(self) -> int:
        """A slot; waits for that of the engine that this one replaces."""
        while True:
            try:
                number = await self._registry.take.remote(self._holder, self._least)
            except ray.exceptions.RayActorError:
                number = None
            if number is not None:
                return int(number)
            await asyncio.sleep(TAKE_SECONDS)

    async def _hold(self) -> None:
        """Say again and again that this engine lives; end if its name was given to another."""
        while True:
            try:
                held = await self._registry.hold.remote(
                    self._holder, self._number, self._runner.address, self._least
                )
            except ray.exceptions.RayActorError as error:
                log.warning("the registry of engines cannot be reached: %s", error)
            else:
                if not held:
                    log.error("%s was taken over by another engine", self._runner.name)
                    os._exit(1)
            await asyncio.sleep(HOLD_SECONDS)

    async def _watch(self) -> None:
        """Start an engine again that has ended by itself; end if that does not help."""
        ends: list[float] = []
        while True:
            status = await self._runner.ended()
            if self._ended:
                return
            log.error("%s ended with status %s", self._runner.name, status)
            now = time.monotonic()
            ends = [*(each for each in ends if now - each < RESTARTS_WITHIN), now]
            self._restarting = now
            try:
                if len(ends) > RESTARTS_MAX:
                    raise EngineNotStarted(f"{self._runner.name} has ended {len(ends)} times")
                await self._runner.restart()
            except (EngineNotStarted, OSError) as error:
                log.error("%s", error)
                with contextlib.suppress(ray.exceptions.RayError):  # The registry notices the silence too.
                    await self._registry.release.remote(self._holder)
                os._exit(1)
            self._restarting = None

    def check_health(self) -> None:
        """Serve's health check."""
        if self._restarting is not None and time.monotonic() - self._restarting < START_SECONDS:
            return
        problem = self._runner.problem()
        if problem is not None:
            raise RuntimeError(problem)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """The load of the engine, for `autoscale`."""
        load = self._runner.load() or Load(1.0)
        return {"free": load.free, "waiting": load.waiting, "running": load.running}

    def about(self) -> dict[str, Any]:
        """The engine's name, its address and its process."""
        return {
            "engine": self._runner.name,
            "address": self._runner.address,
            "process": self._runner.process_id,
        }

    async def __del__(self) -> None:
        """Serve stops this replica: the engine drains."""
        if not self._started or self._ended:
            return
        self._ended = True
        await self._runner.drain()
        self._holding.cancel()
        await self._registry.release.remote(self._holder)


def autoscale(context: Any) -> tuple[int, dict[str, Any]]:
    """Serve's hook: the number of engines that `cluster.autoscaling` decides on."""
    measured = context.aggregated_metrics or {}
    free = measured.get("free", {})
    loads = [
        Load(share, *(measured.get(name, {}).get(replica, 0.0) for name in ("waiting", "running")))
        for replica, share in free.items()
        if replica in context.running_replicas
    ]
    bounds = Bounds(context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas)
    before = context.policy_state
    mood = Mood(Wish(before.get("wish", 0)), before.get("since", 0.0))
    now = time.monotonic()
    target, mood = decide(loads, context.target_num_replicas, bounds, mood, now)
    told = before.get("told", (0, 0.0))
    if told[0] != target or now - told[1] > EXPECT_SECONDS:
        told = (target, now)
        open_registry(context.app_name).expect.remote(target)
    return target, {"wish": mood.wish.value, "since": mood.since, "told": told}


def engine_deployment(plan: Plan, gpus: float) -> Any:
    """The deployment of a plan's engines, each with so many GPUs."""
    cluster, options = plan.cluster, plan.options
    assert cluster.replicas is not None, "it is a cluster"
    scaling: dict[str, Any] = {"num_replicas": cluster.replicas}
    if cluster.max_replicas is not None and cluster.max_replicas > cluster.replicas:
        scaling = {
            "autoscaling_config": {
                "min_replicas": cluster.replicas,
                "initial_replicas": cluster.replicas,
                "max_replicas": cluster.max_replicas,
                "upscale_delay_s": 0,
                "downscale_delay_s": 0,
                "metrics_interval_s": 1,
                "look_back_period_s": 3,
                "policy": {"policy_function": "holdfast.replicas.engine_replica:autoscale"},
            }
        }
    return serve.deployment(EngineReplica, name="Engine").options(
        **scaling,
        ray_actor_options={"num_cpus": cluster.replica_cpus, "num_gpus": gpus},
        max_ongoing_requests=64,
        health_check_period_s=1,
        health_check_timeout_s=5,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=options.drain_seconds + 20,
    )
