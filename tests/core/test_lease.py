"""Leases: linear, exact about what they lock, and reported when they are dropped alive."""

import pytest

from holdfast.core.layout import Component
from holdfast.core.lease import DeadLease
from holdfast.core.sharing import tail_sources
from holdfast.core.tokens import pack
from tests.core.grove import Grove

A, B, C = [1] * 4, [2] * 4, [3] * 4
FULL, WINDOW, STATE = Component.FULL, Component.WINDOW, Component.STATE

USES = {
    "length": lambda lease: lease.length,
    "pages": lambda lease: lease.pages,
    "window_first": lambda lease: lease.window_first,
    "full_units": lambda lease: lease.full_units(0),
    "window_units": lambda lease: lease.window_units(0),
    "state_unit": lambda lease: lease.state_unit(4),
    "tail": lambda lease: lease.tail,
    "unlock_state": lambda lease: lease.unlock_state(),
    "unlock_tail": lambda lease: lease.unlock_tail(),
    "raise_window": lambda lease: lease.raise_window(1),
    "shorten": lambda lease: lease.shorten(0),
    "release": lambda lease: lease.release(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_a_dead_lease_raises_on_any_use(use) -> None:
    grove = Grove("full+window+state")
    grove.add(A, state=True)
    lease = grove.lease(A)
    assert lease.alive
    grove.release(lease)
    assert not lease.alive
    with pytest.raises(DeadLease):
        use(lease)
    grove.finish()


def test_a_stale_match_is_refused() -> None:
    grove = Grove("dense")
    grove.add(A + B)
    match = grove.tree.match("root", pack(A + B), 8)
    grove.add(C)
    with pytest.raises(ValueError, match="match again"):
        grove.tree.lease(match, "late")
    assert not grove.tree.leases.records
    grove.finish()


def test_leasing_inside_a_run_splits_it_there() -> None:
    grove = Grove("window", window=100)
    grove.add(A + B + C)
    lease = grove.lease(A + B)
    assert (lease.length, lease.pages) == (8, 2)
    assert grove.shape() == [(0, 8), (8, 12)]
    assert len(lease.full_units(0)) == 2
    assert lease.full_units(1) == lease.full_units(0)[1:]
    assert lease.window_units(1) == lease.window_units(0)[1:]
    grove.finish()


@pytest.mark.parametrize("tokens", [[], [9] * 8])
def test_a_lease_of_nothing_starts_at_the_root_and_makes_it_if_need_be(tokens: list[int]) -> None:
    grove = Grove("hybrid")
    for _ in range(2):
        lease = grove.lease(tokens)
        assert (lease.length, lease.full_units(0), lease.state_unit(0)) == (0, [], None)
        assert list(grove.tree.roots) == ["root"]
    for reader in list(grove.readers):
        grove.release(reader.lease)
    assert not grove.tree.roots, "an empty root goes with its last lease"
    grove.finish()


def test_two_who_find_nothing_share_the_root_that_the_first_of_them_makes() -> None:
    grove = Grove("dense")
    matches = [grove.tree.match("root", pack(A), 4) for _ in range(2)]
    leases = [grove.tree.lease(match, "reader") for match in matches]
    assert leases[0].record.node is leases[1].record.node
    for lease in leases:
        lease.release()
    grove.finish()


def test_a_layout_without_full_pages_leases_none() -> None:
    grove = Grove("window+state", window=100)
    grove.add(A + B, state=True)
    lease = grove.lease(A + B)
    assert lease.full_units(0) == []
    assert len(lease.window_units(0)) == 2
    grove.finish()


def test_a_match_without_any_resumable_length_leases_the_root() -> None:
    grove = Grove("hybrid")
    held = grove.insert(A + B)
    lease = grove.lease(A + B)
    assert lease.length == 0
    assert held.length == 8
    grove.finish()


@pytest.mark.asserts
def test_a_lease_locks_window_pages_from_its_window_on_and_lets_them_go_as_it_slides() -> None:
    grove = Grove("window", window=4)
    for tokens in (A, A + B, A + B + C):
        grove.add(tokens)
    lease = grove.lease(A + B + C)
    assert lease.window_first == 2
    assert grove.tree.evict(WINDOW, 100) == 2, "pages 0 and 1 are outside the window"
    assert len(lease.window_units(2)) == 1
    with pytest.raises(AssertionError, match="not leased"):
        lease.window_units(1)
    lease.raise_window(2)
    assert grove.tree.evict(WINDOW, 100) == 0
    lease.raise_window(3)
    assert lease.window_units(3) == []
    assert grove.tree.evict(WINDOW, 100) == 1
    grove.finish()


def test_a_state_stays_locked_until_the_lessee_has_its_own() -> None:
    grove = Grove("hybrid")
    grove.add(A, state=True)
    lease = grove.lease(A)
    unit = lease.state_unit(4)
    assert unit is not None
    assert lease.state_unit(3) is None
    assert grove.tree.evict(STATE, 1) == 0
    lease.unlock_state()
    lease.unlock_state()
    assert lease.state_unit(4) is None
    assert grove.tree.evict(STATE, 1) == 1
    grove.finish()


@pytest.mark.asserts
@pytest.mark.parametrize("name", ["dense", "hybrid", "full+window+state", "state", "window-only"])
def test_a_tail_stays_locked_until_its_copies_have_settled(name: str) -> None:
    grove = Grove(name)
    grove.add_tail(grove.insert(A, state=grove.layout.state), [5])
    lease = grove.lease([*A, 5])
    assert lease.length == 4, "the tail is not counted"
    held = list(lease.tail.holds())
    assert len(held) == len(grove.layout.components)
    grove.tree.flush()
    assert all(hold.alive for hold in held)
    grove.ledger.step = 1
    lease.unlock_tail(fence=1)
    lease.unlock_tail()
    assert lease.tail is None
    with pytest.raises(AssertionError, match="no tail"):
        tail_sources(lease)
    grove.release(grove.readers[0].lease)
    grove.tree.flush()
    assert not any(hold.alive for hold in held)
    assert grove.ledger.pools[grove.layout.components[0], 0].counts()["RETIRING"] >= 1, "behind the fence"
    grove.finish()


@pytest.mark.parametrize("length", [0, 4, 8, 12])
def test_a_shortened_lease_gives_up_what_lies_past_its_new_end(length: int) -> None:
    grove = Grove("full+window+state", window=100)
    grove.add(A + B + C, state=True)
    lease = grove.lease(A + B + C)
    full, window = lease.full_units(0), lease.window_units(0)
    lease.shorten(length)
    pages = length // 4
    assert (lease.length, lease.full_units(0)) == (length, full[:pages])
    assert lease.window_units(0) == window[:pages]
    assert (lease.state_unit(12) is not None) == (length == 12)
    grove.check()
    grove.tree.flush()
    assert grove.in_tree(FULL) == pages
    grove.finish()


@pytest.mark.asserts
@pytest.mark.parametrize("length", [-4, 3, 12])
def test_a_lease_is_shortened_to_page_boundaries_inside_it_only(length: int) -> None:
    grove = Grove("dense")
    lease = grove.insert(A + B)
    with pytest.raises(AssertionError, match="page boundary"):
        lease.shorten(length)
    assert lease.length == 8
    grove.finish()


def test_a_shared_lease_locks_its_own_part_of_the_path() -> None:
    grove = Grove("window", window=100)
    lease = grove.insert(A + B + C)
    second = grove.tree.share(lease, "second", 2, 1)
    assert (second.length, second.window_first) == (8, 1)
    grove.release(lease)
    grove.tree.flush()
    assert len(second.full_units(0)) == 2
    assert len(second.window_units(1)) == 1
    assert grove.in_tree(FULL) == 2
    second.release()
    grove.finish()


@pytest.mark.asserts
def test_window_pages_that_the_first_lease_does_not_keep_cannot_be_shared() -> None:
    grove = Grove("window", window=100)
    lease = grove.insert(A + B + C)
    lease.raise_window(2)
    with pytest.raises(AssertionError, match="not leased"):
        grove.tree.share(lease, "second", 3, 1)


def test_a_lease_that_is_dropped_alive_is_reported_and_its_locks_are_taken_back() -> None:
    grove = Grove("full+window+state")
    grove.add(A + B, state=True)
    lease = grove.tree.lease(grove.tree.match("root", pack(A + B), 8), "forgetful")
    del lease
    assert len(grove.tree.leases.records) == 1, "the finaliser itself changes nothing"
    grove.tree.leases.reclaim_dropped()
    (leak,) = grove.tree.leases.leaks
    assert (leak.name, leak.length, leak.step) == ("forgetful", 8, 0)
    assert leak.taken_at.startswith("test_lease.py:")
    assert not grove.tree.leases.records
    grove.tree.leases.leaks = []
    grove.finish()


def test_a_dropped_lease_does_not_take_the_tree_away_from_under_a_match() -> None:
    grove = Grove("dense")
    forgetful = grove.tree.lease_root("root", "forgetful")
    match = grove.tree.match("root", pack(A), 4)
    del forgetful
    lease = grove.tree.lease(match, "reader")
    assert grove.tree.roots["root"] is lease.record.node
    lease.release()
    grove.tree.leases.reclaim_dropped()
    grove.tree.leases.leaks = []
    grove.finish()


def test_a_lease_that_the_audit_took_back_is_dead_to_its_owner_and_not_reported_again() -> None:
    grove = Grove("dense")
    grove.add(A)
    lease = grove.tree.lease(grove.tree.match("root", pack(A), 4), "slow")
    grove.tree.leases.release(lease.record, 0)
    with pytest.raises(DeadLease, match="reclaimed by the audit"):
        lease.release()
    del lease
    grove.tree.leases.reclaim_dropped()
    assert grove.tree.leases.leaks == []
    grove.finish()


def test_a_lease_of_a_tree_that_is_gone_can_still_be_given_up() -> None:
    grove = Grove("hybrid")
    lease = grove.lease([])
    gone = grove.tree.roots.pop("root")
    del grove.tree.forest.candidates.queues["root"]
    other = grove.lease([])
    assert grove.tree.roots["root"] is not gone
    lease.release()
    assert "root" in grove.tree.forest.candidates.queues, "the new tree is not taken for the old one"
    other.release()
    assert not grove.tree.forest.candidates.queues
    state = Grove("hybrid")
    state.add(A, state=True)
    lease = state.lease(A)
    state.tree.roots.clear()
    state.tree.forest.candidates.queues.clear()
    lease.release()
    assert not state.tree.leases.records


def test_the_window_of_a_lease_whose_path_is_withdrawn_begins_inside_it() -> None:
    grove = Grove("window")
    lease = grove.insert(A)
    lease.raise_window(1)
    for hold in grove.tree.withdraw(lease).holds():
        hold.release()
    assert (lease.pages, lease.window_first) == (0, 0)
    grove.finish()


def leased(grove: Grove) -> tuple[int, ...]:
    """Units that leases keep; eviction of all that it may take must leave just these."""
    before = tuple(grove.tree.forest.leased[component] for component in grove.layout.components)
    grove.tree.flush()
    assert before == tuple(grove.in_tree(component) for component in grove.layout.components)
    return before


def test_pages_that_several_leases_keep_count_once() -> None:
    grove = Grove("window", window=4)
    first, second = grove.insert(A + B + C), grove.insert(A + B + A)
    assert leased(grove) == (4, 4), "two pages in common, and one of each"
    grove.release(second)
    assert leased(grove) == (3, 3)
    first.raise_window(2)
    assert leased(grove) == (3, 1)
    third = grove.lease(A + B, name="third")
    assert third.length == 0, "the window is gone there"
    assert leased(grove) == (3, 1)
    first.shorten(8)
    assert leased(grove) == (2, 0)
    grove.release(first)
    assert leased(grove) == (0, 0)
    grove.finish()


def test_a_run_that_is_split_counts_as_before_but_for_window_pages_that_nobody_keeps_any_more() -> None:
    grove = Grove("window", window=4)
    grove.add(A + B + C)
    last = grove.lease(A + B + C)
    assert leased(grove) == (3, 3), "a run gives its window pages up as one"
    other = grove.insert(A + A)
    assert leased(grove) == (4, 4), "the other alone keeps the window page of page 0"
    grove.release(other)
    assert leased(grove) == (3, 2)
    grove.release(last)
    assert leased(grove) == (0, 0)
    grove.finish()


def test_a_state_counts_as_leased_until_the_last_lease_lets_it_go() -> None:
    grove = Grove("hybrid")
    grove.add(A, state=True)
    leases = [grove.lease(A), grove.lease(A)]
    assert leased(grove) == (1, 1)
    leases[0].unlock_state()
    assert leased(grove) == (1, 1)
    leases[1].unlock_state()
    assert leased(grove) == (1, 0)
    grove.finish()


def test_what_a_session_takes_out_of_the_tree_is_not_leased_any_more() -> None:
    grove = Grove("full+window+state", window=100)
    lease = grove.insert(A)
    again = grove.insert(A + B, state=True)
    grove.release(again)
    held = grove.lease(A + B)
    assert leased(grove) == (2, 2, 1)
    for hold in grove.tree.withdraw(held).holds():
        hold.release()
    assert leased(grove) == (1, 1, 0)
    grove.release(lease)
    grove.finish()
