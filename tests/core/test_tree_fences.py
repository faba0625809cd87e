"""Fences of the prefix tree: what a plan in flight reads is not free, whichever way the tree gives it up."""

from holdfast.core.layout import Component
from holdfast.core.ledger import Kind
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
