"""A Ray cluster that runs already: joined, updated replica by replica under load, and left as it was."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.replicas.surroundings import free_ports, own
from holdfast.server.link.tls import write_keys
from tests.databases import new_place
from tests.ray import cluster
from tests.ray.cluster import ENGINE, ENGINES, Talk, until


@pytest.fixture
def head(tmp_path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """The address of a Ray cluster, and the environment that its machines have."""
    folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"hf-{os.getpid()}"
    folder.mkdir()
    (port,) = free_ports(1)
    variables = {**own(folder), "PYTHONPATH": str(cluster.ROOT / "src"), "OMP_NUM_THREADS": "1"}
    settings = {**os.environ, **variables}
    program = Path(sys.executable).with_name("ray")
    started = subprocess.Popen(
        [
            *(str(program), "start", "--head", "--block", "--num-cpus=2", "--include-dashboard=false"),
            *(f"--port={port}", f"--object-store-memory={80 << 20}", "--disable-usage-stats"),
        ],
        env=settings,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
    )
    address = f"127.0.0.1:{port}"
    until(lambda: listens(port), "Ray does not start")
    yield address, variables
    started.terminate()
    started.wait(60)
    shutil.rmtree(folder)


def listens(port: int) -> bool:
    """Whether somebody listens at a port."""
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def test_an_update_replaces_all_engines_and_loses_no_answer(
    head: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    address, variables = head
    write_keys(tmp_path / "link.pem")
    journal = new_place("postgres", tmp_path)
    (port,) = free_ports(1)
    arguments = ("--ray-address", address, "--link-keys", str(tmp_path / "link.pem"), "--port", str(port))
    first = cluster.start(journal, *arguments, environment=variables)
    talk = Talk(first, journal, 3, seed=7)
    talk.goes_on(3)
    before = engine_processes()
    assert len(before) == ENGINES
    second = cluster.start(journal, *arguments, "--max-queue", "1000", environment=variables)
    assert engine_processes().isdisjoint(before), "all engines are new"
    assert first.stop() == 0
    talk.goes_on(5)
    talk.check()
    assert len(engine_processes()) == ENGINES, "the end of the first command has ended nothing"
    assert second.stop() == 0, "\n".join(second.lines)
    until(lambda: not engine_processes(), "the application is gone")


def engine_processes() -> set[int]:
    """The engines of replicas on this machine."""
    found = (int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit())
    return {each for each in found if ENGINE in cluster.title(each)}
