"""Clean runs of the simulation: nothing is found, everything is struck, and all of it can be repeated."""

import gc
from itertools import product

import pytest

from holdfast.core.layout import LAYOUT_NAMES
from holdfast.sim.faults import SITES
from holdfast.sim.mutants import planted
from holdfast.sim.runner import PAGE_SIZES, WORLD_STEPS, Options, places, simulate
from holdfast.sim.workloads import WORKLOADS
from holdfast.sim.world import Setup, World
from tests.sim import command

RUNS = (Options(255, 12_400, workloads=("mix",)), Options(379, 5_000))
"""One workload in every layout at every page size, and all workloads in some.

With these seeds few steps are enough for that; `make soak` runs ten million.
"""


def test_many_steps_find_nothing_and_strike_every_site() -> None:
    runs = [
        command.start(
            *("--seed", str(options.seed), "--steps", str(options.steps), "--layout", "all"),
            *("--workload", options.workloads[0] if len(options.workloads) == 1 else "all"),
            *("--faults", str(options.faults)),
        )
        for options in RUNS
    ]
    struck = dict.fromkeys(SITES, 0)
    for options, (status, summary) in zip(RUNS, [command.finish(run) for run in runs], strict=True):
        assert (status, summary["findings"], summary["quarantined"]) == (0, 0, 0), summary
        assert summary["steps"] == options.steps
        assert summary["turns"] > options.steps // 10
        assert summary["faults"] >= 20 * options.steps // 1000
        assert summary["faults"] == sum(summary["fault_sites"].values())
        for site, count in summary["fault_sites"].items():
            struck[site] += count
    assert [site for site, count in struck.items() if not count] == []


def test_those_steps_see_every_layout_at_every_page_size_and_every_workload() -> None:
    every, mixed = ([place.setup for place in places(options)] for options in RUNS)
    assert {(setup.layout, setup.page_size) for setup in every} == set(product(LAYOUT_NAMES, PAGE_SIZES))
    assert {setup.workload for setup in mixed} == set(WORKLOADS)


def test_steps_are_spread_over_worlds_of_bounded_length() -> None:
    worlds = list(places(Options(3, 12_345)))
    assert sum(place.steps for place in worlds) == 12_345
    assert all(0 < place.steps <= max(WORLD_STEPS) for place in worlds)
    assert [place.number for place in worlds] == list(range(len(worlds)))
    assert len({place.setup.seed for place in worlds}) == len(worlds)


def test_a_longer_run_begins_with_the_same_worlds() -> None:
    short, long = list(places(Options(3, 10_000))), list(places(Options(3, 40_000)))
    assert [place.setup for place in short] == [place.setup for place in long[: len(short)]]


def test_the_same_seed_gives_the_same_state_whatever_the_process() -> None:
    arguments = ("--seed", "5", "--steps", "600", "--faults", "0.08")
    first = command.run(*arguments, hash_seed="1")
    assert command.run(*arguments, hash_seed="2") == first
    assert first[0] == 0
    other = command.run("--seed", "6", "--steps", "600", "--faults", "0.08")
    assert other[1]["state_hash"] != first[1]["state_hash"]


def test_without_faults_nothing_is_struck_and_nothing_found() -> None:
    summary = simulate(Options(2, 2000, faults=0.0))
    assert (summary.faults, summary.finding) == (0, None)


def test_worlds_do_not_outlive_their_steps() -> None:
    alive: list[int] = []

    def worlds() -> int:
        gc.collect()
        return sum(isinstance(thing, World) for thing in gc.get_objects())

    gc.collect()
    gc.freeze()  # What other tests and libraries have left is not looked through again and again.
    try:
        options = Options(56, 1600, workloads=("mix", "voice"))
        simulate(options, progress=lambda _summary: alive.append(worlds()))
    finally:
        gc.unfreeze()
    assert len(alive) > 4
    assert max(alive) <= 1


def test_a_finding_is_found_again_in_its_own_world() -> None:
    options = Options(6, 30_000)
    with planted("double-close-frees-twice"):
        whole = simulate(options).finding
        assert whole is not None
        assert whole.place.number > 0
        alone = simulate(options, only=whole.place.number)
    assert alone.finding == whole
    assert alone.worlds == 1
    assert simulate(options, only=whole.place.number).finding is None


def test_a_crowd_is_audited_in_slices_and_still_finds_a_lost_slot() -> None:
    options = Options(7, 500, layouts=("hybrid",), workloads=("crowd",))
    world = World(Setup(1, "hybrid", 16, "crowd", 0.0))
    world.run(1)
    assert len(world.scheduler.registry.sessions) > 1500
    assert not world.scheduler.strict
    assert simulate(options).finding is None
    with planted("close-forgets-state-slot"):
        finding = simulate(options).finding
    assert finding is not None
    assert (finding.kind, finding.holder.split()[0]) == ("dropped hold", "SESSION")


@pytest.mark.soak
@pytest.mark.parametrize("part", range(10))
def test_ten_million_steps_find_nothing(part: int) -> None:
    arguments = ("--steps", "500000", "--layout", "all", "--faults", "0.05")
    runs = [command.start("--seed", str(1000 + 2 * part + one), *arguments) for one in range(2)]
    for status, summary in [command.finish(run) for run in runs]:
        assert (status, summary["steps"], summary["quarantined"]) == (0, 500_000, 0), summary
