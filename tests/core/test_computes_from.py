"""A turn that computes its input itself: nothing past where it says so comes from the prefix tree."""

import pytest

from tests.core.driver import LAYOUTS, Driver, prompt


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_match_ends_where_the_turn_computes_from(layout: str) -> None:
    """A dense prefix can be cut anywhere, the others are resumed where a point was left, or not at all."""
    driver = Driver(layout, 3)
    for _ in range(2):
        driver.request(prompt(40), 4)
        driver.run()
    shared = driver.request(prompt(40), 4)
    driver.run()
    assert shared.cached == 39
    for first, dense in ((0, 0), (20, 18), (39, 39), (90, 39)):
        turn = driver.request(prompt(40), 4, computes_from=first)
        driver.run()
        assert turn.cached <= first
        assert turn.computed == 40 - turn.cached + 3
        if layout == "dense":
            assert turn.cached == dense


def test_a_turn_does_not_wait_for_a_prefix_that_it_may_not_use() -> None:
    driver = Driver("dense", 3, budget=12)
    driver.request(prompt(40), 4)
    driver.plan()
    driver.settle()
    alone = driver.request(prompt(40), 4, computes_from=0)
    other = driver.request(prompt(40), 4)
    driver.budget = 200
    plan = driver.plan()
    assert [row.turn for row in plan.rows[1:]] == [alone]
    driver.settle()
    driver.run()
    assert (alone.cached, other.cached) == (0, 39)


def test_a_later_turn_computes_its_own_input_whatever_the_tree_has() -> None:
    driver = Driver("dense", 3)
    driver.open("a")
    driver.turn("a", 12, 4)
    turn = driver.turn("a", 10, 4, computes_from=16)
    assert (turn.cached, turn.computed) == (16, 14 - 1)
