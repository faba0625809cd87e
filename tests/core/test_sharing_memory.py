"""Sharing, what becomes of each page and slot: fences that go along, tables that change, points that stay."""

import pytest

from holdfast.core.layout import Component
from holdfast.core.ledger import Kind
from holdfast.core.points import Run
from holdfast.core.sharing import _take_window_back, fork, publish, reclaim
from tests.core.test_sharing import PROMPT, first_turn, world_of
from tests.core.world import LAYOUTS, STATEFUL, WINDOWED, Chat, World

WINDOW, STATE = Component.WINDOW, Component.STATE


def with_own_pages_under_its_lease(name: str) -> tuple[World, Chat]:
    """A chat back at a checkpoint, with window pages of its own that the tree has as well."""
    world = world_of(name, 1, window=7)
    chat = world.open()
    for turn in range(3):
        world.turn(chat, [turn] * 17, [1, 2])
    world.close(world.fork(chat, chat.ends[2]))
    world.rewind(chat, chat.ends[0])
    world.tree.evict(Component.FULL, 1000)
    lease, run = chat.sequence.lease, chat.sequence.window
    assert run.first < lease.pages
    pages = world.ledger.take(world.ledger.pool(WINDOW), lease.pages - run.first, chat.sequence.holder)
    world.tree.fill_window(lease, Run(pages, run.first))
    world.settle()
    return world, chat


@pytest.mark.parametrize("name", ["window", "full+window+state"])
def test_window_pages_that_the_tree_has_already_stay_behind_the_fence_of_their_sequence(name: str) -> None:
    world, chat = with_own_pages_under_its_lease(name)
    sequence, pool = chat.sequence, world.ledger.pool(WINDOW)
    own = set(sequence.window.hold.units[: sequence.lease.pages - sequence.window.first])
    sequence.fence = world.ledger.step = world.ledger.step + 1
    publish(world.tree, sequence, sequence.computed)
    assert not own & set(pool.free), "the step in flight may read them"
    world.settle()
    assert own <= set(pool.free)
    world.check()
    world.finish()


@pytest.mark.parametrize("name", ["window", "full+window+state"])
def test_block_tables_name_the_trees_window_pages_once_they_are_read_instead(name: str) -> None:
    world, chat = with_own_pages_under_its_lease(name)
    sequence = chat.sequence
    chat.table.read(sequence)
    publish(world.tree, sequence, sequence.computed)
    chat.table.read(sequence)
    first = sequence.lease.window_first
    leased = sequence.lease.window_units(first)
    assert [chat.table.pages[WINDOW][first + index] for index in range(len(leased))] == leased
    world.finish()


@pytest.mark.parametrize("name", STATEFUL)
def test_a_points_state_that_the_tree_has_already_stays_behind_the_fence_of_its_sequence(name: str) -> None:
    world = world_of(name)
    chats = [world.open() for _ in range(2)]
    for chat in chats:
        world.begin(chat, PROMPT)
        world.compute(chat)
    world.publish(chats[0], 41)
    world.settle()
    sequence, pool = chats[1].sequence, world.ledger.pool(STATE)
    duplicate = next(point.state.units[0] for point in sequence.points if point.length == 40)
    sequence.fence = world.ledger.step = world.ledger.step + 1
    world.publish(chats[1], 41)
    assert duplicate not in pool.free
    world.settle()
    assert duplicate in pool.free
    world.finish()


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_a_fork_copies_is_not_free_before_the_next_step_has_run(name: str) -> None:
    world = world_of(name)
    parent, child = world.open(), world.open()
    world.turn(parent, PROMPT, [1])
    world.settle()
    copies = fork(world.tree, parent.sequence, child.sequence, 42)
    assert {copy.component for copy in copies} == set(world.layout.components)
    world.close(parent)
    for copy in copies:
        assert copy.source not in world.ledger.pool(copy.component).free
    world.plan()
    world.settle()
    for copy in copies:
        assert copy.source in world.ledger.pool(copy.component).free
    world.finish()


@pytest.mark.parametrize("name", WINDOWED)
def test_points_stay_where_nothing_is_taken_back(name: str) -> None:
    world = world_of(name)
    first, second = world.open(), world.open()
    first_turn(world, first, publish_to=41)
    second.sequence.tokens.extend(PROMPT)
    world.attach(second, 41)
    points = list(first.sequence.points)
    assert any(first.sequence.leans_for_window(point) for point in points)
    reclaim(world.tree, first.sequence)
    assert first.sequence.points == points
    world.finish()


@pytest.mark.parametrize("name", WINDOWED)
def test_points_go_whose_window_pages_are_taken_back_from_the_tree_and_not_kept(name: str) -> None:
    world = world_of(name)
    chat = world.open()
    first_turn(world, chat, publish_to=41, answer=20)
    assert any(chat.sequence.leans_for_window(point) for point in chat.sequence.points)
    world.reclaim(chat)
    world.rewind(chat, 41)
    world.check()
    world.turn(chat, [9], [1])
    world.finish()


def test_window_pages_that_a_sequence_lacks_are_put_before_its_own_and_the_others_are_freed() -> None:
    world = world_of("window", 1, window=4)
    chat = world.open()
    world.turn(chat, PROMPT[:9], [1])
    world.settle()
    run, pool = chat.sequence.window, world.ledger.pool(WINDOW)
    assert (run.first, run.end) == (6, 10)
    run.hold.shrink_front(2)
    run.first = 8
    own = list(run.hold.units)
    withdrawn = world.ledger.take(pool, 4, world.ledger.holder(Kind.TREE, "tenant"))
    before, six, seven, eight = withdrawn.units
    _take_window_back(chat.sequence, run, Run(withdrawn, 5))
    assert (run.first, run.hold.units) == (6, [six, seven, *own])
    assert {before, eight} <= set(pool.free)
    world.check()
    world.finish()
