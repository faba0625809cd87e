"""The heap of deadlines: what comes up when, and that it is bounded by what lives."""

import random

import pytest

from holdfast.core.deadlines import DUE_MAX, SLACK, Deadlines
from tests.core.driver import Driver, prompt


def test_entries_come_up_in_the_order_of_time_and_of_their_keys() -> None:
    deadlines = Deadlines()
    for key, when in ((4, 2.0), (-7, 2.0), (1, 1.0), (9, 5.0), (3, 0.0)):
        deadlines.add(key, when, f"s{key}")
    assert list(deadlines.due(0.0)) == [(3, "s3")]
    assert list(deadlines.due(0.5)) == []
    assert list(deadlines.due(2.0)) == [(1, "s1"), (-7, "s-7"), (4, "s4")]
    assert deadlines.entries() == [(5.0, 9, "s9")] and len(deadlines) == 1


def test_what_is_dropped_never_comes_up_and_may_be_added_again() -> None:
    deadlines = Deadlines()
    for key in (1, 2, 3):
        deadlines.add(key, 1.0, "a")
    deadlines.drop(2)
    deadlines.drop(2)
    deadlines.drop(99)
    deadlines.add(2, 3.0, "b")
    assert list(deadlines.due(1.0)) == [(1, "a"), (3, "a")]
    assert list(deadlines.due(3.0)) == [(2, "b")] and not len(deadlines)


def test_the_order_stays_when_what_was_dropped_is_cleared_away() -> None:
    deadlines = Deadlines()
    for key in range(100):
        deadlines.add(key, 100.0 - key, "a")
    for key in range(100):
        if key % 10:
            deadlines.drop(key)
    assert len(deadlines) < 50, "it was cleared"
    assert [key for key, _ in deadlines.due(100.0)] == list(range(90, -1, -10))


def test_what_is_dropped_or_added_while_entries_are_taken_out_is_seen() -> None:
    deadlines = Deadlines()
    for key in (1, 2, 3):
        deadlines.add(key, float(key), "a")
    seen = []
    for key, _ in deadlines.due(9.0):
        seen.append(key)
        if key == 1:
            deadlines.drop(2)
            deadlines.add(5, 2.5, "a")
    assert seen == [1, 5, 3]


def test_few_entries_are_taken_out_at_one_time_however_many_are_due() -> None:
    deadlines = Deadlines()
    for key in range(3 * DUE_MAX):
        deadlines.add(key, 1.0, "a")
    deadlines.drop(DUE_MAX)  # It is looked at like the others.
    assert not deadlines.is_due(0.9) and deadlines.is_due(1.0)
    assert [key for key, _ in deadlines.due(2.0)] == list(range(DUE_MAX))
    assert list(deadlines.due(2.0)) == list(deadlines.due(1.5)) == [], "no more at that time, or before it"
    assert deadlines.is_due(2.0)
    assert [key for key, _ in deadlines.due(2.1)] == list(range(DUE_MAX + 1, 2 * DUE_MAX))
    half = [key for _, (key, _) in zip(range(DUE_MAX // 2), deadlines.due(2.2), strict=False)]
    rest = [key for key, _ in deadlines.due(2.2)]
    assert half + rest == list(range(2 * DUE_MAX, 3 * DUE_MAX)), "what is left of one time is taken later"
    assert not deadlines.is_due(1e9) and not len(deadlines)


def test_thousands_of_sessions_that_expire_together_are_closed_a_few_at_a_time() -> None:
    driver = Driver("dense", 16, strict=False)
    registry, scheduler = driver.registry, driver.scheduler
    for number in range(2 * DUE_MAX + 1):
        driver.open(f"s{number}", ttl=5.0)
    driver.open("kept", ttl=50.0)
    scheduler.tick(4.0)
    assert not registry.overdue
    scheduler.tick(5.0)
    assert len(registry.sessions) == DUE_MAX + 2 and registry.overdue
    assert "s0" not in registry.sessions
    last = f"s{2 * DUE_MAX}"
    scheduler.spill(last, 5.0)
    assert len(registry.sessions) == DUE_MAX + 2, "what a verb finds at that time stays as it is"
    scheduler.plan(16, 5.1)
    assert set(registry.sessions) == {last, "kept"} and registry.overdue
    scheduler.tick(5.2)
    assert set(registry.sessions) == {"kept"} and not registry.overdue


@pytest.mark.asserts
def test_a_key_has_one_entry() -> None:
    deadlines = Deadlines()
    deadlines.add(1, 1.0, "a")
    with pytest.raises(AssertionError, match="one entry each"):
        deadlines.add(1, 2.0, "a")


def test_stale_entries_never_outnumber_live_ones_by_more_than_a_few() -> None:
    rng, deadlines, live = random.Random(5), Deadlines(), set()
    for key in range(5000):
        deadlines.add(key, rng.random() * 1e6, "a")
        live.add(key)
        while live and rng.random() < 0.5:
            gone = rng.choice(sorted(live))
            live.remove(gone)
            deadlines.drop(gone)
        assert len(deadlines) <= 2 * len(live) + SLACK + 1
    assert {key for _, key, _ in deadlines.entries()} == live


@pytest.mark.no_cover
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("admitted", [False, True])
def test_turns_and_sessions_that_are_gone_leave_no_deadline(named: bool, admitted: bool) -> None:
    """A deadline of a day and a time to live of 30 days end with the turn and the session."""
    driver = Driver("dense", 16, strict=False)
    registry = driver.registry
    for number in range(500):
        name = f"s{number}"
        if named:
            driver.open(name, ttl=30 * 86400.0)
            driver.submit(name, prompt(3), 1, deadline=86400.0)
        else:
            driver.request(prompt(3), 1, turn_id=name, deadline=86400.0)
        assert len(registry.deadlines.entries()) == (2 if named else 1)
        if admitted:
            driver.run()
        if name in registry.sessions:
            driver.scheduler.close(name, driver.now)
        assert not registry.sessions and not registry.deadlines.entries()
        assert len(registry.deadlines) <= SLACK + 2


def test_sessions_that_were_in_no_plan_leave_nothing_for_the_next_one() -> None:
    """A server that is idle makes no plan: what waits for one must not grow with what comes and goes."""
    driver = Driver("dense", 16, strict=False)
    registry = driver.registry
    for number in range(200):
        driver.open(f"s{number}")
        driver.submit(f"s{number}", prompt(3), 1)
        driver.scheduler.close(f"s{number}", driver.now)
    assert not registry.in_flight.forgotten, "no executor has heard of them"
    assert not registry.queue and not registry.queues.waiting.by_priority(())
    assert not driver.scheduler.planner.prompts.matches
    driver.open("a")
    driver.turn("a", 3, 1)
    driver.scheduler.close("a", driver.now)
    assert len(registry.in_flight.forgotten) == 1
