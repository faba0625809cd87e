"""What `deploy/` holds for clusters: a plan that is accepted, variables that Serve reads, real metrics."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.cli.options import CLUSTER_OPTIONS, ENGINE_OPTIONS, SERVER_OPTIONS
from holdfast.replicas.plan import ClusterOptions, make_plan, read_plan
from holdfast.replicas.surroundings import COMMON, PROXY
from tests.server.apart import Apart, apart

__all__ = ["apart"]

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
NAME = re.compile(r"holdfast_[a-z_]+")


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DEPLOY / "kuberay.yaml").read_text())
    return loaded


def pods(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """The pods of the head and of the workers."""
    cluster = manifest["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


def test_the_manifest_has_a_plan_that_is_accepted(manifest: dict[str, Any]) -> None:
    served = yaml.safe_load(manifest["spec"]["serveConfigV2"])
    (application,) = served["applications"]
    plan = read_plan(application["args"])
    assert plan.journal is not None
    assert plan.options.host == served["http_options"]["host"]
    group = manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    assert (group["minReplicas"], group["maxReplicas"]) == (plan.cluster.replicas, plan.cluster.max_replicas)
    module, _, function = application["import_path"].partition(":")
    source = ast.parse((ROOT / "src" / f"{module.replace('.', '/')}.py").read_text())
    assert function in [node.name for node in source.body if isinstance(node, ast.FunctionDef)]


def test_every_pod_has_the_environment_keys_and_time_to_drain(manifest: dict[str, Any]) -> None:
    served = yaml.safe_load(manifest["spec"]["serveConfigV2"])
    options = served["applications"][0]["args"]["server"]
    assert len(pods(manifest)) == 2
    for pod in pods(manifest):
        (container,) = pod["containers"]
        variables = {each["name"]: each.get("value") for each in container["env"]}
        assert COMMON.items() <= variables.items()
        assert Path(variables["RAY_SERVE_HAPROXY_BINARY_PATH"]).name == PROXY
        assert "HOLDFAST_ADMIN_KEY" in variables
        mounts = [each["mountPath"] for each in container["volumeMounts"]]
        for name in ("link_keys", "api_keys"):
            assert str(Path(options[name]).parent) in mounts
        assert pod["terminationGracePeriodSeconds"] >= options["drain_seconds"] + 20


def test_the_compose_file_serves_a_cluster() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    program, verb, model, *arguments = services["holdfast"]["command"]
    assert (program, verb, model) == ("holdfast", "serve", "${MODEL:-echo}")
    given = {each.removeprefix("--").replace("-", "_").partition("=")[::2] for each in arguments}
    groups: dict[str, dict[str, Any]] = {}
    for group, options in (
        ("engine", ENGINE_OPTIONS),
        ("server", SERVER_OPTIONS),
        ("cluster", CLUSTER_OPTIONS),
    ):
        kinds = {option.name: option.kind for option in options}
        groups[group] = {name: kinds[name](value) for name, value in given if name in kinds}
    assert sum(map(len, groups.values())) == len(given), "every argument is an option"
    cluster = ClusterOptions(**groups["cluster"])
    plan = make_plan("echo", cluster, groups["engine"], {"link_keys": "", **groups["server"]})
    assert (plan.cluster.replicas, plan.options.port) == (3, 8000)
    assert services["holdfast"]["ports"] == ["127.0.0.1:8000:8000"]
    grace = int(services["holdfast"]["stop_grace_period"].removesuffix("s"))
    assert grace >= plan.options.drain_seconds + 20


def test_the_board_draws_only_what_an_api_process_measures(apart: Apart) -> None:
    engine = apart.engine()
    server = apart.api(engine)
    server.say(server.open(), "some words")
    page = server.get("/metrics").text
    measured = {line.split("{")[0].split(" ")[0] for line in page.splitlines() if not line.startswith("#")}
    by_engine = {line.split("{")[0] for line in page.splitlines() if 'engine="' in line}
    panels = json.loads((DEPLOY / "grafana-cluster.json").read_text())["panels"]
    assert len({panel["title"] for panel in panels}) == len(panels) == 15
    for panel in panels:
        for target in panel["targets"]:
            drawn = set(NAME.findall(target["expr"]))
            assert drawn
            assert drawn <= measured, drawn - measured
            if "by (engine" in target["expr"]:
                assert drawn <= by_engine, drawn - by_engine
