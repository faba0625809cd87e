"""The environment of a cluster: files of its own, a program that runs, secrets that nobody else reads."""

import os
import stat
import subprocess
from pathlib import Path

import pytest

from holdfast.engine.options import OptionError
from holdfast.replicas import surroundings


def test_two_clusters_share_neither_files_nor_ports(tmp_path: Path) -> None:
    made = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        made.append(surroundings.own(tmp_path / name))
    first, second = made
    assert first.keys() == second.keys()
    shared = {name for name in first if first[name] == second[name]}
    assert shared == {*surroundings.COMMON, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "RAY_AUTH_MODE",
                      "RAY_SERVE_HAPROXY_NBTHREAD"}  # fmt: skip
    ports = [value for name, value in first.items() if name.endswith("_PORT")]
    assert len(set(ports)) == len(ports) == 4


def test_the_token_is_new_and_its_owner_s_alone(tmp_path: Path) -> None:
    path = Path(surroundings.own(tmp_path)["RAY_AUTH_TOKEN_PATH"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (tmp_path / "again").mkdir()
    other = Path(surroundings.own(tmp_path / "again")["RAY_AUTH_TOKEN_PATH"])
    assert len(path.read_text()) == 64
    assert path.read_text() != other.read_text()


def test_the_program_refuses_a_configuration_that_would_open_a_port(tmp_path: Path) -> None:
    program = surroundings.write_program(tmp_path)
    bad = tmp_path / "haproxy.cfg"
    bad.write_text("listen stats\n  bind quic4@:443\n")
    run = subprocess.run([program, "-f", bad], capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert "cannot tell where stats listens" in run.stderr


def test_a_variable_that_is_set_keeps_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SERVE_HAPROXY_MAXCONN", "7")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "")
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED")
    surroundings.apply({"RAY_SERVE_HAPROXY_MAXCONN": "9", "RAY_USAGE_STATS_ENABLED": "0"})
    assert (os.environ["RAY_SERVE_HAPROXY_MAXCONN"], os.environ["RAY_USAGE_STATS_ENABLED"]) == ("7", "0")


def test_a_cluster_is_joined_only_with_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name, path=None: None)
    monkeypatch.delenv(surroundings.PROGRAM, raising=False)
    with pytest.raises(OptionError, match="needs the program holdfast-haproxy"):
        surroundings.joined()
    monkeypatch.setenv(surroundings.PROGRAM, "/somewhere/holdfast-haproxy")
    assert surroundings.joined()[surroundings.PROGRAM] == "/somewhere/holdfast-haproxy"
