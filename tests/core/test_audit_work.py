"""The audit's reports name owners and transitions, and its work is no more than what there is to look at."""

import pytest

from holdfast.core.audit import ROWS_PER_SLICE, Audit
from holdfast.core.layout import Component, named_layout
from holdfast.core.ledger import Kind
from holdfast.core.slices import Round
from tests.core.world import Chat, World


def world_of_two(said: int = 9) -> tuple[World, Chat, Chat]:
    """Two chats at rest, each with pages, a window and a state of its own."""
    world = World(named_layout("full+window+state", 4, 7), pages=60, slots=10)
    first, second = world.open("first"), world.open("second")
    for chat, token in ((first, 1), (second, 2)):
        world.turn(chat, [token] * said, [3])
    world.settle()
    return world, first, second


def drop_a_hold(world: World) -> None:
    """A Hold of two pages is dropped alive."""
    holder = world.ledger.holder(Kind.TRANSIT, "forgetful")
    world.ledger.take(world.ledger.pool(Component.FULL), 2, holder)


def test_no_census_was_made_before_the_first() -> None:
    world = World(named_layout("dense", 4))
    world.plan()
    assert world.audit.last_full_step == 0


def test_a_dropped_hold_is_reported_with_its_transitions() -> None:
    world, _, _ = world_of_two()
    drop_a_hold(world)
    (finding,) = world.census()
    assert finding.kind == "dropped hold"
    assert finding.trail and all("TRANSIT forgetful" in line for line in finding.trail)


def test_a_unit_in_two_holds_is_reported_with_the_transitions_of_both() -> None:
    world, first, second = world_of_two()
    assert first.sequence.full is not None and second.sequence.full is not None
    first.sequence.full.grant.units[-1] = second.sequence.full.units[0]
    finding = next(each for each in world.census() if each.kind == "claimed twice")
    for name in ("SESSION first", "SESSION second"):
        assert any(name in line for line in finding.trail)
    assert finding.owners == [first.sequence, second.sequence]


def test_a_hold_with_two_owners_is_reported_with_both() -> None:
    world, first, second = world_of_two()
    second.sequence.spare = first.sequence.state
    finding = next(each for each in world.census() if each.kind == "claimed twice")
    assert finding.owners == [first.sequence, second.sequence]
    second.sequence.spare = None


def test_units_are_looked_for_one_by_one_only_where_their_sums_are_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, _, _ = world_of_two()
    searched: list[str] = []
    monkeypatch.setattr(Audit, "_misplaced", lambda _self, pool, _owners, _found: searched.append(pool.name))
    assert world.census() == [] and searched == []
    world.ledger.pool(Component.WINDOW).free.pop()
    world.census()
    assert searched == ["window on device"]


def test_drops_are_looked_at_when_there_are_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    world, _, _ = world_of_two()
    looks: list[int] = []
    look = Audit._dropped
    monkeypatch.setattr(Audit, "_dropped", lambda audit: [looks.append(1), look(audit)][1])
    assert world.audit.tick(1) == world.audit.tick(1) == [] and not looks
    drop_a_hold(world)
    assert [finding.kind for finding in world.audit.tick(1)] == ["dropped hold"]
    assert world.audit.tick(1) == [] and len(looks) == 1


def test_the_first_slice_of_a_round_pays_for_its_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    world, _, _ = world_of_two()
    given: list[int] = []
    work = Round.work
    monkeypatch.setattr(Round, "work", lambda self, budget: [given.append(budget), work(self, budget)][1])
    costs = Round(world.ledger, [], world.tree, world.audit._sightings).opening_cost
    assert costs > 0
    world.audit.slice(costs + 1)
    world.audit.slice(costs + 1)
    assert given == [1, costs + 1]


def test_what_a_slice_finds_is_kept() -> None:
    world, _, _ = world_of_two()
    drop_a_hold(world)
    found = world.audit.slice(ROWS_PER_SLICE)
    assert [finding.kind for finding in found] == ["dropped hold"]
    assert world.audit.findings == found


def test_a_dropped_lease_is_heard_at_once() -> None:
    world, _, _ = world_of_two()
    world.tree.lease_root("tenant", "forgetful")
    assert [finding.kind for finding in world.audit.tick(1)] == ["dropped lease"]
    assert world.audit.tick(1) == []


@pytest.mark.parametrize("which", ["node", "tail"])
def test_what_was_locked_by_nobody_can_be_evicted_again(which: str) -> None:
    world, first, _ = world_of_two(11 if which == "node" else 9)
    world.close(first, leave=True)
    nodes = [node for node in world.tree.forest.nodes() if node.parent is not None and not node.leases]
    member = nodes[-1] if which == "node" else next(iter(nodes[-1].tails.values()))
    assert member.queued and not member.leases
    member.leases, member.queued = 1, 0  # As one that came up for eviction while it was leased.
    (finding,) = world.census()
    assert (finding.kind, finding.healed) == ("lock without a lessee", "recounted")
    assert member.queued and not member.leases
    world.check()


def test_a_root_that_nothing_was_matched_with_was_never_used() -> None:
    world = World(named_layout("dense", 4))
    lease = world.tree.lease_root("tenant", "a")
    assert [node.used for node in world.tree.forest.nodes()] == [0]
    lease.release()
