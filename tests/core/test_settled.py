"""A turn that is cut with all it has keeps no more than is settled: half a tool call stays out."""

import pytest

from holdfast.core.turn import KEEP_ALL
from tests.core.driver import LAYOUTS, Driver, prompt


@pytest.mark.parametrize("keep", [KEEP_ALL, 4])
@pytest.mark.parametrize("settled", [None, 0, 3, 9])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_interrupted_turn_keeps_what_is_settled(layout: str, settled: int | None, keep: int) -> None:
    driver = Driver(layout, 3)
    driver.open("a")
    turn = driver.submit("a", prompt(6, 2), 30)
    driver.until(lambda: turn.generated == 5)
    turn.settled = settled
    driver.plan()
    driver.scheduler.interrupt("a", driver.now, keep)
    driver.run()
    kept = {None: 6, 0: 0, 3: 3, 9: 5}[settled] if keep == KEEP_ALL else keep
    assert turn.generated == kept, "a number of tokens is obeyed exactly"
    assert len(driver.tokens("a")) == 6 + kept
