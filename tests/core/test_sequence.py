"""Sequences: growing, turns as transactions, state slots, windows, drafts, and what does not grow."""

import pytest

from holdfast.core.layout import Component, named_layout
from holdfast.core.ledger import Kind, OutOfUnits
from holdfast.core.sequence import Sequence
from holdfast.core.tokens import TokenLog
from tests.core.world import LAYOUTS, PAGE_SIZES, PAGED, STATEFUL, WINDOWED, World

PROMPT = list(range(100, 141))


def world_of(name: str, page_size: int = 16, window: int = 7, **sizes: int) -> World:
    return World(named_layout(name, page_size, window), **sizes)


def held_by(world: World, kind: Kind) -> dict[Component, int]:
    return {pool.component: pool.by_kind[kind] for pool in world.ledger.pools.values()}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_three_turns_read_what_they_wrote_at_every_page_size(name: str, page_size: int) -> None:
    world = world_of(name, page_size, window=33)
    chat = world.open()
    for turn in range(3):
        world.turn(chat, PROMPT[: 17 + turn], [7, 8, 9], checkpoint=turn == 1)
        world.check()
        assert chat.sequence.computed == chat.sequence.known == sum((20, 21, 22)[: turn + 1])
    world.finish()


@pytest.mark.parametrize("name", PAGED)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_allocated_is_what_the_planned_tokens_need_rounded_up_to_pages(name: str, page_size: int) -> None:
    world = world_of(name, page_size, window=1000, pages=1200)
    chat = world.open()
    world.begin(chat, list(range(3 * page_size + 2)))
    for count in (1, page_size, page_size + 1, 1):
        if count <= world.row_limit(chat):
            world.plan_row(chat, count)
            pages = world.layout.pages_for(chat.sequence.planned)
            assert chat.sequence.pages == pages
            for component in world.layout.components:
                if component is not Component.STATE:
                    assert held_by(world, Kind.TURN)[component] == pages
    world.finish()


@pytest.mark.parametrize("name", LAYOUTS)
def test_extending_takes_in_every_component_or_in_none(name: str) -> None:
    for failing in named_layout(name, 4).components:
        world = world_of(name, 4)
        chat = world.open()
        world.begin(chat, PROMPT)
        world.ledger.pool(failing).guard(lambda pool, count: False)
        before = world.held(), world.claims()
        with pytest.raises(OutOfUnits):
            chat.sequence.extend(9)
        assert (world.held(), world.claims()) == before
        assert chat.sequence.planned == 0
        world.ledger.pool(failing).guard(None)
        world.finish()


@pytest.mark.asserts
def test_settling_more_than_was_planned_is_refused() -> None:
    world = world_of("dense")
    chat = world.open()
    world.begin(chat, PROMPT)
    chat.sequence.extend(3)
    with pytest.raises(AssertionError, match="more was settled"):
        chat.sequence.advance(4)


# --- turns are transactions -------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_turn_takes_the_session_and_gives_it_back(name: str) -> None:
    world = world_of(name, 3)
    chat = world.open()
    world.turn(chat, PROMPT, [1])
    rest = held_by(world, Kind.SESSION)
    chat.sequence.thin_points(0)
    world.begin(chat, [5, 6])
    assert not any(held_by(world, Kind.SESSION).values()), "one holder: the turn, never both"
    assert held_by(world, Kind.TURN) == rest
    world.compute(chat)
    world.commit(chat)
    assert not any(held_by(world, Kind.TURN).values())
    world.finish()


@pytest.mark.parametrize("name", STATEFUL)
def test_an_idle_session_holds_one_slot_a_turn_two_and_a_drafted_row_three(name: str) -> None:
    world = world_of(name, 16)
    chat = world.open()
    pool = world.ledger.pool(Component.STATE)
    world.turn(chat, PROMPT, [1])
    chat.sequence.points[0].pinned = False
    chat.sequence.thin_points(0)
    world.settle()
    assert pool.size - len(pool.free) == 1
    mark_slot = chat.sequence.state.units[0]
    world.begin(chat, [5, 6])
    assert chat.sequence.state_source() == mark_slot, "the mark's slot is read, not copied"
    world.compute(chat)
    assert pool.size - len(pool.free) == 2
    assert chat.sequence.state.units[0] != mark_slot, "and it stays intact"
    chat.sequence.tokens.extend([7, 8])
    chat.sequence.extend_drafts(2)
    assert pool.size - len(pool.free) == 3
    chat.sequence.settle_drafts(2, 1)
    chat.sequence.tokens.cut(chat.sequence.computed)
    world.settle()
    assert pool.size - len(pool.free) == 2
    world.rollback(chat)
    assert chat.sequence.state.units[0] == mark_slot
    world.settle()
    assert pool.size - len(pool.free) == 1
    world.finish()


@pytest.mark.asserts
def test_a_turn_begins_only_on_a_sequence_at_rest() -> None:
    world = world_of("dense")
    chat = world.open()
    world.begin(chat, PROMPT)
    with pytest.raises(AssertionError, match="at rest"):
        chat.sequence.begin(chat.turn)
    world.compute(chat)
    world.commit(chat)
    with pytest.raises(AssertionError, match="no turn to end"):
        chat.sequence.commit(chat.session, chat.checkpoints)
    chat.sequence.begin(chat.turn)
    assert chat.sequence.mark.known == chat.sequence.known
    with pytest.raises(AssertionError, match="end the turn first"):
        chat.sequence.drop_memory()
    world.finish()


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_last_token_may_be_computed_by_a_seal_that_outlives_the_turn(name: str) -> None:
    world = world_of(name, 3)
    chat = world.open()
    world.begin(chat, PROMPT)
    world.compute(chat)
    world.say(chat, 1)
    world.plan_row(chat, 1)
    world.commit(chat)
    assert (chat.sequence.computed, chat.sequence.known) == (41, 42)
    world.check()
    world.settle_rows(chat)
    assert chat.sequence.computed == 42
    world.turn(chat, [2, 3], [4])
    world.finish()


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_point_left_by_the_row_in_flight_is_where_the_next_turn_goes_on(name: str) -> None:
    """The row that a commit outlives may end at a cut: the state is then the point's, not the fresh slot."""
    world = world_of(name, 3)
    chat = world.open()
    world.turn(chat, PROMPT, [1])
    world.begin(chat, [5, 6, 7], checkpoint=True)
    world.compute(chat, 2)
    world.plan_row(chat, 1)
    world.commit(chat)
    world.settle_rows(chat)
    world.check()
    world.turn(chat, [2, 3], [4])
    world.finish()


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_unplanned_last_token_is_absorbed_by_the_next_turn(name: str) -> None:
    world = world_of(name, 3)
    chat = world.open()
    world.begin(chat, PROMPT)
    world.compute(chat)
    world.say(chat, 1)
    world.commit(chat)
    world.begin(chat, [2, 3])
    assert chat.sequence.next_cut() is None, "one late token needs no chunk of its own"
    before = world.tokens_computed
    world.compute(chat)
    assert world.tokens_computed - before == 3
    world.rollback(chat)
    assert chat.sequence.known == 42
    assert chat.sequence.computed == (41 if world.layout.state else 42), "pages may keep the late token"
    world.finish()


# --- windows and points -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_running_turn_keeps_the_marks_window_and_its_own_and_frees_between(
    name: str, page_size: int
) -> None:
    window = page_size + 1
    world = world_of(name, page_size, window, pages=64)
    chat = world.open()
    pool = world.ledger.pool(Component.WINDOW)
    sequence = chat.sequence
    world.turn(chat, list(range(5 * page_size + 1)), [])
    chat.sequence.thin_points(0)
    mark = sequence.computed
    world.begin(chat, list(range(9 * page_size)))
    for _ in range(9):
        world.compute(chat, page_size)
        world.settle()
        needed = set()
        for length in (mark, sequence.computed):
            first, end = world.layout.window_first_page(length), world.layout.pages_for(length)
            needed |= set(range(first, end))
        assert pool.by_kind[Kind.TURN] == len(needed)
    world.rollback(chat)
    assert sequence.computed == mark
    world.turn(chat, [1, 2], [3])
    sequence.points[0].pinned = False
    sequence.thin_points(0)
    world.settle()
    first = world.layout.window_first_page(sequence.computed)
    assert pool.by_kind[Kind.SESSION] == world.layout.pages_for(sequence.computed) - first
    world.finish()


@pytest.mark.parametrize("name", STATEFUL)
def test_a_point_that_finds_no_slot_is_not_left(name: str) -> None:
    world = world_of(name, 3)
    chat = world.open()
    world.begin(chat, PROMPT, checkpoint=True)
    world.compute(chat, 20)
    world.ledger.pool(Component.STATE).guard(lambda pool, count: False)
    assert not chat.sequence.leave_point()
    points = len(chat.sequence.points)
    world.compute(chat)
    assert len(chat.sequence.points) == points, "the cut is passed without a point"
    assert chat.sequence.next_cut() is None
    world.ledger.pool(Component.STATE).guard(None)
    world.finish()


def test_chunks_are_cut_only_ahead_once_and_where_points_are_needed() -> None:
    dense, hybrid = world_of("dense"), world_of("hybrid")
    for world in (dense, hybrid):
        chat = world.open()
        world.turn(chat, PROMPT, [1])
        assert chat.sequence.next_cut() is None
        world.begin(chat, PROMPT)
        for length in (chat.sequence.planned, 70, 60, 70):
            chat.sequence.cut_chunk_at(length)
        assert chat.sequence.mark.cuts == ([] if world is dense else [60, 70])
        world.finish()


@pytest.mark.parametrize("name", LAYOUTS)
def test_finished_turns_leave_checkpoints_where_points_are_needed(name: str) -> None:
    world = world_of(name, 4)
    chat = world.open()
    for turn in range(5):
        world.turn(chat, [turn] * 9, [1, 2])
    sequence = chat.sequence
    lengths = [point.length for point in sequence.points]
    first = [8] if world.layout.state else []  # where the first prompt's last whole page ends
    assert lengths == ([] if world.layout.cuts_anywhere else [*first, 11, 22, 33, 44])
    assert [point.pinned for point in sequence.points[-1:]] == [True] * bool(lengths), "until the next begins"
    assert all(point.holder is chat.checkpoints for point in sequence.points)
    sequence.thin_points(2)
    assert len(sequence.points) <= 2
    sequence.thin_points(0)
    assert [point.length for point in sequence.points] == lengths[-1:], "the pinned one stays"
    world.finish()


@pytest.mark.asserts
@pytest.mark.parametrize("name", STATEFUL)
def test_a_running_turn_can_give_up_the_points_it_left_on_its_way(name: str) -> None:
    world = world_of(name, 4)
    chat = world.open()
    world.turn(chat, PROMPT, [1])
    world.begin(chat, PROMPT, cut=20)
    world.compute(chat, 30)
    assert [point.length for point in chat.sequence.points][-2:] == [42, 62]
    chat.sequence.drop_spare_points()
    assert [point.length for point in chat.sequence.points][-1] == 42, "the mark stays"
    world.check()
    world.compute(chat)
    world.rollback(chat)
    assert chat.sequence.computed == 42
    with pytest.raises(AssertionError, match="running turn"):
        chat.sequence.drop_spare_points()
    world.finish()


# --- drafts -----------------------------------------------------------------------------------------


@pytest.mark.no_cover
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("accepted", [1, 3, 5])
def test_rejected_drafts_are_trimmed_by_whole_pages(name: str, page_size: int, accepted: int) -> None:
    world = world_of(name, page_size, 7)
    chat = world.open()
    world.begin(chat, list(range(page_size + 1)))
    world.compute(chat)
    before, held = chat.sequence.computed, held_by(world, Kind.TURN)
    world.draft(chat, [51, 52, 53, 54, 55], accepted)
    sequence = chat.sequence
    assert sequence.known == before + accepted
    if accepted == 5 or not world.layout.state:
        assert sequence.computed == before + accepted
    else:
        assert sequence.computed == before, "a state cannot be trimmed: the row is computed again"
        assert held_by(world, Kind.TURN) == held
    assert sequence.planned == sequence.computed
    if world.layout.paged:
        assert sequence.pages == world.layout.pages_for(sequence.planned)
    assert sequence.spare is None
    world.check()
    world.compute(chat)
    world.say(chat, 9)
    world.compute(chat)
    world.commit(chat)
    world.finish()


@pytest.mark.parametrize("name", STATEFUL)
def test_drafts_without_a_second_slot_are_refused_and_change_nothing(name: str) -> None:
    for computed_before in (0, 5):
        world = world_of(name, 3)
        chat = world.open()
        world.begin(chat, PROMPT)
        world.compute(chat, computed_before)
        pool = world.ledger.pool(Component.STATE)
        allowed = 1 if computed_before == 0 else 0
        asked = []
        pool.guard(
            lambda pool, count, asked=asked, allowed=allowed: asked.append(count) or len(asked) <= allowed
        )
        before = world.held(), world.claims()
        with pytest.raises(OutOfUnits):
            chat.sequence.extend_drafts(7)
        assert (world.held(), world.claims()) == before
        assert chat.sequence.planned == computed_before
        pool.guard(None)
        world.check()
        world.finish()


# --- the end ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_closing_returns_every_unit_of_every_component(name: str, page_size: int) -> None:
    world = world_of(name, page_size, 5)
    chats = [world.open() for _ in range(3)]
    for chat in chats:
        world.turn(chat, PROMPT, [1, 2, 3], checkpoint=True)
        world.turn(chat, PROMPT[:5], [1, 2, 3])
    world.check()
    for chat in chats:
        world.close(chat)
        world.check()
    world.settle()
    for pool in world.ledger.pools.values():
        assert len(pool.free) == pool.size
    world.finish()


@pytest.mark.parametrize("name", LAYOUTS)
def test_dropped_memory_is_computed_again_and_no_token_is_lost(name: str) -> None:
    world = world_of(name, 3)
    chat = world.open()
    world.turn(chat, PROMPT, [1, 2])
    chat.sequence.drop_memory()
    world.check()
    assert (chat.sequence.known, chat.sequence.computed) == (43, 0)
    before = world.tokens_computed
    world.turn(chat, [3], [4])
    assert world.tokens_computed - before == 45
    world.finish()


# --- nothing grows with the history -----------------------------------------------------------------


class CountingLog(TokenLog):
    """Counts the tokens that are read out of it."""

    __slots__ = ("read",)

    def __init__(self) -> None:
        super().__init__()
        self.read = 0

    def slice(self, start: int, stop: int) -> list[int]:
        self.read += stop - start
        return super().slice(start, stop)

    def packed(self, start: int, stop: int) -> bytes:
        self.read += stop - start
        return super().packed(start, stop)


class Operations(list):
    """An unbounded recorder."""


def turn_work(name: str, page_size: int, history: int) -> tuple:
    """What one turn does: transitions of Holds, units they touch, table entries, tokens read out."""
    layout = named_layout(name, page_size, window=64)
    world = World(layout, pages=history // page_size + 300, slots=8)
    session, turn = world.ledger.holder(Kind.SESSION, "s"), world.ledger.holder(Kind.TURN, "t")
    sequence = Sequence(world.ledger, session)
    sequence.tokens = CountingLog()
    sequence.tokens.extend([1] * history)
    sequence.begin(turn)
    sequence.mark.cuts.clear()
    sequence.extend(history)
    sequence.advance(history)
    sequence.commit(session, session)
    sequence.table_changes()
    world.ledger.recorder = operations = Operations()
    entries = 0
    sequence.tokens.extend([2] * 32)
    sequence.begin(turn, history)
    for count in [32] + [1] * 32:
        sequence.state_source()
        sequence.extend(count)
        change = sequence.table_changes()
        entries += len(change.full) + len(change.window) if change else 0
        sequence.advance(count)
        sequence.tokens.append(3)
    sequence.commit(session, session)
    touched = sum(count for _, what, _, _, count, _ in operations if what != "move")
    work = (len(operations), touched, entries, sequence.tokens.read)
    sequence.close()
    return work


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 64])
def test_the_work_of_a_turn_does_not_depend_on_the_history(name: str, page_size: int) -> None:
    # Both histories end at the same place inside a page, so that the same number of pages is new.
    short, long = turn_work(name, page_size, 1024), turn_work(name, page_size, 102_400)
    assert short == long
    assert short[3] == 0
    assert short[0] < 250
