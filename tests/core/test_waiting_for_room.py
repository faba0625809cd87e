"""Room that is made for somebody is for it: others neither take it nor call back what leaves for it."""

import pytest

from holdfast.core.admission import Admission
from holdfast.core.layout import Component, Tier
from holdfast.core.ledger import OutOfUnits
from holdfast.core.policy import Share
from holdfast.core.session import Place
from holdfast.core.turn import Turn
from tests.core.driver import LAYOUTS, Driver, prompt

PAGE = 16
PATIENCE = 120
PAGED = [name for name in LAYOUTS if Component.FULL in Driver(name).layout.components]


def until_over(driver: Driver, *turns: Turn) -> int:
    """How many steps it takes until these turns are over."""
    for step in range(PATIENCE):
        if all(turn.over for turn in turns):
            return step
        driver.step()
    raise AssertionError(f"turns wait after {PATIENCE} steps")


@pytest.mark.no_cover
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("layout", PAGED)
def test_a_session_that_leaves_for_a_running_turn_is_not_called_back_by_its_own(
    layout: str, overlap: bool
) -> None:
    driver = Driver(layout, PAGE, pages=6, host=40, overlap=overlap)
    driver.open("a")
    driver.open("b")
    driver.turn("a", 37, 3)
    first = driver.submit("b", prompt(40, 1), PAGE + 4)
    while driver.session("b").sequence.planned < 3 * PAGE - 1:
        driver.step()
    second = driver.submit("a", prompt(20, 2), 2)
    until_over(driver, first, second)
    driver.run()
    assert second.cached == 40
    assert driver.registry.counters.dropped == 0


@pytest.mark.no_cover
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("layout", PAGED)
def test_a_turn_that_was_taken_back_for_the_oldest_does_not_come_before_it(
    layout: str, overlap: bool
) -> None:
    driver = Driver(layout, PAGE, pages=6, host=40, overlap=overlap, chunk_tokens=5)
    driver.open("a")
    driver.open("b")
    driver.turn("a", 37, 3)
    first = driver.submit("b", prompt(71, 1), 3)
    while driver.session("b").sequence.planned <= 2 * PAGE:
        driver.step()
    second = driver.submit("a", prompt(7, 2), 20)
    until_over(driver, first, second)
    assert driver.registry.counters.retracts <= 2


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("layout", PAGED)
def test_at_a_quota_it_is_so_among_the_turns_of_one_tenant(layout: str, overlap: bool) -> None:
    driver = Driver(layout, PAGE, pages=24, host=40, overlap=overlap, shares={"blue": Share(0.25)})
    for name, tenant in (("x", "blue"), ("q", "blue"), ("other", "red")):
        driver.open(name, tenant)
    driver.turn("q", 37, 3)
    first = driver.submit("x", prompt(40, 1), 20)
    while driver.session("x").sequence.planned < 3 * PAGE - 1:
        driver.step()
    second = driver.submit("q", prompt(20, 2), 2)
    talk = driver.submit("other", prompt(9, 4), 8)
    until_over(driver, first, second, talk)
    assert second.cached == 40


def test_what_leaves_for_a_session_that_comes_back_is_not_called_back_by_a_later_turn() -> None:
    driver = Driver("dense", PAGE, pages=6, host=40)
    for seed, name in enumerate("abc"):
        driver.open(name)
        driver.turn(name, 37, 3, seed)
        if name == "a":
            assert driver.scheduler.spill("a", driver.now)
            driver.run()
    first, second, third = (driver.submit(name, prompt(5, 7), 2) for name in "abc")
    driver.step()
    assert driver.session("b").place is Place.HOME, "its turn comes before that of c"
    assert driver.session("c").place is not Place.HOME
    while not first.over:
        assert third.admitted is None
        driver.step()
    driver.run()
    assert (first.cached, second.cached, third.cached) == (40, 40, 40)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("layout", ["window-only", "window+state"])
def test_a_turn_whose_chunks_are_larger_than_all_windows_goes_in_by_smaller_ones(
    layout: str, overlap: bool
) -> None:
    driver = Driver(layout, PAGE, pages=5, overlap=overlap)
    driver.open("a")
    driver.open("b")
    first, second = driver.submit("a", prompt(200, 1), 3), driver.submit("b", prompt(9, 2), 3)
    until_over(driver, first, second)
    third = driver.submit("a", prompt(150, 3), 3)
    until_over(driver, third)
    assert third.cached == 203, "a smaller chunk is cheaper than to compute everything again"


@pytest.mark.parametrize("layout", ["window-only", "window+state"])
def test_so_it_does_where_windows_are_larger_than_its_tenant_may_have(layout: str) -> None:
    driver = Driver(layout, PAGE, pages=20, shares={"blue": Share(0.25)})
    for name, tenant in (("x", "blue"), ("y", "blue"), ("other", "red")):
        driver.open(name, tenant)
    long, short = driver.submit("x", prompt(200, 1), 3), driver.submit("y", prompt(9, 2), 3)
    talk = driver.submit("other", prompt(200, 4), 60)
    until_over(driver, long, short)
    until_over(driver, talk)


@pytest.mark.no_cover
@pytest.mark.parametrize("quota", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("layout", PAGED)
def test_a_session_that_is_away_comes_back_though_others_keep_coming(
    layout: str, overlap: bool, quota: bool
) -> None:
    shares = {"red": Share(0.5)} if quota else {}
    driver = Driver(layout, PAGE, pages=24 if quota else 12, host=40, overlap=overlap, shares=shares)
    driver.open("a")
    driver.open("other", "blue")
    driver.turn("a", 120, 5)
    assert driver.scheduler.spill("a", driver.now)
    driver.run()
    small = [driver.request(prompt(20, seed), 11) for seed in range(1, 4)]
    driver.step()
    turn = driver.submit("a", prompt(5, 50), 3)
    driver.step()
    talk = driver.submit("other", prompt(9, 51), 3)
    for seed in range(60, 60 + PATIENCE):
        if turn.over:
            break
        small = [each for each in small if not each.over]
        small.append(driver.request(prompt(20, seed), 9 + seed % 7))
        driver.step()
    assert turn.over and turn.cached == 125
    assert talk.over
    driver.run()


@pytest.mark.parametrize("layout", ["window-only", "window+state"])
def test_a_turn_that_a_smaller_chunk_does_not_help_gives_up_its_memory(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies that it begins with may need more units than there are, however short its first row is."""
    driver = Driver(layout, PAGE, pages=8)
    driver.open("a")
    driver.turn("a", 40, 3)
    take, refused = Admission.take, 0

    def refuse(admission: Admission) -> None:
        nonlocal refused
        if driver.session("a").sequence.computed:
            refused += 1
            assert refused < 9, "it is tried for ever"
            pool = driver.registry.ledger.pools[Component.WINDOW, Tier.DEVICE]
            free = pool.available(driver.session("a").holder.account)
            assert free
            raise OutOfUnits(pool, free + 1, free)
        take(admission)

    monkeypatch.setattr(Admission, "take", refuse)
    turn = driver.submit("a", prompt(150, 1), 3)
    until_over(driver, turn)
    assert refused and turn.cached == 32, "the tree has the first prompt: it is not evicted in vain"
    assert driver.registry.counters.dropped == 1
