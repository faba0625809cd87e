"""Options of a cluster: which are refused, with which line, and what engines get. Without Ray."""

import importlib.util
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from holdfast.cli import build
from holdfast.engine.options import OptionError
from holdfast.replicas.plan import ClusterOptions, make_plan, read_plan, written

THREE = ClusterOptions(3)
KEYS = {"link_keys": "link.pem"}
JOURNAL = "postgresql://holdfast@db/holdfast?sslmode=require"


def refused(*arguments: str) -> str:
    """What `holdfast serve` says to arguments that it refuses, in one line."""
    result = CliRunner().invoke(build(), ["serve", "echo", *arguments])
    assert result.exit_code != 0
    (line,) = result.output.splitlines()
    assert line.startswith("holdfast serve: ")
    return line.removeprefix("holdfast serve: ")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--replicas", "0"), "--replicas must be from 1"),
        (("--replicas", "2000"), "--replicas must be from 1 to 1024"),
        (("--replicas", "3", "--max-replicas", "2"), "--max-replicas must be from --replicas"),
        (("--replicas", "3", "--api-replicas", "0"), "--api-replicas must be from 1"),
        (("--replicas", "3", "--replica-cpus", "0"), "--replica-cpus must be a positive number"),
        (("--max-replicas", "3"), "--max-replicas needs --replicas"),
        (("--ray-address", "auto"), "--ray-address needs --replicas"),
        (("--replicas", "3", "--journal", "sessions.db"), "--journal must be a postgresql:// URL"),
        (("--replicas", "3", "--journal", "postgresql://a:b@c/d"), "--journal must not contain a password"),
        (
            ("--replicas", "3", "--journal", "postgresql://c/d?password=b"),
            "--journal must not contain a password",
        ),
        (
            ("--replicas", "3", "--journal", "postgresql://c/d?sslkey=f&sslpassword=b"),
            "--journal must not contain a password",
        ),
        (("--replicas", "3", "--device", "cuda:1"), "--device must not name one GPU"),
        (("--replicas", "3", "--engine", "127.0.0.1:7000"), "--engine cannot be combined with --replicas"),
        (("--replicas", "3", "--storm"), "--storm cannot be combined with --replicas"),
        (("--replicas", "3", "--ray-address", "10.0.0.1:6379"), "--link-keys is required with --replicas"),
        (("--replicas", "3", "--max-queue", "-1"), "--max-queue must"),
        (("--replicas", "3", "--log-level", "loud"), "--log-level must be one of"),
        (("--replicas", "3", "--durability", "fsync"), "--durability needs --journal"),
        (
            ("--replicas", "3", "--ray-address", "a:1", "--link-keys", "k", "--admin-key", "secret"),
            "--admin-key must be in the environment of the cluster's machines",
        ),
    ],
)
def test_options_that_are_refused(arguments: tuple[str, ...], says: str) -> None:
    assert says in refused(*arguments)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "holdfast.cli.serve_cluster.find_spec", lambda name: None if name == "ray" else found(name)
    )
    assert refused("--replicas", "3") == "--replicas needs Ray: pip install 'holdfast[cluster]'"


@pytest.fixture
def ray_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """These errors come before Ray is imported."""
    monkeypatch.setattr("holdfast.cli.serve_cluster.find_spec", lambda name: object())


@pytest.mark.usefixtures("ray_is_there")
def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = refused("--replicas", "3", "--port", port)
    assert (
        said == f"--port {port} on 127.0.0.1 is not available: Address already in use; choose another, or 0"
    )


@pytest.mark.usefixtures("ray_is_there")
def test_an_address_that_nobody_listens_at() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    said = refused("--replicas", "3", "--ray-address", f"127.0.0.1:{port}", "--link-keys", "link.pem")
    assert said.startswith(f"--ray-address 127.0.0.1:{port} cannot be reached: Connection refused; start Ray")
    said = refused("--replicas", "3", "--ray-address", "nowhere", "--link-keys", "link.pem")
    assert said.startswith("--ray-address must be HOST:PORT")


@pytest.mark.usefixtures("ray_is_there")
def test_a_public_address_needs_keys_and_files_must_be_there(tmp_path: Path) -> None:
    assert "there are no keys" in refused("--replicas", "3", "--host", "0.0.0.0", "--port", "0")
    missing = str(tmp_path / "none.pem")
    said = refused("--replicas", "3", "--port", "0", "--link-keys", missing)
    assert said.startswith(f"--link-keys names {missing}, which cannot be read")


def test_a_plan_survives_being_written_and_read() -> None:
    server = {**KEYS, "port": 9000, "cors_origin": ("https://a.example",)}
    plan = make_plan("echo", THREE, {"journal": JOURNAL, "kv_tokens": 4096}, server)
    assert read_plan(plan.as_values()) == plan
    values: dict[str, Any] = plan.as_values()
    values["server"]["cors_origin"] = ["https://a.example"]  # As JSON and YAML write it.
    assert read_plan(values) == plan
    assert plan.options.port == 9000


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"modell": "echo"}, "is an unknown section"),
        ({"cluster": {"replica": 3}}, "has an unknown option"),
        ({"cluster": {"replicas": 3}, "server": {**KEYS, "admin_key": "x"}}, "must not be in a plan"),
        ({"cluster": {"replicas": 3}}, "is required with --replicas"),
    ],
)
def test_plans_that_are_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        read_plan({"model": "echo", **values})


def test_two_api_processes_unless_there_is_one_engine() -> None:
    assert [ClusterOptions(count).api_count for count in (1, 2, 8)] == [1, 2, 2]
    assert ClusterOptions(8, api_replicas=5).api_count == 5


def test_options_as_arguments() -> None:
    stated = {"kv_tokens": 4096, "leave_history": False, "fast_start": True}
    assert written(stated) == ["--kv-tokens", "4096", "--no-leave-history", "--fast-start"]
