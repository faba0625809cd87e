"""Partitions: engines in network namespaces whose packets are lost, under load, with nobody being told."""

import time
from collections.abc import Iterator

import pytest

from tests.cluster.networks import Network, require_namespaces
from tests.cluster.test_serving import rounds
from tests.databases import shared_cluster
from tests.server.apart import Apart, EngineProcess
from tests.server.shared import Shared

CUT_SECONDS = 5.0
"""Longer than links are silent, and than a lost connection is waited for."""


class Parted(Shared):
    """Three engines, each behind a network of its own, and two API processes."""

    def __init__(self, apart: Apart) -> None:
        cluster = shared_cluster()
        self._directory = cluster.directory
        self._database = cluster.new_database()
        self.networks: list[Network] = []
        super().__init__(apart, url=cluster.url(self._database))

    def engine(self, name: str | None = None, listen: str = "127.0.0.1:0", *more: str) -> EngineProcess:
        network = Network(self._directory)
        self.networks.append(network)
        arguments = ("--journal", network.url(self._database), *more)
        self._given = {"network": network.file}
        return super().engine(name, f"{network.clients.inner}:0", *arguments)


@pytest.fixture
def parted(apart: Apart) -> Iterator[Parted]:
    require_namespaces()
    made = Parted(apart)
    yield made
    apart.end()
    for network in made.networks:
        network.remove()


def part(parted: Parted, number: int, what: str) -> None:
    """Cut an engine off for a while: from clients, from the journal or both, in one direction or both."""
    network = parted.networks[number % len(parted.networks)]
    lines = {"clients": [network.clients], "journal": [network.journal]}.get(
        what.partition(" ")[0], [network.clients, network.journal]
    )
    way = what.partition(" ")[2]
    for line in lines:
        line.cut(inward=way != "deaf", outward=way != "mute")
    time.sleep(CUT_SECONDS)
    for line in lines:
        line.heal()


WAYS = ("all", "clients", "journal", "all mute", "all deaf", "clients mute", "journal deaf")


def test_an_engine_is_cut_off_from_everything_under_load(parted: Parted) -> None:
    rounds(parted, 1, lambda number: part(parted, number, "all"))
    assert sorted(parted.apis[0].get("/health").json()["engines"]) == ["e0", "e1", "e2"]


@pytest.mark.soak
def test_partitions_of_all_kinds_under_load(parted: Parted) -> None:
    rounds(parted, 3 * len(WAYS), lambda number: part(parted, number, WAYS[number % len(WAYS)]))
