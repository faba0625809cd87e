"""Turns that wait: their order, against a sort of all of them, and what a plan costs beside many of them."""

import random
import sys
from types import SimpleNamespace

import pytest

from holdfast.core.policy import Policy, Share, queue_order
from holdfast.core.turn import Turn
from holdfast.core.waiting import Waiting
from tests.core.driver import Driver, prompt

FEW, MANY = 40, 10_000
POLICY = Policy(age_seconds=2.0, looked_at_max=8)


def sorted_order(turns: list[SimpleNamespace], now: float, passed: set[str]) -> list[int]:
    """The order of the queue by its definition: sort everything."""

    def urgency(turn: SimpleNamespace) -> int:
        return turn.request.priority + int((now - turn.arrived) / POLICY.age_seconds)

    mine = [turn for turn in turns if turn.tenant not in passed]
    oldest = sorted(mine, key=lambda turn: (-urgency(turn), turn.number))[: POLICY.looked_at_max]
    oldest.sort(key=lambda turn: (-urgency(turn), -turn.cached, turn.number))
    return [turn.number for turn in oldest]


@pytest.mark.no_cover
@pytest.mark.parametrize("seed", range(30))
def test_the_order_is_that_of_a_sort_whoever_comes_and_goes(seed: int) -> None:
    rng, waiting, now = random.Random(seed), Waiting(), 0.0
    here: list[SimpleNamespace] = []
    away: list[SimpleNamespace] = []
    tenants = ["red", "blue", "green"][: rng.randint(1, 3)]
    for number in range(120):
        now += rng.choice((0.0, 0.0, 0.3, 1.1))
        request = SimpleNamespace(priority=rng.choice((0, 0, 1, 4)))
        turn = SimpleNamespace(number=number, request=request, arrived=now, cached=rng.randrange(3))
        turn.tenant = rng.choice(tenants)
        here.append(turn)
        waiting.add(turn, turn.tenant)
        for _ in range(rng.randrange(3)):
            if here and rng.random() < 0.6:
                gone = here.pop(rng.randrange(len(here)))
                waiting.remove(gone, gone.tenant)
                away.append(gone)
            elif away:
                back = away.pop(rng.randrange(len(away)))
                waiting.add(back, back.tenant)
                here.append(back)
        passed = {tenant for tenant in tenants if rng.random() < 0.3}
        chosen = queue_order(waiting, now, POLICY, lambda turn: turn.cached, passed)
        assert [turn.number for turn in chosen] == sorted_order(here, now, passed)
    for turn in here:
        waiting.remove(turn, turn.tenant)
    assert waiting.by_priority(()) == []


class LookedAt:
    """Notes the turns whose arrival is read: the order of the queue does that of all that it compares."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.turns: set[int] = set()
        slot = Turn.arrived

        def read(turn: Turn) -> float:
            self.turns.add(turn.number)
            return slot.__get__(turn)

        monkeypatch.setattr(Turn, "arrived", property(read, slot.__set__))


def calls_of_a_plan(driver: Driver) -> int:
    """How many functions one plan calls, of Python or C."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    plan = driver.scheduler.plan(driver.budget, driver.now)
    sys.setprofile(None)
    driver.device.announce(plan)
    return calls


def crowd(waiting: int, **policy: object) -> Driver:
    """A server with one running turn, and many more that wait behind it."""
    driver = Driver("dense", 16, pages=40, strict=False, queue_max=MANY * 2, **policy)
    driver.request(prompt(20), 200)
    for _ in range(3):
        driver.step()
    for number in range(waiting):
        driver.request(prompt(40, number), 10)
    return driver


@pytest.mark.no_cover
def test_who_waits_is_not_looked_at_while_no_more_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = []
    for waiting in (10, MANY):
        driver = crowd(waiting, running_max=1)
        looked_at = LookedAt(monkeypatch)
        costs.append(calls_of_a_plan(driver))
        assert looked_at.turns == set() and len(driver.registry.queue) == waiting
        monkeypatch.undo()
    assert costs[0] == costs[1] > 0


@pytest.mark.no_cover
def test_as_many_are_looked_at_as_can_matter_however_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four more may run: a plan admits them, and compares no more turns than it may."""
    costs = []
    for waiting in (FEW, MANY):
        driver = crowd(waiting, running_max=5)
        looked_at = LookedAt(monkeypatch)
        costs.append(calls_of_a_plan(driver))
        assert len(driver.registry.running) == 5 and len(driver.registry.queue) == waiting - 4
        assert len(looked_at.turns) <= driver.registry.policy.looked_at_max + 1
        monkeypatch.undo()
    assert costs[0] == costs[1] > 0


@pytest.mark.no_cover
def test_a_tenant_at_its_quota_is_passed_over_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its turns, however many wait in front, are not looked at one by one to find another tenant's."""
    costs = []
    for waiting in (FEW, MANY):
        driver = crowd(waiting, shares={"red": Share(device=0.5)}, running_max=64)
        for _ in range(3):
            driver.step()
        assert len(driver.registry.queue) >= waiting - 20, "red is full"
        driver.request(prompt(40, 7), 10, tenant="blue")
        looked_at = LookedAt(monkeypatch)
        costs.append(calls_of_a_plan(driver))
        assert [session.tenant for session in driver.registry.running][-1] == "blue"
        assert len(looked_at.turns) <= 2 * driver.registry.policy.looked_at_max
        monkeypatch.undo()
    assert costs[0] == costs[1] > 0
