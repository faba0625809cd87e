"""Fences of the prefix tree: what a plan in flight reads is not free, whichever way the tree gives it up."""

import pytest

from holdfast.core.layout import Component
from holdfast.core.ledger import Kind
from tests.core.driver import Driver
from tests.core.grove import Grove

A = [1, 2, 3, 4]
STEP = 3


def in_flight(grove: Grove) -> None:
    """A plan is in flight that has not settled."""
    grove.ledger.step = STEP


def retiring(grove: Grove, component: Component) -> int:
    return grove.ledger.pool(component).by_kind[Kind.RETIRING]


def test_a_state_that_was_unlocked_waits_for_the_plan_that_reads_it() -> None:
    grove = Grove("hybrid")
    grove.add(A, state=True)
    lease = grove.lease(A)
    in_flight(grove)
    lease.unlock_state(STEP)
    assert grove.tree.evict(Component.STATE, 1) == 1
    assert retiring(grove, Component.STATE) == 1
    grove.finish()


def test_window_pages_that_were_unlocked_wait_for_the_plan_that_reads_them() -> None:
    grove = Grove("window")
    grove.add(A)
    lease = grove.lease(A)
    in_flight(grove)
    lease.raise_window(1, STEP)
    assert grove.tree.evict(Component.WINDOW, 1) == 1
    assert retiring(grove, Component.WINDOW) == 1
    grove.finish()


def test_a_tail_that_was_unlocked_waits_and_so_does_the_node_that_it_hangs_on() -> None:
    grove = Grove("dense")
    writer = grove.insert(A)
    grove.add_tail(writer, [9])
    grove.release(writer)
    lease = grove.lease([*A, 9])
    in_flight(grove)
    lease.unlock_tail(STEP)
    grove.release(lease)
    grove.tree.flush()
    assert retiring(grove, Component.FULL) == 2
    grove.finish()


def test_what_is_withdrawn_is_still_read_by_those_who_let_go() -> None:
    grove = Grove("full+window+state")
    lease = grove.insert(A, state=True)
    other = grove.lease(A)
    in_flight(grove)
    grove.release(other, STEP)
    taken = grove.tree.withdraw(lease)
    holds = list(taken.holds())
    assert [hold.grant.fence for hold in holds] == [STEP, STEP]
    for hold in holds:
        hold.release()
    assert (retiring(grove, Component.FULL), retiring(grove, Component.WINDOW)) == (1, 1)
    grove.finish()


@pytest.mark.no_cover
@pytest.mark.parametrize("layout", ["dense", "window", "hybrid", "full+window+state"])
@pytest.mark.parametrize("page_size", [3, 16])
def test_what_a_fork_copies_is_not_free_when_its_parent_leaves_the_device(
    layout: str, page_size: int
) -> None:
    """The parent takes back what the tree keeps for it alone, and gives up what it does not read."""
    copied = 0
    for length in range(1, 35):
        driver = Driver(layout, page_size, host=400)
        driver.open("a")
        driver.turn("a", 7, 3)
        driver.turn("a", 20, 4, 1)
        driver.run()
        driver.scheduler.fork("a", "b", driver.now, known=length)
        driver.scheduler.spill("a", driver.now)
        for copy in driver.plan().copies:
            assert copy.source not in driver.ledger.pool(copy.component).free, (length, copy)
            copied += 1
        driver.run()
    assert copied
