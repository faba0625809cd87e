"""Sharing: leaning on a prefix, publishing one, forking, and leaving a history behind."""

import pytest

from holdfast.core.layout import Component, named_layout
from holdfast.core.ledger import Kind, OutOfUnits
from holdfast.core.points import Run
from holdfast.core.sharing import lean, publish, reclaim, tail_sources
from holdfast.core.tokens import pack
from tests.core.world import LAYOUTS, PAGE_SIZES, STATEFUL, WINDOWED, World, units_of

PROMPT = list(range(100, 141))


def world_of(name: str, page_size: int = 4, window: int = 7, **sizes: int) -> World:
    return World(named_layout(name, page_size, window), **sizes)


def first_turn(world: World, chat, publish_to: int = 0, answer: int = 1) -> None:
    """A first turn that publishes its prompt before it ends."""
    world.begin(chat, PROMPT, checkpoint=True)
    world.compute(chat)
    if publish_to:
        world.publish(chat, publish_to)
    for _ in range(answer):
        world.say(chat, 1)
        world.compute(chat)
    world.commit(chat)


# --- publish and lean -------------------------------------------------------------------------------


@pytest.mark.no_cover
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_published_prompt_is_computed_once_by_all_who_share_it(name: str, page_size: int) -> None:
    world = world_of(name, page_size, window=33)
    first = world.open()
    first_turn(world, first, publish_to=41)
    world.check()
    second = world.open()
    before = world.tokens_computed
    world.turn(second, [*PROMPT, 9], [5])
    computed = world.tokens_computed - before
    shared = (40 if world.layout.state else 41) // page_size * page_size
    assert computed == 43 - shared
    assert second.sequence.lease.length == shared
    world.turn(first, [6], [7])
    world.turn(second, [8], [9])
    world.finish()


@pytest.mark.parametrize("name", LAYOUTS)
def test_published_pages_belong_to_the_tree_and_to_nobody_else(name: str) -> None:
    world = world_of(name)
    chat = world.open()
    first_turn(world, chat, publish_to=41)
    sequence = chat.sequence
    assert sequence.lease.pages == 10
    if world.layout.full:
        assert world.ledger.pool(Component.FULL).by_kind[Kind.TREE] == 10
        assert len(sequence.full) == sequence.pages - 10
    if world.layout.state:
        assert world.ledger.pool(Component.STATE).by_kind[Kind.TREE] == 1, "the state at 40"
    world.check()
    world.finish()


@pytest.mark.parametrize("name", LAYOUTS)
def test_publishing_in_parts_and_again_moves_each_page_once(name: str) -> None:
    world = world_of(name)
    chat = world.open()
    world.begin(chat, PROMPT)
    world.compute(chat)
    for length in (0, 3, 9, 9, 22, 41, 41):
        world.publish(chat, length)
        assert chat.sequence.lease.pages == length // 4
        world.check()
    world.say(chat, 1)
    world.compute(chat)
    world.commit(chat)
    world.turn(chat, [2], [3])
    world.finish()


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_who_computed_the_same_prompt_keep_one_copy_of_it(name: str) -> None:
    world = world_of(name)
    chats = [world.open() for _ in range(2)]
    for chat in chats:
        world.begin(chat, PROMPT)
        world.compute(chat)
    held = [pool.size - len(pool.free) for pool in world.ledger.pools.values()]
    for chat in chats:
        world.publish(chat, 40)
    world.settle()
    left = [pool.size - len(pool.free) for pool in world.ledger.pools.values()]
    saved = [before - after for before, after in zip(held, left, strict=True)]
    assert all(count >= 0 for count in saved)
    if world.layout.full:
        assert saved[0] == 10, "true duplicates are freed"
    world.check()
    for chat in chats:
        world.say(chat, 5)
        world.compute(chat)
        world.commit(chat)
    world.finish()


def test_duplicates_are_freed_only_when_the_rows_that_read_them_have_run() -> None:
    world = world_of("dense")
    chats = [world.open() for _ in range(2)]
    for chat in chats:
        world.begin(chat, PROMPT)
        world.compute(chat)
    for chat in chats:
        world.publish(chat, 40)
    assert world.ledger.pool(Component.FULL).counts()["RETIRING"] == 10
    world.finish()


@pytest.mark.asserts
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_sequence_without_a_lease_or_beyond_what_is_computed_publishes_nothing(name: str) -> None:
    world = world_of(name)
    chat = world.open()
    with pytest.raises(AssertionError, match="leaning"):
        publish(world.tree, chat.sequence, 0)
    world.begin(chat, PROMPT)
    world.compute(chat, 9)
    with pytest.raises(AssertionError, match="computed"):
        world.publish(chat, 12)
    world.finish()


@pytest.mark.asserts
@pytest.mark.parametrize("name", LAYOUTS)
def test_only_an_empty_sequence_can_lean(name: str) -> None:
    world = world_of(name)
    chat = world.open()
    first_turn(world, chat)
    lease = world.tree.lease_root("tenant", "x")
    with pytest.raises(AssertionError, match="empty"):
        lean(chat.sequence, lease, 0, {})
    lease.release()
    world.finish()


@pytest.mark.no_cover
@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize("window", [1, 4, 7, 33])
def test_points_that_lean_on_published_window_pages_can_still_be_returned_to(name: str, window: int) -> None:
    world = world_of(name, 4, window)
    chat = world.open()
    world.begin(chat, PROMPT[:17], checkpoint=True)
    world.compute(chat)
    world.publish(chat, 17)
    for _ in range(12):
        world.say(chat, 1)
        world.compute(chat)
    world.keep(chat, 19)
    world.check()
    world.turn(chat, [2] * 9, [3])
    world.rewind(chat, 19)
    world.turn(chat, [4], [5])
    world.finish()


# --- taking back ------------------------------------------------------------------------------------


@pytest.mark.no_cover
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("window", [1, 7, 33, 50])
def test_what_nobody_came_for_is_taken_back_and_nothing_is_computed_again(
    name: str, page_size: int, window: int
) -> None:
    world = world_of(name, page_size, window)
    chat = world.open()
    first_turn(world, chat, publish_to=41)
    world.check()
    before = world.tokens_computed
    world.reclaim(chat)
    assert chat.sequence.lease.length == 0 and not any(node.parent for node in world.tree.forest.nodes())
    world.check()
    world.turn(chat, [6, 7], [8])
    assert world.tokens_computed - before == 3
    world.rewind(chat, 42)
    world.turn(chat, [9], [1])
    world.finish()


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_others_lean_on_stays_with_the_tree(name: str) -> None:
    world = world_of(name, 4, window=33)
    first, second = world.open(), world.open()
    first_turn(world, first, publish_to=41)
    world.turn(second, [*PROMPT[:24], 9, 9, 9], [5])
    shared = second.sequence.lease.length
    world.reclaim(first)
    world.check()
    assert first.sequence.lease.length == shared
    world.close(second)
    world.reclaim(first)
    assert first.sequence.lease.length == 0
    world.turn(first, [6], [7])
    world.finish()


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_history_that_somebody_left_stays_with_the_tree(name: str) -> None:
    world = world_of(name, 4, window=33)
    first, second = world.open(), world.open()
    first_turn(world, first, publish_to=41)
    second.sequence.tokens.extend(first.sequence.tokens.slice(0, first.sequence.known))
    world.attach(second, 42)
    world.close(second, leave=True)
    world.close(first, leave=True)
    third = world.open()
    third.sequence.tokens.extend(PROMPT)
    world.attach(third, 41)
    world.reclaim(third)
    assert third.sequence.lease.length == third.sequence.computed // 4 * 4, "a tail hangs below it"
    world.check()
    world.finish()


@pytest.mark.parametrize("name", STATEFUL)
def test_a_leased_state_is_taken_back_with_its_pages(name: str) -> None:
    world = world_of(name, 4, window=33)
    first, second = world.open(), world.open()
    first_turn(world, first, publish_to=41)
    sequence = second.sequence
    sequence.tokens.extend(PROMPT)
    world.attach(second, 40)
    world.close(first)
    assert sequence.computed == 40 and sequence.state is None
    world.reclaim(second)
    world.check()
    assert sequence.lease.length == 0 and sequence.state is not None and world.tree.forest.states == 0
    before = world.tokens_computed
    world.turn(second, [6], [7])
    assert world.tokens_computed - before == 3
    world.finish()


@pytest.mark.parametrize("name", STATEFUL)
def test_a_leased_state_that_was_copied_is_given_up(name: str) -> None:
    world = world_of(name, 1, window=33)
    earlier, parent = world.open(), world.open()
    world.turn(earlier, PROMPT, [1])
    world.close(earlier, leave=True)
    world.turn(parent, PROMPT, [1])
    child = world.fork(parent, 42)
    assert child.sequence.state is not None and child.sequence.lease.state_unit(42) is not None
    world.close(parent)
    world.reclaim(child)
    world.check()
    assert child.sequence.lease.length == 0 and world.tree.forest.states == 0
    world.turn(child, [6], [7])
    world.finish()


@pytest.mark.parametrize("name", ["window", "full+window+state"])
def test_window_pages_that_a_sequence_has_itself_are_not_taken_back_twice(name: str) -> None:
    world = world_of(name, 1, window=7)
    parent = world.open()
    for turn in range(3):
        world.turn(parent, [turn] * 17, [1, 2])
    world.close(world.fork(parent, parent.ends[2]))
    world.rewind(parent, parent.ends[0])
    world.tree.evict(Component.FULL, 1000)
    lease, run = parent.sequence.lease, parent.sequence.window
    own = lease.pages - run.first
    assert own > 0, "the window of the checkpoint that it went back to"
    pool = world.ledger.pool(Component.WINDOW)
    own_pages = world.ledger.take(pool, own, parent.sequence.holder)
    world.tree.fill_window(lease, Run(own_pages, run.first))
    world.reclaim(parent)
    world.check()
    assert lease.length == 0 and parent.sequence.window.end == parent.sequence.pages
    before = world.tokens_computed
    world.turn(parent, [9], [8])
    assert world.tokens_computed - before == 2
    world.finish()


@pytest.mark.asserts
@pytest.mark.parametrize("name", LAYOUTS)
def test_only_a_sequence_at_rest_takes_anything_back(name: str) -> None:
    world = world_of(name)
    chat = world.open()
    first_turn(world, chat, publish_to=41)
    world.begin(chat, [1])
    with pytest.raises(AssertionError, match="at rest"):
        reclaim(world.tree, chat.sequence)
    world.compute(chat)
    world.commit(chat)
    other = world.open()
    other.sequence.tokens.extend([*PROMPT, 9])
    world.attach(other, 41)
    with pytest.raises(AssertionError, match="another lease"):
        world.tree.withdraw(chat.sequence.lease)
    world.finish()


# --- forks ------------------------------------------------------------------------------------------


@pytest.mark.no_cover
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("end", [0, 1, 2])
def test_both_sides_of_a_fork_go_on_without_touching_each_other(name: str, page_size: int, end: int) -> None:
    world = world_of(name, page_size)
    parent = world.open()
    for turn in range(3):
        world.turn(parent, [turn] * 11, [1, 2])
    child = world.fork(parent, parent.ends[end])
    world.check()
    before = world.tokens_computed
    world.turn(child, [7] * 5, [8])
    recomputed = world.tokens_computed - before - 6
    assert recomputed == 0, "a turn's end is a checkpoint, and the parent's end needs none"
    world.check()
    world.turn(parent, [9] * 5, [8])
    world.turn(child, [7] * 5, [8])
    world.close(parent)
    world.turn(child, [7], [8])
    world.finish()


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_fork_copies_at_most_one_page_and_one_slot(name: str) -> None:
    world = world_of(name)
    parent = world.open()
    world.turn(parent, PROMPT, [1])
    free = [len(pool.free) + pool.by_kind[Kind.RETIRING] for pool in world.ledger.pools.values()]
    child = world.fork(parent, 42)
    left = [len(pool.free) + pool.by_kind[Kind.RETIRING] for pool in world.ledger.pools.values()]
    assert all(before - after <= 1 for before, after in zip(free, left, strict=True))
    assert child.sequence.computed == 42
    world.finish()


@pytest.mark.parametrize("name", WINDOWED)
def test_a_checkpoint_that_goes_to_the_child_is_not_free_before_the_parents_steps_have_run(name: str) -> None:
    world = world_of(name, 4, window=7)
    parent = world.open()
    for turn in range(3):
        world.turn(parent, [turn] * 17, [1, 2])
    world.settle()
    world.plan()
    parent.sequence.fence = world.ledger.step
    point = parent.sequence.points[-2]
    handed = set(point.window.hold.units)
    slots = set(point.state.units) if point.state is not None else set()
    child = world.fork(parent, parent.ends[0])
    assert handed & {unit for _, unit in units_of(child.sequence)}, "the point's last page is the child's now"
    child.sequence.fence = 0
    world.close(child)
    assert not handed & set(world.ledger.pool(Component.WINDOW).free)
    assert not slots or not slots & set(world.ledger.pool(Component.STATE).free)
    world.finish()


@pytest.mark.parametrize("name", LAYOUTS)
def test_many_branches_can_grow_from_one_history(name: str) -> None:
    world = world_of(name)
    parent = world.open()
    world.turn(parent, PROMPT, [1])
    children = [world.fork(parent, 42) for _ in range(4)]
    for number, child in enumerate(children):
        world.turn(child, [number] * 7, [number])
        world.check()
    grandchild = world.fork(children[0], 42)
    world.turn(grandchild, [9], [9])
    world.finish()


@pytest.mark.asserts
@pytest.mark.parametrize("name", LAYOUTS)
def test_only_a_leaning_sequence_at_rest_is_forked(name: str) -> None:
    world = world_of(name)
    parent = world.open()
    with pytest.raises(AssertionError, match="leaning"):
        world.fork(parent, 0)
    world.close(world.chats[-1])
    world.begin(parent, PROMPT)
    with pytest.raises(AssertionError, match="at rest"):
        world.fork(parent, 0)
    world.close(world.chats[-1])
    world.finish()


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_fork_that_finds_no_unit_leaves_nothing_behind(name: str) -> None:
    world = world_of(name)
    parent = world.open()
    world.turn(parent, PROMPT, [1])
    world.publish(parent, 42)
    before = world.held(), world.claims()
    for pool in world.ledger.pools.values():
        pool.guard(lambda pool, count: False)
    with pytest.raises(OutOfUnits):
        world.fork(parent, 42)
    for pool in world.ledger.pools.values():
        pool.guard(None)
    assert (world.held(), world.claims()) == before
    world.check()
    world.finish()


# --- leaving a history ------------------------------------------------------------------------------


@pytest.mark.no_cover
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("answer", [1, 7, 23])
def test_a_closed_session_leaves_its_history_to_its_exact_end(name: str, page_size: int, answer: int) -> None:
    world = world_of(name, page_size)
    chat = world.open()
    world.turn(chat, PROMPT, [1] * answer)
    history = chat.sequence.tokens.slice(0, chat.sequence.known)
    world.close(chat, leave=True)
    world.check()
    heir = world.open()
    before = world.tokens_computed
    world.turn(heir, [*history, 5, 6], [7])
    assert world.tokens_computed - before == 3
    world.check()
    another = world.open()
    world.turn(another, [*history, 8], [9])
    world.finish()


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_history_that_was_never_computed_leaves_nothing(name: str) -> None:
    world = world_of(name)
    chat = world.open()
    world.begin(chat, PROMPT)
    world.rollback(chat)
    world.close(chat, leave=True)
    assert not world.tree.roots
    world.finish()


@pytest.mark.parametrize("name", STATEFUL)
def test_a_state_that_the_tree_has_already_is_freed_only_when_the_step_that_writes_it_has_run(
    name: str,
) -> None:
    world = world_of(name)
    chats = [world.open() for _ in range(2)]
    for chat in chats:
        world.turn(chat, PROMPT[:39], [1])
    world.settle()
    pool = world.ledger.pool(Component.STATE)
    world.close(chats[0], leave=True)
    chats[1].sequence.fence = world.ledger.step = world.ledger.step + 1
    duplicate = chats[1].sequence.state.units[0]
    world.close(chats[1], leave=True)
    assert duplicate not in pool.free
    world.settle()
    assert duplicate in pool.free
    world.finish()


@pytest.mark.parametrize("name", STATEFUL)
def test_a_history_whose_state_is_only_leased_leaves_no_second_one(name: str) -> None:
    """A chat that leased all it knows has no state of its own to leave."""
    world = world_of(name)
    chat = world.open()
    first_turn(world, chat, publish_to=40, answer=0)
    world.close(chat, leave=True)
    tree_states = world.ledger.pool(Component.STATE).by_kind[Kind.TREE]
    reader = world.open()
    reader.sequence.tokens.extend(PROMPT[:40])
    world.attach(reader, 40)
    assert reader.sequence.computed == 40
    world.close(reader, leave=True)
    assert world.ledger.pool(Component.STATE).by_kind[Kind.TREE] == tree_states
    world.finish()


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_tail_is_copied_once_for_each_who_leases_it(name: str) -> None:
    world = world_of(name)
    chat = world.open()
    world.turn(chat, PROMPT, [1])
    history = chat.sequence.tokens.slice(0, 42)
    world.close(chat, leave=True)
    match = world.tree.match("tenant", pack(history), 42)
    assert match.tail is not None
    lease = world.tree.lease(match, "reader")
    assert set(tail_sources(lease)) == set(world.layout.components)
    world.plan()
    pool = world.ledger.pool(world.layout.components[0])
    pool.guard(lambda pool, count: False)
    reader = world.open("reader")
    with pytest.raises(OutOfUnits):
        lean(reader.sequence, lease, 42, tail_sources(lease))
    assert lease.alive, "the caller still owns it"
    assert not reader.sequence.computed
    pool.guard(None)
    lease.release()
    world.check()
    world.finish()
