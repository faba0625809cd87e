"""`holdfast serve --replicas`: check the options of a cluster, then import Ray and serve."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from holdfast.cli.refusals import WRONG, refusal
from holdfast.engine.options import OptionError
from holdfast.engine.start.pull import PullError
from holdfast.replicas.plan import ClusterOptions, Plan, make_plan

__all__ = ["cluster_plan", "serve_cluster"]


def serve_cluster(
    model: str, cluster: ClusterOptions, engine: dict[str, Any], server: dict[str, Any], key_on_line: bool
) -> int:
    """Serve on Ray until a signal; raises `OptionError`. An error at the start is printed as one line."""
    if cluster.ray_address is not None and key_on_line:
        raise OptionError(
            "admin_key", "must be in the environment of the cluster's machines (HOLDFAST_ADMIN_KEY)"
        )
    admin_key = server.pop("admin_key", None)
    plan = cluster_plan(model, cluster, engine, server)
    if find_spec("ray") is None:
        raise refusal("serve", "--replicas needs Ray: pip install 'holdfast[cluster]'", WRONG)
    launch = import_module("holdfast.replicas.launch")
    try:
        return int(launch.run(plan, admin_key))
    except OptionError:
        raise
    except launch.ClusterFailed as error:
        raise refusal("serve", str(error)) from error
    except (PullError, ValueError) as error:
        raise refusal("serve", str(error), WRONG) from error


def cluster_plan(model: str, cluster: ClusterOptions, engine: dict[str, Any], server: dict[str, Any]) -> Plan:
    """The plan of a cluster; raises `OptionError`. A cluster of its own makes its link keys."""
    if cluster.ray_address is None:
        server = {"link_keys": "", **server}
    return make_plan(model, cluster, engine, server)
