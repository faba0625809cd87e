"""Admission: what it takes, where it asks for resume points, and that all of it can be undone."""

import pytest

from holdfast.core.admission import Admission, match_limit, packed_prompt
from holdfast.core.layout import Component, MemoryLayout
from holdfast.core.tokens import pack
from tests.core.driver import LAYOUTS, PAGE_SIZES, Driver, prompt


@pytest.mark.no_cover
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_admission_on_a_session_with_history_can_be_undone_whole(layout: str, page_size: int) -> None:
    driver = Driver(layout, page_size, durable_turns=True)
    session = driver.open("a")
    for seed in range(3):
        driver.turn("a", 9, 4, seed)
    turn = driver.submit("a", prompt(7, 5), 4)
    before = driver.snapshot()["sessions"]["a"]
    for _ in range(3):
        admission = Admission(driver.registry, session, turn)
        admission.take()
        assert session.sequence.mark is not None and sum(session.holder.held) == 0
        assert session.sequence.known == 39 + 7
        admission.undo()
        assert driver.snapshot()["sessions"]["a"] == before, "the same points, pinned as they were"
    assert driver.scheduler.audit.census() == []
    driver.run()
    assert (turn.cached, turn.computed) == (39, 10)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_admission_that_leans_on_a_tail_can_be_undone_whole(layout: str) -> None:
    driver = Driver(layout, 16, leave_history=True)
    driver.open("a")
    driver.turn("a", 20, 5)
    history = driver.tokens("a")
    driver.close("a")
    session = driver.open("b")
    turn = driver.submit("b", (*history, 1, 2, 3), 4)
    counts = driver.all_counts()
    admission = Admission(driver.registry, session, turn)
    admission.take()
    assert session.sequence.computed == 25 and driver.registry.copies
    admission.undo()
    assert driver.all_counts() == counts and not driver.registry.copies and session.sequence.lease is None
    assert driver.tokens("b") == []
    driver.run()
    assert turn.cached == 25


def test_a_tail_copy_that_finds_no_room_gives_the_lease_back() -> None:
    driver = Driver("hybrid", 16, leave_history=True)
    driver.open("a")
    driver.turn("a", 20, 5)
    history = driver.tokens("a")
    driver.close("a")
    session = driver.open("b")
    driver.open("other", tenant="blue")
    driver.submit("other", prompt(4, 8), 30)
    driver.step()
    turn = driver.submit("b", (*history, 1, 2, 3), 4)
    with driver.starved("tail copy") as struck:
        driver.step()
        driver.step()
    assert len(struck) == 2 and session.sequence.lease is None
    assert [record.name for record in driver.registry.tree.leases.records.values()] == ["other"]
    driver.run()
    assert turn.cached == 25


def test_points_are_asked_for_where_somebody_will_want_to_go_on() -> None:
    driver = Driver(MemoryLayout(4, state=True, checkpoint_tokens=10))
    session = driver.open("a")
    turn = driver.submit("a", prompt(23), 4)
    admission = Admission(driver.registry, session, turn)
    admission.take()
    assert session.sequence.mark is not None
    assert session.sequence.mark.cuts == [20, 23], "the last whole page of the prompt, and its end"
    admission.undo()
    driver.run()
    later = driver.submit("a", prompt(10, 1), 4)
    admission = Admission(driver.registry, session, later)
    admission.take()
    assert session.sequence.mark.cuts == [], "an input of ten tokens is not long"
    admission.undo()
    driver.scheduler.abort("a", later.request.turn_id, driver.now)


def test_a_first_turn_asks_for_a_point_where_the_tree_branches() -> None:
    driver = Driver("hybrid", 4)
    driver.request(prompt(30), 2)
    driver.run()
    session = driver.open("b")
    turn = driver.submit("b", (*prompt(18), 999, 998, 997, 996, 995, 994, 993), 3)
    admission = Admission(driver.registry, session, turn)
    admission.take()
    assert session.sequence.mark is not None
    assert admission.branch == 16 and session.sequence.computed == 0, "the tree has no state there"
    assert session.sequence.mark.cuts == [16, 24]
    admission.undo()
    driver.run()
    third = driver.request((*prompt(17), 5, 5), 2)
    driver.run()
    assert third.cached == 16, "the next one resumes at the branch"


def test_what_a_prompt_is_matched_by() -> None:
    driver = Driver("dense", 4)
    session = driver.open("a")
    first = driver.submit("a", (1, 2, 3, 4, 5), 3)
    assert packed_prompt(session, first) == pack((1, 2, 3, 4, 5))
    assert match_limit(first, pack((1, 2, 3, 4, 5))) == 4, "one token at least is computed"
    driver.run()
    history = driver.tokens("a")
    second = driver.submit("a", (6, 7), 3)
    assert packed_prompt(session, second) == pack((*history, 6, 7))
    assert match_limit(second, pack((*history, 6, 7))) == 8, "a later turn leans on history alone"
    driver.step()
    assert packed_prompt(session, second) == pack(driver.tokens("a")), "the input is in the log by now"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_later_turn_of_a_session_that_lost_its_memory_leans_on_its_history_in_the_tree(layout: str) -> None:
    driver = Driver(layout, 4)
    session = driver.open("a")
    driver.turn("a", 30, 4)
    driver.registry.drop_memory(session)
    turn = driver.turn("a", 5, 3, 1)
    assert turn.cached == 28, "the prompt's whole pages are still there"
    assert turn.computed == 34 - 28 + 5 + 2
    history = driver.tokens("a")
    assert history[-3:] == driver.says(history[:-3], 3)


def test_a_turn_without_input_gets_a_copy_of_the_page_that_it_computes_into() -> None:
    """The last token of a history that is leased whole is computed again: inside a page that others read."""
    driver = Driver("dense", 4)
    driver.open("a")
    driver.turn("a", 9, 3)
    child = driver.scheduler.fork("a", "b", driver.now)
    driver.run()
    assert child.sequence.lease is not None
    assert child.sequence.known == child.sequence.computed == child.sequence.lease.length == 12
    turn = driver.submit("b", (), 2, goes_on=True)
    plan = driver.plan()
    assert [copy.component for copy in plan.copies] == [Component.FULL]
    driver.run()
    assert (turn.cached, turn.generated) == (12, 2)
    assert driver.tokens("b")[-2:] == driver.says(driver.tokens("b")[:-2], 2)
