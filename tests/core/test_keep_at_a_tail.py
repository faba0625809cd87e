"""A session resumes at a tail, publishes its prompt, and is interrupted before it leaves a point of its own.

Where it began lies inside the pages that it has published since: going back there copies the one page that is
partly filled, or computes everything again if no page is free.
"""

import pytest

from tests.core.driver import STATEFUL, Driver, prompt

PAGED = [name for name in STATEFUL if name != "state"]
RESUMED = 11
INPUT_END = 19


def interrupted_at_a_tail(layout: str) -> Driver:
    """Eleven tokens were left behind by a request; a session goes on from them and has said three tokens."""
    driver = Driver(layout, page_size=3)
    first = driver.request(prompt(10), 2)
    driver.run()
    driver.open("a")
    history = prompt(10) + tuple(driver.heard[first.request.turn_id][:1])
    turn = driver.submit("a", history + prompt(8, 3), 9, turn_id="t")
    driver.until(lambda: turn.generated == 3)
    sequence = driver.session("a").sequence
    assert turn.cached == RESUMED
    assert sequence.lease is not None
    assert sequence.lease.length == 18
    assert [point.length for point in sequence.points] == [RESUMED]
    return driver


@pytest.mark.parametrize("layout", STATEFUL)
def test_it_goes_on_from_where_it_had_resumed(layout: str) -> None:
    driver = interrupted_at_a_tail(layout)
    driver.scheduler.abort("a", "t", driver.now, keep=1)
    assert driver.session("a").sequence.computed == RESUMED
    driver.run()
    assert len(driver.tokens()) == INPUT_END + 1
    turn = driver.turn("a", 4, 3, seed=5)
    assert driver.tokens()[-3:] == driver.says(driver.tokens()[:-3], 3)
    assert turn.cached == RESUMED
    driver.close()
    driver.scheduler.flush()
    assert driver.all_free()


@pytest.mark.parametrize("layout", PAGED)
def test_without_a_page_for_the_copy_it_is_computed_again(layout: str) -> None:
    driver = interrupted_at_a_tail(layout)
    with driver.starved("cut copy", times=1) as struck:
        driver.scheduler.abort("a", "t", driver.now, keep=1)
    assert struck == ["cut copy"]
    assert driver.session("a").sequence.computed == 0
    assert len(driver.tokens()) == INPUT_END + 1
    driver.run()
    driver.turn("a", 4, 3, seed=5)
    assert driver.tokens()[-3:] == driver.says(driver.tokens()[:-3], 3)
    driver.close()
    driver.scheduler.flush()
    assert driver.all_free()
