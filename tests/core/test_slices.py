"""The sliced census: each slice looks at what it pays for, a round at everything, once."""

import pytest

from holdfast.core.audit import Audit
from holdfast.core.layout import Component, named_layout
from holdfast.core.ledger import Grant, Hold, Kind
from holdfast.core.slices import HOLD_COST, NODE_COST, OWNER_COST, Round
from tests.core.world import World


def world_of(chats: int) -> World:
    """Chats that have left some of their history in the tree, and are at rest."""
    world = World(named_layout("full+window+state", 4, 7), pages=400, slots=200)
    for token in range(chats):
        chat = world.open()
        world.turn(chat, [token + 1] * 9, [3])
        world.turn(world.fork(chat, chat.ends[-1]), [token + 1] * 5, [4])
    last = world.open()
    world.turn(last, [9] * 9, [3])
    world.close(last, leave=True)
    world.settle()
    assert any(node.tails for node in world.tree.forest.nodes())
    return world


def opened(world: World) -> Round:
    return Round(world.ledger, [chat.sequence for chat in world.chats], world.tree, world.audit._sightings)


def test_a_slice_of_the_smallest_budget_looks_at_one_thing() -> None:
    world = world_of(3)
    nodes = len(list(world.tree.forest.nodes()))
    holds = sum(max(1, len(grant.units)) for grant in world.ledger.live.values())
    free = sum(max(1, len(pool.free)) for pool in world.ledger.pools.values())
    round_, slices = opened(world), 0
    while not round_.done:
        assert not round_.work(1)
        slices += 1
    assert slices == nodes + len(world.chats) + holds + free


def test_a_slice_looks_at_no_more_than_it_pays_for() -> None:
    world = world_of(3)
    round_ = opened(world)
    nodes = list(world.tree.forest.nodes())
    tails, children = sum(len(node.tails) for node in nodes), sum(len(node.children) for node in nodes)
    cost = NODE_COST * (len(nodes) + tails) + children + OWNER_COST * len(world.chats)
    cost += sum(HOLD_COST + len(grant.units) for grant in world.ledger.live.values())
    cost += sum(HOLD_COST + len(pool.free) for pool in world.ledger.pools.values())
    last = HOLD_COST + len(next(iter(world.ledger.pools.values())).free)
    assert not round_.work(cost - last)
    assert not round_.done, "the free list of the first pool is the last thing that is looked at"
    assert not round_.work(last)
    assert round_.done


@pytest.mark.parametrize("budget", [1, 30, 500])
def test_leases_that_come_and_go_during_a_round_are_no_reason_for_a_whole_census(budget: int) -> None:
    world = world_of(3)
    audit = Audit(world.ledger, world.tree, lambda: [chat.sequence for chat in world.chats])
    world.plan()
    for number in range(60):
        assert audit.slice(budget) == []
        chat = world.chats[number % len(world.chats)]
        world.turn(chat, [7, 8], [9])
        if number % 5 == 0:
            world.close(world.fork(chat, chat.ends[-1]), leave=False)
        world.settle(lag=number % 2)
    assert audit.last_full_step == 0, "nothing was suspicious"


# --- suspicions ---


def test_a_node_with_wrong_locks_is_suspicious_at_once() -> None:
    world = world_of(2)
    nodes = list(world.tree.forest.nodes())
    nodes[-1].leases += 1
    round_ = opened(world)
    assert any(round_.work(1) for _ in nodes)


def test_an_owner_whose_books_do_not_add_up_is_suspicious_at_once() -> None:
    world = world_of(2)
    nodes = list(world.tree.forest.nodes())
    world.chats[0].sequence.pages += 1
    round_ = opened(world)
    assert not any(round_.work(1) for _ in nodes)
    assert any(round_.work(1) for _ in world.chats)


@pytest.mark.parametrize("fault", ["below the range", "free twice", "retiring and free"])
def test_a_unit_in_a_wrong_place_is_suspicious_though_the_counts_add_up(fault: str) -> None:
    world = world_of(1)
    pool = world.ledger.pool(Component.FULL)
    hold = world.ledger.take(pool, 2, world.ledger.holder(Kind.TRANSIT, "late"))
    hold.release(world.ledger.step + 5)
    if fault == "below the range":
        pool.free[2] = -1
    elif fault == "free twice":
        pool.free[3] = pool.free[2]
    else:
        (_, retiring), *_ = pool.retiring
        retiring[0] = pool.free[2]
    assert opened(world).work(1 << 20)


class Keeper:
    """An owner of some Holds."""

    lease = None

    def __init__(self, world: World, *counts: int) -> None:
        self.holder = world.ledger.holder(Kind.TRANSIT, "keeper")
        self.pool = world.ledger.pool(Component.FULL)
        self.holds: list[Hold] = [world.ledger.take(self.pool, count, self.holder) for count in counts]

    def claim(self, into: list[Grant]) -> None:
        into.extend(hold.grant for hold in self.holds)

    def faults(self) -> list[str]:
        return []


def test_a_hold_that_is_released_before_its_turn_comes_is_not_suspicious() -> None:
    world = World(named_layout("dense", 4), pages=20)
    keeper = Keeper(world, 2, 3)
    round_ = Round(world.ledger, [keeper], world.tree, world.audit._sightings)
    keeper.holds.pop().release()
    assert not round_.work(1 << 20) and round_.done


def test_a_unit_that_changes_hands_during_a_round_is_not_suspicious() -> None:
    world = World(named_layout("dense", 4), pages=20)
    keeper = Keeper(world, 2, 3)
    round_ = Round(world.ledger, [keeper], world.tree, world.audit._sightings)
    assert not round_.work(OWNER_COST) and not round_.work(HOLD_COST + 2)
    first, second = keeper.holds
    units = set(first.units)
    first.release()
    second.grow(2)
    assert units < set(second.units)
    assert not round_.work(1 << 20) and round_.done
