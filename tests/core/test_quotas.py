"""What a tenant may hold, and who gives way to whom: quotas are kept, and nobody is starved by another."""

import pytest

from holdfast.core import errors
from holdfast.core.layout import Component, Tier
from holdfast.core.ledger import Kind, Ledger, OverQuota
from holdfast.core.node import Node
from holdfast.core.policy import Policy, Share
from holdfast.core.retention import Retention
from holdfast.core.session import Place
from holdfast.core.turn import TurnRequest
from tests.core.driver import LAYOUTS, Driver, prompt

FULL, STATE = Component.FULL, Component.STATE


def held(driver: Driver, tenant: str, component: Component = FULL, tier: Tier = Tier.DEVICE) -> int:
    """How many units are on a tenant's account."""
    return driver.ledger.account(tenant).held[driver.ledger.pool(component, tier).index]


def shares(**parts: Share) -> dict[str, Share]:
    return parts


# --- accounts -----------------------------------------------------------------------------------------


def test_everything_that_a_tenants_sessions_and_prefixes_hold_is_on_its_account() -> None:
    driver = Driver("hybrid", 4, pages=100, slots=40)
    for seed, (name, tenant) in enumerate((("a", "red"), ("b", "red"), ("c", "blue"))):
        driver.open(name, tenant)
        driver.turn(name, 30, 2, seed)
    driver.submit("a", prompt(9, 7), 20)
    driver.step()
    for component in (FULL, STATE):
        pool = driver.ledger.pool(component)
        assert held(driver, "red", component) + held(driver, "blue", component) == pool.size - len(pool.free)
    assert held(driver, "blue") == 8
    driver.run()
    for name in ("a", "b", "c"):
        driver.close(name)
    driver.scheduler.flush()
    assert driver.ledger.account("red").held == driver.ledger.account("blue").held == [0, 0]


def test_units_change_accounts_with_their_holder() -> None:
    driver = Driver("dense", 4)
    ledger, pool = driver.ledger, driver.ledger.pool(FULL)
    red, blue = (ledger.holder(Kind.TURN, name, name) for name in ("red", "blue"))
    first, second = ledger.take(pool, 5, red), ledger.take(pool, 1, blue)
    first.pass_front(2, second)
    assert (held(driver, "red"), held(driver, "blue")) == (3, 3)
    first = first.move_to(blue)
    assert (held(driver, "red"), held(driver, "blue")) == (0, 6)
    first.release()
    second.release()
    assert held(driver, "blue") == 0


def test_an_account_that_drifted_is_found_and_set_right() -> None:
    driver = Driver("dense", 4)
    driver.open("a")
    driver.turn("a", 10, 2)
    driver.ledger.account("red").held[0] += 3
    (finding,) = driver.scheduler.audit.census()
    assert (finding.kind, finding.holder, finding.healed) == ("counter", "tenant red", "recounted")
    assert finding.detail == "[6] units on the account, [3] held"
    assert held(driver, "red") == 3
    assert driver.scheduler.audit.census() == []


def test_the_part_of_a_tier_becomes_units_of_each_pool() -> None:
    policy = Policy(share=Share(host=0.5), shares={"red": Share(device=0.25, disk=0.1)})
    driver = Driver("hybrid", 4, pages=100, slots=10, host=50, disk=30)
    limits = {
        tenant: [policy.limit(tenant, pool) for pool in driver.ledger.pools.values()]
        for tenant in ("red", "blue")
    }
    assert list(driver.ledger.pools) == [
        (component, tier) for component in (FULL, STATE) for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK)
    ]
    assert limits == {"red": [25, 50, 3, 2, 50, 3], "blue": [100, 25, 30, 10, 25, 30]}


def test_more_than_the_quota_is_refused_and_changes_nothing() -> None:
    driver = Driver("dense", 4, pages=20, share=Share(device=0.5))
    ledger: Ledger = driver.ledger
    pool = ledger.pool(FULL)
    holder = ledger.holder(Kind.TURN, "greedy", "red")
    hold = ledger.take(pool, 8, holder)
    for take in (lambda: hold.grow(3), lambda: ledger.take(pool, 3, holder)):
        with pytest.raises(OverQuota) as caught:
            take()
        assert (caught.value.asked, caught.value.free, caught.value.account.name) == (3, 2, "red")
        assert (len(pool.free), len(hold), held(driver, "red")) == (12, 8, 8)
    hold.grow(2)
    others = ledger.take(pool, 10, ledger.holder(Kind.TURN, "other", "blue"))
    hold.release()
    others.release()


# --- turns under a quota ------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_turn_larger_than_the_quota_is_refused_with_the_figures(layout: str) -> None:
    driver = Driver(layout, 3, pages=60, slots=10, share=Share(device=0.1))
    driver.open("a")
    with driver.unchanged(errors.OverQuota):
        driver.submit("a", prompt(30), 3)
    with pytest.raises(errors.OverQuota) as caught:
        driver.request(prompt(30), 3)
    refused = caught.value
    assert refused.needed > refused.limit
    figures = f"{refused.needed} units of {refused.component} memory; its tenant may hold {refused.limit}"
    assert str(refused) == f"the turn needs {figures}"


def test_a_tenant_at_its_quota_takes_from_itself_alone() -> None:
    driver = Driver("dense", 4, pages=100, share=Share(device=0.3))
    for seed, (name, tenant) in enumerate((("old", "red"), ("theirs", "blue"), ("new", "red"))):
        driver.open(name, tenant)
        driver.turn(name, 60, 4, seed)
    assert held(driver, "blue") == 16, "nothing of the other tenant's gave way"
    assert driver.session("old").sequence.computed == 0, "the tenant's own longest idle session did"
    assert driver.session("new").sequence.computed == 64
    assert held(driver, "red") <= 30
    assert len(driver.ledger.pool(FULL).free) >= 54, "although there was room in the pool"
    assert driver.turn("old", 3, 2, 9).computed == 68, "it recomputes, and that within the quota"
    assert held(driver, "red") <= 30


@pytest.mark.no_cover
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("overlap", [False, True])
def test_turns_that_outgrow_their_quota_together_all_end(layout: str, overlap: bool) -> None:
    driver = Driver(layout, 4, pages=200, slots=24, overlap=overlap, budget=16, share=Share(device=0.25))
    turns = []
    for seed in range(6):
        driver.open(f"s{seed}")
        turns.append(driver.submit(f"s{seed}", prompt(20 + seed, seed), 60))
    driver.open("other", "blue")
    turns.append(driver.submit("other", prompt(20, 9), 100))
    driver.run()
    assert all(turn.state.value == "finished" for turn in turns)
    for name in [f"s{seed}" for seed in range(6)]:
        seed = int(name[1])
        assert driver.tokens(name)[20 + seed :] == driver.says(list(prompt(20 + seed, seed)), 60)
    assert turns[-1].retracts == 0, "nobody else paid for it"


@pytest.mark.no_cover
def test_who_waits_for_its_quota_does_not_keep_others_waiting() -> None:
    driver = Driver("dense", 4, pages=200, looked_at_max=4, share=Share(device=0.25))
    for seed in range(12):
        driver.open(f"s{seed}")
        driver.submit(f"s{seed}", prompt(100, seed), 60)
    driver.open("late", "blue")
    late = driver.submit("late", prompt(100, 40), 60)
    driver.step()
    assert late.state.value == "running", "eleven turns of the other tenant wait before it"
    assert len(driver.registry.queue) >= 10
    driver.run()
    assert driver.ledger.account("red").held[0] <= 50


def test_what_is_away_and_larger_than_its_quota_is_dropped_to_its_tokens() -> None:
    """The quota of a session's tenant was lowered while its memory lay in a file."""
    driver = Driver("dense", 4, pages=40, disk=100, shares=shares(red=Share(device=0.4)))
    history = [(TurnRequest("t0", prompt(60), 12), list(prompt(12, 1)))]
    driver.scheduler.recover("a", "red", driver.now, Retention(100.0), history)
    assert driver.scheduler.adopt("a", 71)
    driver.open("b", "blue")
    busy = driver.submit("b", prompt(9, 4), 60)
    driver.step()
    assert not driver.scheduler.restore("a", driver.now)
    assert (driver.session("a").place, driver.session("a").sequence.computed) == (Place.HOME, 0)
    assert busy.state.value == "running", "another tenant's turn is no reason to wait"
    with driver.unchanged(errors.OverQuota):
        driver.submit("a", prompt(3, 3), 2)
    driver.scheduler.rewind("a", 0, driver.now)
    turn = driver.submit("a", prompt(20, 3), 2)
    driver.run()
    assert turn.state.value == busy.state.value == "finished"


def test_a_restore_waits_for_its_tenants_running_turn() -> None:
    driver = Driver("dense", 4, pages=60, host=60, share=Share(device=0.6))
    for seed, name in enumerate("ab"):
        driver.open(name)
        for turn in range(2):
            driver.turn(name, 30, 10, 10 * seed + turn)
    driver.scheduler.spill("a", driver.now)
    driver.run()
    assert driver.session("a").place is Place.AWAY
    busy = driver.submit("b", prompt(3, 7), 25)
    driver.step()
    waiting = driver.submit("a", prompt(3, 8), 2)
    driver.step()
    assert (driver.session("a").place, waiting.state.value) == (Place.AWAY, "queued")
    driver.run()
    assert busy.state.value == waiting.state.value == "finished"
    assert waiting.cached == 80, "nothing was dropped"


# --- fair shares --------------------------------------------------------------------------------------


def test_the_tenant_that_holds_most_gives_way_first() -> None:
    driver = Driver("dense", 4, pages=60)
    for seed, (name, tenant) in enumerate((("small", "blue"), ("one", "red"), ("two", "red"))):
        driver.open(name, tenant)
        driver.turn(name, 60, 4, seed)
    assert (held(driver, "blue"), held(driver, "red")) == (16, 32)
    driver.open("new", "green")
    driver.turn("new", 60, 4, 9)
    assert held(driver, "blue") == 16, "it has rested longest, but holds less"
    assert driver.session("small").sequence.computed == 64
    assert driver.session("one").sequence.computed == 0
    assert held(driver, "red") == 16


def test_cached_prefixes_of_a_small_tenant_outlive_idle_sessions_of_a_large_one() -> None:
    driver = Driver("dense", 4, pages=60)
    driver.request(prompt(30, 1), 2, "blue")
    driver.run()
    for seed in (2, 3):
        driver.open(f"s{seed}")
        driver.turn(f"s{seed}", 60, 4, seed)
    driver.open("new")
    driver.turn("new", 60, 4, 9)
    assert held(driver, "blue") == 8
    again = driver.request(prompt(30, 1), 2, "blue")
    driver.run()
    assert again.cached == 28


def own_pages(driver: Driver, *sessions: tuple[str, str]) -> None:
    """Open sessions of tenants, each with a second turn whose eight pages are its own."""
    for seed, (name, tenant) in enumerate(sessions):
        driver.open(name, tenant)
        driver.turn(name, 3, 1, 10 * seed)
        driver.turn(name, 26, 2, 10 * seed + 1)
        assert driver.session(name).holder.held[0] == 8


def spill_each(driver: Driver, *names: str) -> list[Tier | None]:
    """Spill sessions one after the other; answers where each lies in the end, None for the device."""
    for name in names:
        assert driver.scheduler.spill(name, driver.now)
        driver.run()
    parcels = [driver.session(name).parcel for name in names]
    return [None if parcel is None else parcel.tier for parcel in parcels]


def test_who_has_most_of_the_host_gives_way_there_too() -> None:
    driver = Driver("dense", 4, pages=100, host=20)
    own_pages(driver, ("old", "red"), ("young", "red"), ("other", "blue"))
    assert spill_each(driver, "old", "young", "other") == [None, Tier.HOST, Tier.HOST]
    assert driver.session("old").sequence.computed == 0
    assert driver.registry.counters.dropped == 1
    assert (held(driver, "red", tier=Tier.HOST), held(driver, "blue", tier=Tier.HOST)) == (8, 8)
    own_pages(driver, ("more", "blue"))
    assert not driver.scheduler.spill("more", driver.now), "it would have the most itself"
    assert driver.turn("other", 3, 2, 50).cached == 32


def test_a_quota_on_the_host_sends_a_session_further_down() -> None:
    driver = Driver("dense", 4, pages=100, host=40, disk=40, share=Share(host=0.25))
    own_pages(driver, ("first", "red"), ("second", "red"), ("other", "blue"))
    assert spill_each(driver, "first", "second", "other") == [Tier.HOST, Tier.DISK, Tier.HOST]


def test_a_quota_on_the_host_sinks_only_the_tenants_own() -> None:
    driver = Driver(
        "dense", 4, pages=100, host=40, disk=40, on_disk=lambda session: True, share=Share(host=0.25)
    )
    own_pages(driver, ("other", "blue"), ("first", "red"), ("second", "red"))
    assert spill_each(driver, "other", "first", "second") == [Tier.HOST, Tier.DISK, Tier.HOST]


def test_a_spill_takes_nothing_from_whom_it_makes_room_for() -> None:
    """A session comes back, another leaves for it; the tier that it comes from must not drop it meanwhile."""
    driver = Driver("dense", 4, pages=20, host=18)
    own_pages(driver, ("away", "red"))
    assert driver.scheduler.spill("away", driver.now)
    driver.run()
    own_pages(driver, ("second", "red"))
    assert driver.scheduler.spill("second", driver.now)
    driver.run()
    driver.scheduler.flush()
    own_pages(driver, ("here", "blue"), ("there", "blue"))
    turn = driver.turn("away", 3, 2, 90)
    assert turn.cached == 32, "it came back, and was not dropped"


def test_states_of_a_tenant_give_way_to_its_own_first() -> None:
    driver = Driver("hybrid", 4, leave_history=True)
    driver.registry.tree.state_budget = 2
    for seed, tenant in enumerate(("blue", "red", "red")):
        driver.open(f"s{seed}", tenant)
        driver.turn(f"s{seed}", 20, 4, seed)
        driver.close(f"s{seed}")
    roots = driver.registry.tree.roots
    states = {key: sum(node.state is not None for node in _nodes(roots[key])) for key in roots}
    assert states["blue"] >= 1


def _nodes(node: Node) -> list[Node]:
    return [node, *(below for child in node.children.values() for below in _nodes(child))]


def test_a_restore_waits_for_a_seal_in_the_same_step_with_or_without_a_quota() -> None:
    for pages, part in ((34, 1.0), (60, 0.57)):
        driver = Driver("dense", 4, pages=pages, host=60, share=Share(device=part))
        for seed, name in enumerate("ab"):
            driver.open(name)
            for turn in range(2):
                driver.turn(name, 30, 10, 10 * seed + turn)
        driver.scheduler.spill("a", driver.now)
        driver.run()
        driver.submit("b", prompt(3, 7), 24)
        driver.step()
        waiting = driver.submit("a", prompt(3, 8), 2)
        driver.run()
        assert waiting.cached == 80, "the last token of the other session's turn was just being computed"
