"""The Serve application: API processes in front, engines behind them.

`build` is the import path of Serve configuration files, such as a KubeRay manifest's: its arguments are the
parts of a plan (`plan.py`).
"""

from __future__ import annotations

from typing import Any

import ray

from holdfast.engine.start.pull import ECHO_MODELS
from holdfast.replicas.api_replica import api_deployment
from holdfast.replicas.engine_replica import engine_deployment
from holdfast.replicas.plan import Plan, read_plan

__all__ = ["APPLICATION", "application", "build", "gpus_of"]

APPLICATION = "holdfast"


def gpus_of(plan: Plan) -> int:
    """GPUs of one engine: one, unless it computes on the CPU or the cluster has none."""
    device = str(plan.engine.get("device", "auto"))
    if plan.model in ECHO_MODELS or device == "cpu":
        return 0
    return 1 if device != "auto" or ray.cluster_resources().get("GPU", 0) >= 1 else 0


def application(plan: Plan, name: str = APPLICATION) -> Any:
    """The application of a plan; `name` is what Serve knows it by."""
    values = plan.as_values()
    engines = engine_deployment(plan, gpus_of(plan)).bind(name, values)
    return api_deployment(plan).bind(name, values, engines)


def build(arguments: dict[str, Any]) -> Any:
    """The application of a Serve configuration file."""
    return application(read_plan(arguments))
