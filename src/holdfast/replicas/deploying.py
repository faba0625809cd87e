"""Joins a Ray cluster, or starts one, deploys the application there, and ends it at a signal.

In a cluster that is joined the application is deployed, or updated replica by replica if it is there, and
deleted at the end unless another command has updated it since. SIGTERM (or Ctrl-C) drains; a second signal
does not wait.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from typing import Any

import ray
from ray import serve

from holdfast.engine.options import OptionError
from holdfast.replicas.app import APPLICATION, application, gpus_of
from holdfast.replicas.launch import ClusterFailed, Signals
from holdfast.replicas.plan import Plan
from holdfast.replicas.registry import open_registry
from holdfast.server.options import ServerOptions
from holdfast.server.sessions import shown_name

__all__ = ["serve_plan"]

OBJECT_STORE_BYTES = 80 << 20
"""The least that Ray takes: nothing is kept in its object store."""
LOOK_SECONDS = 0.2
ANSWER_SECONDS = 120.0
CONNECT_SECONDS = 5.0
LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}
FAILED = ("DEPLOY_FAILED", "UNHEALTHY")


def serve_plan(plan: Plan, variables: dict[str, str]) -> int:
    """Serve a plan until a signal; raises `OptionError` or `ClusterFailed`."""
    with _cluster(plan, variables):
        signals = Signals()  # Ray has handlers of its own, which these replace.
        _require_room(plan)
        return _serve(plan, variables, signals)


def _is_own(plan: Plan) -> bool:
    return plan.cluster.ray_address is None


# --- the cluster --------------------------------------------------------------------------------------


@contextlib.contextmanager
def _cluster(plan: Plan, variables: dict[str, str]) -> Iterator[None]:
    """A connection to Ray; a cluster of its own ends with it."""
    shared: dict[str, Any] = {"namespace": "serve", "log_to_driver": False, "logging_level": logging.ERROR}
    address = plan.cluster.ray_address
    try:
        if address is None:
            ray.init(
                "local",
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                **shared,
            )
        else:
            ray.init(address, runtime_env={"env_vars": variables}, **shared)
    except (ConnectionError, RuntimeError, ValueError) as error:
        if address is None:
            raise ClusterFailed(f"Ray cannot start: {_first_line(error)}") from error
        hint = "if it asks for a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH"
        problem = f"{address} cannot be joined: {_first_line(error)} ({hint})"
        raise OptionError("ray_address", problem) from error
    try:
        yield
    finally:
        ray.shutdown()


def _require_room(plan: Plan) -> None:
    """Raise if the machines of a cluster cannot hold its engines; Serve would wait for more machines."""
    gpus = gpus_of(plan)
    count = plan.cluster.replicas or 0
    total = ray.cluster_resources()
    if gpus and total.get("GPU", 0) < count * gpus:
        raise ClusterFailed(
            f"{count} engines need {count} GPUs, and the cluster has {total.get('GPU', 0):g}: "
            "lower --replicas"
        )
    needed = count * plan.cluster.replica_cpus
    if total.get("CPU", 0) < needed:
        raise ClusterFailed(
            f"{count} engines need {needed:g} processors, and the cluster has {total.get('CPU', 0):g}: "
            "lower --replicas, or --replica-cpus"
        )


# --- the application ----------------------------------------------------------------------------------


def _serve(plan: Plan, variables: dict[str, str], signals: Signals) -> int:
    """Deploy the application, wait for a signal, and let it drain."""
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    options = plan.options
    where = "HeadOnly" if _is_own(plan) else "EveryNode"
    serve.start(
        proxy_location=where,
        http_options={"host": options.host, "port": options.port},
        controller_options={"runtime_env": {"env_vars": variables}},
    )
    target = serve.RunTarget(application(plan), name=APPLICATION, route_prefix="/")
    serve.run_many([target], wait_for_applications_running=False)
    registry = open_registry(APPLICATION)
    registry.expect.remote(plan.cluster.replicas)
    mine = ray.get(registry.deployed.remote())
    if _wait_running(signals) and _wait_answers(options, signals):
        _announce(plan)
        while not signals.wait(LOOK_SECONDS * 5):
            pass
    if _is_own(plan) or ray.get(registry.deployed.remote(mine)):
        serve.delete(APPLICATION)
        ray.kill(registry)
        if _is_own(plan):
            serve.shutdown()
    return 0


def _wait_running(signals: Signals) -> bool:
    """Wait until all replicas run; False if a signal came before."""
    while not signals.wait(LOOK_SECONDS):
        status = serve.status().applications.get(APPLICATION)
        if status is None:
            continue
        if status.status == "RUNNING":
            return True
        if status.status in FAILED:
            told = [status.message, *(each.message for each in status.deployments.values())]
            raise ClusterFailed(_last_reason("\n".join(told)))
    return False


def _wait_answers(options: ServerOptions, signals: Signals) -> bool:
    """Wait until HAProxy sends requests to an API process; False if a signal came before."""
    deadline = time.monotonic() + ANSWER_SECONDS
    host = LOOPBACK.get(options.host, options.host)
    while not signals.wait(LOOK_SECONDS):
        if _is_ready(host, options.port):
            return True
        if time.monotonic() > deadline:
            raise ClusterFailed(
                f"nothing answers at {host}:{options.port}; if Serve runs there with other options, "
                "end it with `serve shutdown`"
            )
    return False


def _is_ready(host: str, port: int) -> bool:
    """Whether the service answers, and is ready."""
    with contextlib.closing(HTTPConnection(host, port, timeout=CONNECT_SECONDS)) as connection:
        try:
            connection.request("GET", "/health/ready")
            return connection.getresponse().status == HTTPStatus.OK
        except (OSError, HTTPException):
            return False


def _announce(plan: Plan) -> None:
    """Print the address, the replicas and what a lost engine loses."""
    options, cluster = plan.options, plan.cluster
    host = f"[{options.host}]" if ":" in options.host else options.host
    engines = _counted(cluster.replicas or 1, "engine")
    if cluster.max_replicas is not None and cluster.max_replicas > (cluster.replicas or 0):
        engines += f", up to {cluster.max_replicas} under load"
    apis = _counted(cluster.api_count, "API process", "API processes")
    name = options.served_model_name or shown_name(plan.model)
    kept = (
        "no journal: a session is lost with its engine; give --journal postgresql://… to keep it"
        if plan.journal is None
        else "sessions survive their engine: the journal is in PostgreSQL"
    )
    lines = [
        f"Holdfast serves {name} on http://{host}:{options.port}",
        f"  {engines}, {apis}, on Ray {ray.__version__}",
        f"  {kept}",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def _counted(count: int, one: str, many: str = "") -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _last_reason(told: str) -> str:
    """The line of a Serve status that says why: that of an exception, not its traceback."""
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line or "EngineNotStarted" in line]
    return (named or lines or ["the application failed"])[-1]
