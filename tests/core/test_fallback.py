"""Falling back: rollback, keep, retract and rewind, what each recomputes, and cuts inside a leased prefix."""

import pytest

from holdfast.core import fallback
from holdfast.core.layout import LAYOUT_NAMES, named_layout
from holdfast.core.ledger import Kind, OutOfUnits
from tests.core.world import LAYOUTS, PAGE_SIZES, STATEFUL, WINDOWED, World

PROMPT = list(range(100, 141))


def world_of(name: str, page_size: int = 16, window: int = 7, **sizes: int) -> World:
    return World(named_layout(name, page_size, window), **sizes)


def forbid_allocation(world: World) -> None:
    for pool in world.ledger.pools.values():
        pool.guard(lambda pool, count: False)


def allow_allocation(world: World) -> None:
    for pool in world.ledger.pools.values():
        pool.guard(None)


@pytest.mark.no_cover
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("spoken", [0, 1, 37])
def test_rollback_restores_the_mark_and_never_allocates(name: str, page_size: int, spoken: int) -> None:
    world = world_of(name, page_size)
    chat = world.open()
    world.turn(chat, PROMPT, [1, 2])
    chat.sequence.thin_points(0)
    world.settle()
    held = world.held()
    world.begin(chat, [5] * 19)
    world.compute(chat)
    for _ in range(spoken):
        world.say(chat, 6)
        world.compute(chat)
    forbid_allocation(world)
    world.rollback(chat)
    world.settle()
    assert (chat.sequence.known, chat.sequence.computed) == (43, 43)
    assert chat.ends == [43]
    world.check()
    allow_allocation(world)
    kept = {pool: {**counts, "CHECKPOINT": 0, "SESSION": 0} for pool, counts in held.items()}
    rest = {pool: {**counts, "CHECKPOINT": 0, "SESSION": 0} for pool, counts in world.held().items()}
    assert rest == kept, "nothing of the turn is left"
    before = world.tokens_computed
    world.turn(chat, [7, 8], [9])
    assert world.tokens_computed - before == 3, "no history is computed again"
    world.finish()


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_first_turn_rolls_back_to_nothing(name: str) -> None:
    world = world_of(name, 3)
    chat = world.open()
    world.begin(chat, PROMPT)
    world.compute(chat, 20)
    world.rollback(chat)
    assert (chat.sequence.known, chat.sequence.computed) == (0, 0)
    world.check()
    world.turn(chat, PROMPT, [1])
    world.finish()


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_a_retracted_turn_keeps_its_tokens_and_its_mark(name: str, page_size: int) -> None:
    world = world_of(name, page_size)
    chat = world.open()
    world.turn(chat, PROMPT, [1, 2])
    world.begin(chat, [5] * 19)
    world.compute(chat)
    world.say(chat, 6)
    before = {kind: [pool.by_kind[kind] for pool in world.ledger.pools.values()] for kind in (Kind.TURN,)}
    forbid_allocation(world)
    world.retract(chat)
    allow_allocation(world)
    world.settle()
    sequence = chat.sequence
    assert (sequence.known, sequence.computed, sequence.mark.known) == (63, 43, 43)
    after = [pool.by_kind[Kind.TURN] for pool in world.ledger.pools.values()]
    assert all(now <= then for now, then in zip(after, before[Kind.TURN], strict=True))
    world.check()
    computed = world.tokens_computed
    world.compute(chat)
    assert world.tokens_computed - computed == 20
    world.rollback(chat)
    assert sequence.known == 43
    world.finish()


@pytest.mark.no_cover
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_ten_barge_ins_in_a_row_recompute_a_constant_number_of_tokens(name: str, page_size: int) -> None:
    world = world_of(name, page_size)
    chat = world.open()
    world.turn(chat, PROMPT, [1, 2])
    computed = []
    for turn in range(10):
        before = world.tokens_computed
        world.begin(chat, [turn] * 5)
        world.compute(chat)
        for _ in range(8):
            world.say(chat, 6)
            world.compute(chat)
        world.keep(chat, chat.input_end + 3)
        world.check()
        computed.append(world.tokens_computed - before)
        assert chat.sequence.known == 43 + 8 * (turn + 1)
    assert len(set(computed[1:])) == 1, computed
    recomputed = computed[1] - (5 + 8)
    if world.layout.state:
        assert recomputed == 8, "the turn's input and what was heard, of the last turn alone"
    elif not world.layout.window:
        assert recomputed == 0
    else:
        assert 0 <= recomputed <= 8
    world.finish()


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_long_input_leaves_a_point_at_its_end_so_that_a_barge_in_recomputes_only_what_was_heard(
    name: str,
) -> None:
    world = world_of(name, 3)
    chat = world.open()
    world.turn(chat, PROMPT, [1, 2])
    world.begin(chat, PROMPT, checkpoint=True)
    world.compute(chat)
    for _ in range(20):
        world.say(chat, 6)
        world.compute(chat)
    world.keep(chat, chat.input_end + 4)
    assert chat.sequence.computed >= chat.input_end
    before = world.tokens_computed
    world.turn(chat, [7], [])
    assert world.tokens_computed - before <= 1 + 4
    world.finish()


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_a_finished_turn_can_still_be_cut_back_until_the_next_begins(name: str, page_size: int) -> None:
    world = world_of(name, page_size)
    chat = world.open()
    world.turn(chat, PROMPT, [1, 2])
    world.turn(chat, [3] * 9, [4] * 9)
    world.rewind(chat, 43 + 9 + 2)
    assert chat.sequence.known == 54
    assert chat.sequence.computed >= 43, "the mark of that turn is still there"
    world.check()
    world.turn(chat, [5], [6])
    world.finish()


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_rewind_goes_back_to_the_nearest_checkpoint(name: str) -> None:
    world = world_of(name, 3)
    chat = world.open()
    for turn in range(6):
        world.turn(chat, [turn] * 9, [1, 2])
    world.rewind(chat, 35)
    assert chat.sequence.known == 35
    assert chat.sequence.computed in (33, 35)
    assert all(point.length < 35 for point in chat.sequence.points)
    world.check()
    world.turn(chat, [7], [8])
    world.rewind(chat, 3)
    world.check()
    world.turn(chat, [7], [8])
    world.finish()


# --- inside a leased prefix ---------------------------------------------------------------------------


def published(name: str, page_size: int = 4, window: int = 7) -> tuple[World, object]:
    """A chat whose first prompt of 41 tokens belongs to the tree, and which has gone on from there."""
    world = world_of(name, page_size, window)
    chat = world.open()
    world.begin(chat, PROMPT, checkpoint=True)
    world.compute(chat)
    world.publish(chat, chat.sequence.computed)
    world.say(chat, 1)
    world.compute(chat)
    world.commit(chat)
    return world, chat


@pytest.mark.no_cover
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("cut", [0, 3, 24, 37, 39, 41])
def test_a_cut_inside_the_lease_shortens_it_to_whole_pages_and_copies_the_partial_one(
    name: str, cut: int
) -> None:
    world, chat = published(name)
    world.rewind(chat, cut)
    sequence = chat.sequence
    assert sequence.known == cut
    assert sequence.computed <= cut
    assert sequence.lease.length <= cut
    world.check()
    world.turn(chat, [5, 6, 7], [8])
    world.check()
    world.finish()


@pytest.mark.parametrize(
    "name", [name for name in LAYOUT_NAMES if name in ("dense", "window", "window-only")]
)
def test_a_cut_that_finds_no_page_for_the_copy_changes_nothing(name: str) -> None:
    for failing in named_layout(name, 4).components:
        world, chat = published(name)
        world.ledger.pool(failing).guard(lambda pool, count: False)
        before = world.held(), world.claims(), chat.sequence.computed
        with pytest.raises(OutOfUnits):
            world.rewind(chat, 39)
        assert (world.held(), world.claims(), chat.sequence.computed) == before
        world.check()
        world.ledger.pool(failing).guard(None)
        world.rewind(chat, 39)
        world.turn(chat, [5], [6])
        world.finish()


@pytest.mark.parametrize("name", STATEFUL)
def test_the_state_that_a_prompt_published_can_be_cut_back_to(name: str) -> None:
    world, _chat = published(name)
    second = world.open()
    world.begin(second, [*PROMPT, 9])
    assert second.sequence.computed == 40
    world.compute(second)
    world.publish(second, 40)
    world.keep(second, 42)
    world.check()
    world.finish()


@pytest.mark.asserts
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_turn_that_ended_cannot_be_ended_again(name: str) -> None:
    world = world_of(name)
    chat = world.open()
    world.turn(chat, PROMPT, [1])
    for end in (fallback.rollback, fallback.retract):
        with pytest.raises(AssertionError, match="no turn"):
            end(chat.sequence, chat.session, chat.checkpoints)
    world.check()
    world.finish()


@pytest.mark.parametrize("name", LAYOUTS)
def test_resuming_is_possible_from_computed_or_from_the_nearest_point_below(name: str) -> None:
    world = world_of(name, 3)
    chat = world.open()
    world.turn(chat, PROMPT, [1])
    world.turn(chat, PROMPT, [1])
    sequence = chat.sequence
    assert fallback.resume_length(sequence, 1000) == sequence.computed == 84
    anywhere = world.layout.cuts_anywhere
    assert fallback.resume_length(sequence, 60) == (60 if anywhere else 42)
    assert fallback.resume_length(sequence, 41) == (41 if anywhere else fallback.resume_length(sequence, 41))
    assert fallback.resume_length(sequence, 0) == 0
    world.finish()


@pytest.mark.parametrize("name", ["window", "window-only"])
def test_a_short_cut_needs_no_point_while_its_window_is_still_there(name: str) -> None:
    world = world_of(name, 4, window=5)
    chat = world.open()
    world.turn(chat, PROMPT[:40], [])
    assert fallback.resume_length(chat.sequence, 39) == 39
    assert fallback.resume_length(chat.sequence, 37) == 37
    assert fallback.resume_length(chat.sequence, 36) == 0
    world.rewind(chat, 37)
    world.check()
    world.turn(chat, [1], [2])
    world.finish()


@pytest.mark.parametrize("name", ["window", "window-only"])
def test_a_cut_takes_back_only_the_window_pages_it_needs_from_the_mark(name: str) -> None:
    world = world_of(name, 1, window=7)
    chat = world.open()
    world.turn(chat, PROMPT, [])
    world.begin(chat, [1])
    world.compute(chat)
    for _ in range(2):
        world.say(chat, 2)
        world.compute(chat)
    sequence = chat.sequence
    assert sequence.window.first == 37
    assert sequence.mark.point.window.first == 34
    world.keep(chat, 43)
    assert sequence.computed == 43
    assert sequence.window.first == 36
    assert [point.window.end for point in sequence.points] == [36], "the mark's point keeps what is below"
    world.check()
    world.turn(chat, [3], [4])
    world.finish()


# --- points whose window pages lie apart under a lease ----------------------------------------------


@pytest.mark.parametrize("name", ["window", "window-only"])
@pytest.mark.parametrize("cut", [16, 17])
@pytest.mark.parametrize("then", ["go on", "cut again", "fork", "close"])
def test_a_point_inside_the_published_prompt_brings_its_own_window_pages(
    name: str, cut: int, then: str
) -> None:
    world = world_of(name, 4, window=7)
    chat = world.open()
    world.begin(chat, PROMPT, cut=cut)
    world.compute(chat)
    world.publish(chat, 41)
    world.commit(chat)
    sequence = chat.sequence
    assert [point.length for point in sequence.points] == [cut]
    assert sequence.points[0].window.first == (cut - 7) // 4
    world.rewind(chat, cut)
    assert sequence.computed == cut
    assert sequence.window.first == (cut - 7) // 4, "its own pages, though the lease reaches past them"
    assert sequence.lease.pages == 4
    world.check()
    if then == "cut again":
        world.rewind(chat, 15)
        assert sequence.computed == 15, "its own window pages reach far enough"
        assert sequence.lease.pages == 3
        world.check()
    if then == "fork":
        world.turn(world.fork(chat, cut), [8], [9])
        assert sequence.window.first >= sequence.lease.pages, "the tree has them now"
    if then != "close":
        world.turn(chat, [5], [6])
    world.close(chat, leave=True)
    world.check()
    world.finish()


@pytest.mark.parametrize("name", WINDOWED)
def test_a_page_that_a_newer_point_keeps_is_given_down_to_the_point_that_is_cut_back_to(name: str) -> None:
    """Two points need the same window page under the lease; it is the newer one's, and not the tree's."""
    world = world_of(name, 16, window=4)
    chat = world.open()
    world.begin(chat, PROMPT * 2, cut=20)
    chat.sequence.cut_chunk_at(27)
    world.compute(chat)
    world.publish(chat, 80)
    world.commit(chat)
    older, newer = chat.sequence.points[:2]
    assert (older.length, older.window, newer.length, newer.window.first) == (20, None, 27, 1)
    world.rewind(chat, 20)
    assert chat.sequence.computed == 20
    world.check()
    world.turn(chat, [5], [6])
    world.finish()


# --- rows that are lost -----------------------------------------------------------------------------


@pytest.mark.no_cover
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("end", ["retract", "rollback"])
def test_rows_that_never_ran_are_forgotten_and_computed_again(name: str, page_size: int, end: str) -> None:
    world = world_of(name, page_size)
    chat = world.open()
    world.turn(chat, PROMPT, [1, 2])
    world.begin(chat, [5] * 19, checkpoint=True)
    world.compute(chat, 3)
    for count in (4, 12):
        world.plan_row(chat, count)
    forbid_allocation(world)
    certain = world.lose_rows(chat)
    assert certain == (43 if world.layout.state else 46)
    assert chat.sequence.planned == chat.sequence.computed == 46
    (world.retract if end == "retract" else world.rollback)(chat, certain)
    allow_allocation(world)
    world.check()
    if end == "retract":
        assert chat.sequence.known == 62
        world.compute(chat)
        world.commit(chat)
    world.turn(chat, [6, 7], [8])
    world.finish()


@pytest.mark.parametrize("name", STATEFUL)
def test_a_lost_drafted_row_gives_its_second_slot_back(name: str) -> None:
    world = world_of(name, 3)
    chat = world.open()
    world.begin(chat, PROMPT)
    world.compute(chat)
    chat.sequence.tokens.extend([7, 8])
    world.plan_row(chat, 2, drafts=True)
    certain = world.lose_rows(chat)
    assert chat.sequence.spare is None
    chat.sequence.tokens.cut(41)
    world.retract(chat, certain)
    world.check()
    world.compute(chat)
    world.commit(chat)
    world.finish()


@pytest.mark.parametrize("name", STATEFUL)
def test_a_lost_catch_up_loses_the_point_that_was_to_follow_the_mark(name: str) -> None:
    world = world_of(name, 3)
    chat = world.open()
    world.turn(chat, PROMPT, [1, 2])
    world.begin(chat, [5] * 9)
    world.compute(chat)
    for _ in range(6):
        world.say(chat, 6)
        world.compute(chat)
    world.keep(chat, chat.input_end + 3)
    world.begin(chat, [7] * 4)
    assert chat.sequence.next_cut() == 55
    world.plan_row(chat, 12)
    assert chat.sequence.mark.successor.length == 55
    certain = world.lose_rows(chat)
    assert chat.sequence.mark.successor is None
    world.retract(chat, certain)
    world.check()
    world.compute(chat)
    world.commit(chat)
    world.turn(chat, [8], [9])
    world.finish()


@pytest.mark.parametrize("name", STATEFUL)
def test_rows_lost_without_any_point_leave_nothing_certain(name: str) -> None:
    world = world_of(name, 3)
    chat = world.open()
    world.begin(chat, PROMPT)
    world.compute(chat)
    world.say(chat, 1)
    world.plan_row(chat, 1)
    world.commit(chat)
    for point in chat.sequence.points:
        point.pinned = False
    chat.sequence.thin_points(0)
    certain = world.lose_rows(chat)
    assert certain == 0
    world.rewind(chat, certain)
    world.check()
    world.finish()
