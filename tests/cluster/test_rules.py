"""Placement, and what an owner concludes from answers, with literal expected values."""

from dataclasses import dataclass

from holdfast.cluster.lives import LEASE_SECONDS, LifeState, is_lapsed
from holdfast.cluster.owner import Owner
from holdfast.cluster.ownership import Claimed, Offer, Ownership, Standing
from holdfast.cluster.placement import Load, Move, choose, least_loaded, plan_drain, rebalance


def test_a_first_turn_goes_to_the_emptiest_replica() -> None:
    loads = [Load(1, 50, 100), Load(2, 20, 100), Load(3, 60, 200)]
    assert choose(loads, ()) == 3, "140 units are free"
    assert least_loaded([Load(1, 5, 10, 3), Load(2, 5, 10, 1), Load(3, 5, 10, 1)]).life == 2


def test_a_prefix_attracts_up_to_twice_the_least_load() -> None:
    assert choose([Load(1, 40, 100), Load(2, 20, 100), Load(3, 39, 100)], {1}) == 1
    assert choose([Load(1, 41, 100), Load(2, 20, 100)], {1}) == 2, "twice as loaded, and more"
    assert choose([Load(1, 30, 100), Load(2, 20, 100), Load(3, 35, 100)], {1, 3}) == 1
    assert choose([Load(1, 100, 100), Load(2, 99, 100)], {1}) == 2, "it has no memory left"
    assert choose([Load(1, 1, 100), Load(2, 0, 100)], {1}) == 1, "an empty cluster"


def test_only_a_replica_under_pressure_hands_sessions_over() -> None:
    idle = [("old", 6), ("older", 6), ("new", 6)]
    others = [Load(2, 70, 100), Load(3, 60, 100), Load(4, 80, 100)]
    assert rebalance(Load(1, 90, 100), idle, others) == []
    assert rebalance(Load(1, 97, 100), idle, others) == [Move("old", 3), Move("older", 3)]
    assert rebalance(Load(1, 100, 100), idle, others) == [Move("old", 3), Move("older", 3)], "no more room"
    assert rebalance(Load(1, 100, 100), idle, [Load(4, 80, 100)]) == []
    assert others[1].used == 60, "loads are not changed"


def test_a_drain_spreads_sessions_over_the_others() -> None:
    idle = [("a", 30), ("b", 30), ("c", 30), ("d", 30)]
    others = [Load(2, 0, 100), Load(3, 10, 100)]
    assert plan_drain(idle, others, 3) == [Move("a", 2), Move("b", 3), Move("c", 2)]
    assert plan_drain(idle, [], 3) == []


def test_a_life_lapses_by_its_lease_or_by_silence_without_a_connection() -> None:
    lease = 100.0 + LEASE_SECONDS
    assert [is_lapsed(lease, True, True, now) for now in (100.0, 109.9, 110.1)] == [False, False, True]
    for gone in ((False, True), (True, False)):
        assert [is_lapsed(lease, *gone, now) for now in (100.0, 100.9, 101.1)] == [False, False, True]
    assert is_lapsed(lease, False, False, 100.0), "two witnesses need no time"


@dataclass
class Known:
    epoch: int
    commits: int


def test_what_an_owner_concludes_from_answers() -> None:
    owner: Owner[Known] = Owner(7)
    assert owner.is_stored(Standing(LifeState.DRAINING, 3), 3)
    assert not owner.is_stored(Standing(LifeState.LIVE, 2), 3)
    assert not owner.is_stored(Standing(LifeState.DEAD, 3), 3), "what it stored last is not acknowledged"
    for name in ("a", "b", "c", "d"):
        owner.adopt(name, Known(1, 5))
    assert owner.settle(1, ["a", "b"], ["a"]) == {"b"}
    assert (owner.batch, set(owner.sessions), owner.take_refused()) == (1, {"a", "c", "d"}, {"b"})
    offers = owner.offer(["a", "b", "c", "d"], 8, {"d"})
    assert offers == [Offer("a", 1, 5, 8), Offer("c", 1, 5, 8)], "not what is unsettled or unknown"
    answer = {"a": Claimed(8, 2, 5), "c": Claimed(7, 1, 5)}
    assert owner.gave(offers, answer) == ["a"]
    assert set(owner.sessions) == {"c", "d"} and owner.take_refused() == frozenset(), "c was not taken"
    assert owner.gave([Offer("c", 1, 5, 8)], {"c": Claimed(9, 2, 5)}) == []
    assert owner.gave([Offer("d", 1, 5, 8)], {}) == []
    assert owner.sessions == {} and owner.take_refused() == {"c", "d"}
    claimed = {"x": Claimed(7, 4, 9), "y": Claimed(6, 4, 9)}
    assert owner.won(claimed) == ["x"]
    owner.adopt("x", Known(4, 9))
    owner.end()
    assert owner.take_refused() == {"x"} and owner.won(claimed) == []


def test_a_death_frees_all_sessions_and_is_final() -> None:
    rules = Ownership()
    life = rules.begin("a", 0.0)
    assert life is not None
    assert not rules.bury(life, True, True, LEASE_SECONDS)
    assert rules.bury(life, True, True, LEASE_SECONDS + 1)
    changes = (rules.renew(life, 99.0), rules.drain(life), rules.end(life))
    assert changes == (False, False, False) and rules.lives[life].state is LifeState.DEAD
    assert rules.begin("a", 99.0) == life + 1
