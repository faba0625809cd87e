"""Reports of the memory: they add up, in portions too, and tell a tenant nothing exact of the others."""

import itertools
from collections import Counter

import pytest

from holdfast.core.holders import Kind
from holdfast.core.layout import Component
from holdfast.engine.echo import open_echo
from holdfast.engine.loop import EngineLoop
from holdfast.engine.options import make_options
from holdfast.engine.portions import finish
from holdfast.engine.reports.coarse import COARSE_PARTS, coarse
from holdfast.engine.reports.memory_map import MemoryPicture
from holdfast.engine.reports.report import TOP_HOLDERS, memory_report, memory_reports
from holdfast.engine.sampling import Sampling
from tests.engine.direct import direct, submit

numbers = itertools.count()


def made(size: int = 1 << 14) -> EngineLoop:
    return open_echo("echo-hybrid", make_options(kv_tokens=size, host_memory=1 << 20, overlap=False))


def talk(loop: EngineLoop, name: str, tokens: int) -> None:
    """A session of a tenant, with as many tokens of its own as nobody else has."""
    tenant = name.partition("/")[0]
    direct(loop, "open", name, tenant)
    said = tuple((next(numbers) // 250**place) % 250 for place in range(2)) + (1,) * (tokens - 2)
    submit(loop, name, "t", said, Sampling(max_tokens=1, ignore_eos=True))
    while loop.busy:
        loop.step()


def pools(report: dict[str, object]) -> list[dict[str, int]]:
    shown = report["pools"]
    assert isinstance(shown, list)
    return [pool["holders"] for pool in shown]


def test_what_the_holders_have_adds_up_to_the_ledger() -> None:
    loop = made()
    for number in range(30):
        talk(loop, f"{'ab'[number % 2]}/{number}", 30 + number)
    direct(loop, "spill", "a/0")
    direct(loop, "spill", "b/1")
    loop.step()
    direct(loop, "restore", "b/1")
    ledger = loop.scheduler.registry.ledger
    counted = {pool.index: Counter[str]() for pool in ledger.pools.values()}
    reports = finish(memory_reports(loop, {"a", "b", "nobody"}))
    for tenant in ("a", "b"):
        for pool, holders in zip(ledger.pools.values(), pools(reports[tenant]), strict=True):
            counted[pool.index].update({kind: units for kind, units in holders.items() if kind != "OTHERS"})
            assert sum(holders.values()) == pool.size
            own = sum(units for kind, units in holders.items() if kind not in ("FREE", "OTHERS"))
            assert own == ledger.accounts[tenant].held[pool.index]
    for pool in ledger.pools.values():
        exact = pool.counts()
        for kind in ("TREE", "TURN", "SESSION", "CHECKPOINT", "TRANSIT"):
            assert counted[pool.index][kind] == exact[kind], (pool.name, kind)
    assert pools(memory_report(loop)) == [pool.counts() for pool in ledger.pools.values()]


def test_a_tenant_that_holds_nothing_learns_sixteenths_at_most() -> None:
    loop = made()
    index = next(iter(loop.scheduler.registry.ledger.pools.values())).index
    seen: dict[int, int] = {}
    for number in range(60):
        talk(loop, f"ann/{number}", 100)
        report = finish(memory_reports(loop, {"carl"}))["carl"]
        held = loop.scheduler.registry.ledger.accounts["ann"].held[index]
        seen[held] = pools(report)[index]["OTHERS"]
        assert report["top"] == [] and report["tenants"] == []
    size = loop.scheduler.registry.ledger.pool(Component.FULL).size
    assert all(
        shown == held // (size // COARSE_PARTS) * (size // COARSE_PARTS) for held, shown in seen.items()
    )
    assert len(seen) > 2 * len(set(seen.values())), "many totals look the same"


def test_what_a_tenant_takes_itself_does_not_move_what_it_sees_of_others() -> None:
    loop = made()
    talk(loop, "ann/s", 2000)
    index = next(iter(loop.scheduler.registry.ledger.pools.values())).index
    seen = set()
    for number in range(80):
        talk(loop, f"carl/{number}", 40)
        seen.add(pools(finish(memory_reports(loop, {"carl"}))["carl"])[index]["OTHERS"])
        direct(
            loop, "close", f"carl/{number}"
        )  # What it gives up retires, and is nobody's until a step settles.
        seen.add(pools(finish(memory_reports(loop, {"carl"}))["carl"])[index]["OTHERS"])
    assert len(seen) == 1


def test_what_retires_is_nobody_s() -> None:
    """Units that a step still names count for no tenant: as others' they would move what is seen of those."""
    loop = made()
    talk(loop, "ann/s", 2016)
    talk(loop, "carl/s", 40)
    submit(loop, "carl/s", "second", (5,) * 40, Sampling(max_tokens=1, ignore_eos=True))
    while loop.busy:
        loop.step()
    registry = loop.scheduler.registry
    ledger = registry.ledger
    pool = ledger.pool(Component.FULL)
    part = pool.size // COARSE_PARTS
    assert ledger.accounts["ann"].held[pool.index] % part == part - 1, "one more would be seen"
    before = pools(finish(memory_reports(loop, {"carl"}))["carl"])[pool.index]["OTHERS"]
    registry.sessions["carl/s"].sequence.fence = ledger.step + 1
    registry.drop_memory(registry.sessions["carl/s"])
    assert pool.by_kind[Kind.RETIRING]
    assert pools(finish(memory_reports(loop, {"carl"}))["carl"])[pool.index]["OTHERS"] == before


def test_a_tenant_s_largest_holders_are_its_own_however_small() -> None:
    loop = made()
    for number in range(TOP_HOLDERS + 2):
        talk(loop, f"ann/{number}", 200)
    talk(loop, "carl/small", 20)
    report = finish(memory_reports(loop, {"carl", None}))
    assert any(entry["holder"] == "session carl/small" for entry in report["carl"]["top"])  # type: ignore[attr-defined]
    assert len(report[None]["top"]) == TOP_HOLDERS  # type: ignore[arg-type]


@pytest.mark.parametrize(("units", "shown"), [(0, 0), (15, 0), (16, 16), (31, 16), (256, 256)])
def test_totals_are_rounded_down_to_sixteenths(units: int, shown: int) -> None:
    assert coarse(units, 256) == shown
    assert coarse(units, 10) == units, "a pool of few units has no sixteenths"


def test_a_picture_in_portions_is_the_one_taken_at_once() -> None:
    loop = made(1 << 16)
    for number in range(200):
        talk(loop, f"ann/{number}", 20)
    picture = MemoryPicture(loop)
    walk, portions = picture.take(), 0
    try:
        while True:
            next(walk)
            portions += 1
    except StopIteration as end:
        whole = end.value
    assert portions > 1
    assert whole == finish(MemoryPicture(loop).take())
    assert finish(picture.take()) is whole, "nothing happened since"
    direct(loop, "close", "ann/7")
    numbers_before = {name: number for number, _, name, _ in whole["holders"]}
    after = {name: number for number, _, name, _ in finish(picture.take())["holders"]}
    assert "ann/7" not in after and all(numbers_before[name] == number for name, number in after.items())
