"""Compaction: a range of turns gives way to a few tokens; what is before it stays in memory."""

import pytest

from holdfast.core import errors
from tests.core.driver import LAYOUTS, Driver, prompt

EVERY = pytest.mark.parametrize("layout", LAYOUTS)
SUMMARY = prompt(4, 9)


def talk(layout: str, **more: object) -> Driver:
    """A session of four turns, of 10 tokens each."""
    driver = Driver(layout, 3, **more)
    driver.open("a")
    for turn in range(4):
        driver.turn("a", 7, 3, seed=turn)
    return driver


@pytest.mark.no_cover
@EVERY
@pytest.mark.parametrize(
    ("first", "last", "boundaries"),
    [
        (1, 1, [4, 14, 24, 34]),
        (2, 3, [10, 14, 24]),
        (4, 4, [10, 20, 30, 34]),
        (1, 4, [4]),
    ],
)
def test_turns_before_stay_and_turns_after_follow_word_for_word(
    layout: str, first: int, last: int, boundaries: list[int]
) -> None:
    driver = talk(layout)
    before = driver.tokens()
    left = driver.scheduler.compact("a", first, last, SUMMARY, driver.now)
    after = [*before[: 10 * (first - 1)], *SUMMARY, *before[10 * last :]]
    assert (driver.tokens(), driver.session().boundaries) == (after, boundaries)
    assert left == len(after) - driver.session().sequence.computed >= len(after) - 10 * (first - 1)
    driver.registry.counters.computed_tokens = 0
    turn = driver.turn("a", 5, 3, seed=7)
    assert driver.heard[turn.request.turn_id] == driver.says([*after, *prompt(5, 7)], 3)
    # The tokens that are left, the turn's own, and its seal.
    assert driver.registry.counters.computed_tokens == left + 8


@pytest.mark.parametrize("layout", ["dense", "window", "hybrid"])
def test_the_prefix_before_it_is_not_computed_again(layout: str) -> None:
    driver = talk(layout, checkpoints=8)
    assert driver.scheduler.compact("a", 3, 4, SUMMARY, driver.now) == len(SUMMARY)
    assert driver.session().sequence.computed == 20


@EVERY
def test_a_compacted_session_is_forked_rewound_spilled_and_compacted_again(layout: str) -> None:
    driver = talk(layout, host=200)
    driver.scheduler.compact("a", 2, 2, SUMMARY, driver.now)
    tokens = driver.tokens()
    driver.scheduler.fork("a", "b", driver.now, 3)
    driver.scheduler.spill("a", driver.now)
    driver.run()
    assert driver.tokens("b") == tokens[:24]
    driver.scheduler.rewind("b", 2, driver.now)
    driver.scheduler.compact("a", 1, 2, SUMMARY, driver.now)
    assert driver.tokens() == [*SUMMARY, *tokens[14:]]
    for name in ("a", "b"):
        history = driver.tokens(name)
        turn = driver.turn(name, 2, 4, seed=8)
        assert driver.heard[turn.request.turn_id] == driver.says([*history, *prompt(2, 8)], 4)


def test_its_last_turn_cannot_be_cut_afterwards() -> None:
    driver = talk("dense")
    driver.scheduler.compact("a", 1, 2, SUMMARY, driver.now)
    with driver.unchanged(errors.UnknownTurn):
        driver.scheduler.interrupt("a", driver.now, 0)


@pytest.mark.parametrize(("first", "last"), [(0, 1), (2, 1), (4, 5), (5, 5)])
def test_turns_that_do_not_exist_are_refused(first: int, last: int) -> None:
    driver = talk("hybrid")
    with driver.unchanged(errors.UnknownBoundary):
        driver.scheduler.compact("a", first, last, SUMMARY, driver.now)


def test_refusals_change_nothing() -> None:
    driver = talk("hybrid", context_length=50)
    with driver.unchanged(errors.EmptyTurn):
        driver.scheduler.compact("a", 1, 1, (), driver.now)
    with driver.unchanged(errors.UnknownToken):
        driver.scheduler.compact("a", 1, 1, (1000,), driver.now)
    with driver.unchanged(errors.ContextExceeded):
        driver.scheduler.compact("a", 1, 1, prompt(21), driver.now)
    driver.submit("a", prompt(3), 2)
    with driver.unchanged(errors.SessionBusy):
        driver.scheduler.compact("a", 1, 1, prompt(21), driver.now)


@pytest.mark.no_cover
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kept", [0, 1, 9, 10, 12])
def test_the_end_of_the_last_turn_gives_way_and_its_beginning_stays(layout: str, kept: int) -> None:
    driver = Driver(layout, 4)
    driver.open("a")
    driver.turn("a", 20, 4, 1)
    driver.turn("a", 10, 5, 2)
    before = driver.tokens()
    left = driver.scheduler.compact("a", 2, 2, prompt(3, 9), driver.now, kept)
    assert driver.tokens() == [*before[: 24 + kept], *prompt(3, 9)]
    sequence = driver.session().sequence
    assert left == sequence.known - sequence.computed >= 3
    assert 23 <= sequence.computed <= 24 + kept
    if driver.layout.cuts_anywhere:
        assert left == 3, "nothing else is computed again"
    turn = driver.turn("a", 4, 3, 3)
    assert turn.generated == 3, "the device verifies what is read"


def test_the_end_of_a_turn_may_give_way_to_nothing() -> None:
    driver = Driver("dense", 4)
    driver.open("a")
    driver.turn("a", 10, 5, 1)
    assert driver.scheduler.compact("a", 1, 1, (), driver.now, 10) == 0
    assert driver.tokens() == list(prompt(10, 1)) and driver.session().boundaries == [10]
    with pytest.raises(errors.EmptyTurn):
        driver.scheduler.compact("a", 1, 1, (), driver.now)


def test_a_full_queue_does_not_keep_a_turn_from_getting_shorter() -> None:
    driver = Driver("dense", 4, queue_max=1, running_max=1)
    driver.open("a")
    driver.turn("a", 10, 5, 1)
    for name in ("runs", "waits"):
        driver.open(name)
        driver.submit(name, prompt(5, 2), 9)
        driver.step()
    assert driver.scheduler.compact("a", 1, 1, (1, 2), driver.now, 10) == 2
    with pytest.raises(errors.QueueFull):
        driver.scheduler.compact("a", 1, 1, (1, 2), driver.now)
