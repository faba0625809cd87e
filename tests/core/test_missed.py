"""Effects of single statements that no story is about: each test fails without one of them."""

from holdfast.core.deadlines import SLACK, Deadlines
from holdfast.core.ledger import Kind
from tests.core.driver import Driver


def test_deadlines_come_up_in_order_after_dropped_ones_were_cleared_away() -> None:
    deadlines = Deadlines()
    deadlines.add(1, 9.0, "late")
    deadlines.add(2, 3.0, "early")
    count = 3 + SLACK
    for key in range(10, 10 + count):
        deadlines.add(key, 5.0, "dropped")
    for key in range(10, 10 + count):
        deadlines.drop(key)
    assert len(deadlines) < count, "dropped entries were cleared away"
    assert list(deadlines.due(4.0)) == [(2, "early")]


def test_a_parcel_names_who_carries_it() -> None:
    driver = Driver("dense", 4, host=50)
    session = driver.open("a")
    driver.turn("a", 9, 3)
    assert driver.scheduler.spill("a", driver.now)
    assert session.parcel is not None
    holder = session.parcel.holder
    assert (holder.kind, holder.name, holder.account.name) == (Kind.TRANSIT, "a", session.tenant)
