"""The simulation of a cluster: no findings with the right rules, the right one with each planted bug."""

import json
import shlex
from functools import cache

import pytest
from typer.testing import CliRunner

from holdfast.cli.sim_cluster import app
from holdfast.sim.cluster.mutants import CLUSTER_MUTANTS, planted
from holdfast.sim.cluster.world import Options, Result, simulate

KINDS = {
    "fence-left-out": {"two owners", "lost turn"},
    "dead-life-commits": {"life"},
    "acknowledge-before-commit": {"lost turn"},
    "lost-answer-is-taken-for-done": {"lost turn"},
    "refused-counts-as-accepted": {"lost turn"},
    "refused-repeat-counts-as-accepted": {"lost turn"},
    "epoch-not-raised": {"two owners"},
    "hand-over-without-raising-the-epoch": {"two owners"},
    "turn-repeat-not-recognised": {"doubled turn"},
    "keys-stay-with-the-first-owner": {"doubled turn"},
    "dead-life-revived": {"life"},
    "drain-that-drops": {"lost turn"},
    "claim-without-checking-the-life": {"life"},
    "claim-from-a-living-owner": {"two owners"},
    "dead-owner-keeps-its-sessions": {"stuck session"},
    "tenant-count-not-in-the-statement": {"tenant limit"},
    "closed-sessions-stay-counted": {"stuck session"},
    "fork-of-a-refused-parent": {"fork", "stuck session"},
    "refused-fork-counts-as-made": {"lost turn"},
    "name-opened-twice": {"lost turn"},
    "claim-reads-an-old-copy": {"lost turn"},
}
"""The findings that each mutant may cause."""


def small(seed: int) -> Result:
    return simulate(Options(seed, 20, 200, 40_000, 4.0, 0.01, 2.0, 4))


@cache
def unchanged(seed: int) -> Result:
    """A small world without a planted bug, simulated once."""
    return small(seed)


@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_found_in_small_worlds(seed: int) -> None:
    result = unchanged(seed)
    assert result.finding is None
    assert result.acknowledged > 3000 and result.store["refused"] > 10 and result.store["deaths"] > 5
    assert all(result.faults.values()), "every kind of fault happened"


def test_a_million_events_of_a_thousand_replicas_without_a_finding() -> None:
    result = simulate(Options())
    assert result.finding is None
    assert result.events >= 1_000_000 and result.acknowledged > 100_000
    assert all(result.faults.values()), "every kind of fault happened"
    assert sum(result.faults.values()) > 500 and result.store["claims"] > 1000


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10, 20))
def test_ten_million_events_each(seed: int) -> None:
    """Together 10^8 events."""
    assert simulate(Options(seed, events=10_000_000)).finding is None


@pytest.mark.soak
@pytest.mark.parametrize("first", range(100, 500, 50))
def test_many_small_worlds(first: int) -> None:
    for seed in range(first, first + 50):
        assert small(seed).finding is None, seed


def test_a_seed_is_a_run() -> None:
    first, second, other = small(3), small(3), small(4)
    assert first == second != other


@pytest.mark.parametrize("name", CLUSTER_MUTANTS)
def test_each_mutant_is_caught(name: str) -> None:
    for seed in range(1, 13):
        with planted(name) as patcher:
            finding = small(seed).finding
        if finding is not None:
            break
    assert finding is not None
    assert patcher.reached > 0
    assert finding.kind in KINDS[name], finding
    assert unchanged(seed).finding is None, "without the mutant there is nothing to find"


# --- the command ---


def run(*arguments: str) -> tuple[int, list[str]]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout.splitlines()


SIZE = ("--replicas", "10", "--sessions", "50", "--events", "5000", "--faults", "2")


def test_a_clean_run_exits_0_with_a_summary() -> None:
    status, lines = run(*SIZE, "--json")
    assert status == 0
    summary = json.loads(lines[-1])
    assert summary["findings"] == 0 and summary["events"] >= 5000 and summary["acknowledged"] > 100
    status, lines = run(*SIZE)
    assert status == 0 and lines[-1].endswith("0 findings")


def test_a_finding_exits_1_with_a_line_that_replays_it() -> None:
    status, lines = run(*SIZE, "--mutant", "acknowledge-before-commit")
    assert status == 1
    shown = {line.partition(":")[0]: line.partition(":")[2].strip() for line in lines[:3]}
    assert shown.keys() == {"finding", "when", "replay"} and shown["finding"].startswith("lost turn")
    command, verb, *replay = shlex.split(shown["replay"])
    assert (command, verb) == ("holdfast", "sim-cluster")
    assert run(*replay) == (1, lines)


def test_mutants_are_listed_and_unknown_ones_refused() -> None:
    status, lines = run("--list-mutants", "--json")
    assert status == 0
    assert [json.loads(line)["name"] for line in lines] == list(CLUSTER_MUTANTS) == list(KINDS)
    assert all(json.loads(line)["what"] for line in lines)
    assert run("--list-mutants")[0] == 0
    assert run("--mutant", "fence")[0] == 2
