"""The prefix tree: insert, split, match, tombstones, states and their budget, tails, eviction, tenants."""

import pytest

from holdfast.core.layout import Component
from holdfast.core.ledger import Kind
from holdfast.core.points import Run
from holdfast.core.tokens import pack
from tests.core.grove import Grove
from tests.core.world import LAYOUTS, PAGE_SIZES

A, B, C = [1] * 4, [2] * 4, [3] * 4
FULL, WINDOW, STATE = Component.FULL, Component.WINDOW, Component.STATE


# --- insert, split, match ---------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_match_ends_at_the_last_whole_page_that_agrees(page_size: int) -> None:
    grove = Grove("dense", page_size)
    tokens = list(range(7 * page_size))
    grove.add(tokens)
    for shared in (0, 1, page_size - 1, page_size, 3 * page_size + page_size // 2, 7 * page_size - 1):
        prompt = tokens[:shared] + [9999] * (7 * page_size - shared)
        assert grove.match(prompt) == shared // page_size * page_size
    assert grove.match(tokens) == 7 * page_size
    assert grove.match(tokens, limit=7 * page_size - 1) == 6 * page_size
    assert grove.match(tokens * 2) == 7 * page_size
    grove.finish()


def test_runs_that_part_are_split_where_they_part() -> None:
    grove = Grove("dense")
    grove.add(A + B + C)
    grove.add(A + B + A)
    assert grove.shape() == [(0, 8), (8, 12), (8, 12)]
    assert grove.in_tree(FULL) == 4
    assert grove.match(A + B + A) == 12
    grove.add(A + C)
    assert grove.shape() == [(0, 4), (4, 8), (4, 8), (8, 12), (8, 12)]
    grove.finish()


def test_a_look_up_changes_nothing_but_recency() -> None:
    grove = Grove("dense")
    grove.add(A + B)
    grove.add(A + C)
    version, shape = grove.tree.version, grove.shape()
    grove.match(A + C)
    grove.match([*A, 2, 2, 9, 9])
    assert (grove.tree.version, grove.shape()) == (version, shape)
    grove.tree.evict(FULL, 1)
    assert grove.match(A + B) == 4, "B was looked at longest ago"
    assert grove.match(A + C) == 8
    grove.finish()


def test_inserting_what_is_there_returns_the_duplicates_and_leases_the_trees() -> None:
    grove = Grove("window", window=100)
    first = grove.insert(A + B)
    pools = [grove.ledger.pool(FULL), grove.ledger.pool(WINDOW)]
    free = [len(pool.free) for pool in pools]
    second = grove.insert(A + B + C)
    assert [len(pool.free) for pool in pools] == [count - 1 for count in free]
    assert second.full_units(0)[:2] == first.full_units(0)
    assert second.window_units(0)[:2] == first.window_units(0)
    assert grove.shape() == [(0, 8), (8, 12)]
    grove.finish()


def test_the_first_page_whose_unit_changed_is_reported() -> None:
    grove = Grove("dense")
    grove.insert(A + B)
    lease = grove.lease(A)
    assert grove.tree.extend(lease, pack(B + C), grove.take(FULL, 2), None, 0) == 1
    assert grove.tree.extend(lease, pack(A), grove.take(FULL, 1), None, 0) == 4, "nothing was there"
    grove.finish()


def test_duplicates_that_a_step_in_flight_reads_are_retired() -> None:
    grove = Grove("window", window=100)
    grove.add(A + B)
    grove.ledger.step = 1
    lease = grove.tree.lease_root("root", "late")
    full, window = grove.take(FULL, 2), grove.take(WINDOW, 2)
    full.fence(1)
    window.fence(1)
    grove.tree.extend(lease, pack(A + B), full, Run(window, 0), 0)
    for component in (FULL, WINDOW):
        assert grove.ledger.pool(component).counts()["RETIRING"] == 2
    lease.release()
    grove.finish()


@pytest.mark.asserts
def test_only_whole_pages_go_in() -> None:
    grove = Grove("dense")
    lease = grove.lease()
    hold = grove.take(FULL, 1)
    for key in ([], [1, 2, 3]):
        with pytest.raises(AssertionError, match="whole pages"):
            grove.tree.extend(lease, pack(key), hold, None, 0)
    hold.release()
    grove.finish()


@pytest.mark.parametrize("name", LAYOUTS)
def test_trees_of_different_tenants_never_meet(name: str) -> None:
    grove = Grove(name)
    grove.add(A + B, state=grove.layout.state, root="one")
    assert grove.match(A + B, root="one") == 8
    assert grove.match(A + B, root="two") == 0
    grove.add(A + B, state=grove.layout.state, root="two")
    for component in grove.layout.components:
        holders = [
            grant.holder.name for grant in grove.ledger.live.values() if grant.pool.component is component
        ]
        assert sorted(set(holders)) == ["one", "two"]
    assert set(grove.tree.roots) == {"one", "two"}
    grove.finish()


# --- components: windows, tombstones, states --------------------------------------------------------


def test_a_match_needs_every_window_page_it_would_read() -> None:
    grove = Grove("window", window=8)
    grove.add(A + B + C, window=1)
    assert grove.match(A + B + C) == 12, "pages 1 and 2 hold all that position 12 reads"
    assert grove.match(A + B + A) == 0, "position 8 reads page 0, which is a tombstone"
    assert grove.tree.match("root", pack(A + B + A), 12).branch == 8
    grove.finish()


def test_a_tombstone_is_filled_by_whoever_computes_the_run_again() -> None:
    grove = Grove("window", window=8)
    lease = grove.insert(A + B + C, window=2)
    kept = lease.window_units(2)
    assert grove.match(A + B + C) == 0
    grove.add(A + B + C)
    assert grove.match(A + B + C) == 12
    again = grove.lease(A + B + C)
    assert again.window_units(2) == kept, "the tree's own page stays"
    assert grove.in_tree(WINDOW) == 3
    grove.finish()


def test_window_pages_fill_the_nodes_of_a_path_from_its_end() -> None:
    grove = Grove("window", window=100)
    grove.add(A + B, window=2)
    grove.add(A + C, window=2)
    lease = grove.insert(A + B, window=2)
    hold = grove.take(WINDOW, 2)
    units = list(hold.units)
    grove.tree.fill_window(lease, Run(hold, 0))
    assert lease.window_units(0) == units
    assert grove.match(A + B) == 8
    grove.tree.fill_window(lease, Run(grove.take(WINDOW, 1), 1))
    assert lease.window_units(0) == units
    grove.finish()


def test_a_state_is_found_at_exactly_its_length() -> None:
    grove = Grove("hybrid")
    grove.add(A + B + C, state=True)
    grove.add(A, state=True)
    assert grove.match(A + B + C) == 12
    assert grove.match(A + B + A) == 4, "full KV reaches to 8, the state only to 4"
    assert grove.tree.match("root", pack(A + B + A), 12).branch == 8
    assert grove.match(A + B + C, limit=11) == 4
    assert grove.lease(A + B + C).state_unit(12) is not None
    grove.finish()


def test_a_second_state_at_the_same_length_and_one_at_the_root_are_released() -> None:
    grove = Grove("hybrid")
    lease = grove.insert(A, state=True)
    unit = grove.lease(A).state_unit(4)
    grove.tree.set_state(lease, grove.take(STATE, 1))
    grove.tree.set_state(grove.lease(), grove.take(STATE, 1))
    assert grove.in_tree(STATE) == 1 == grove.tree.forest.states
    assert grove.lease(A).state_unit(4) == unit
    grove.finish()


def test_states_stay_within_their_budget_and_the_oldest_goes() -> None:
    grove = Grove("hybrid", state_budget=2)
    for run in (A, B, C):
        grove.add(run, state=True)
    assert grove.tree.forest.states == 2
    assert [grove.match(run) for run in (A, B, C)] == [0, 4, 4]
    held = [grove.lease(B), grove.lease(C)]
    grove.add(A, state=True)
    assert grove.tree.forest.states == 2, "both are leased: the newcomer is not kept"
    assert grove.match(A) == 0
    for lease in held:
        grove.release(lease)
    grove.finish()


# --- tails ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_tail_is_matched_to_its_exact_end(name: str) -> None:
    grove = Grove(name)
    lease = grove.insert(A, state=grove.layout.state)
    grove.add_tail(lease, [5, 6])
    assert grove.match([*A, 5, 6, 7]) == 6
    assert grove.match([*A, 5, 6]) == 6
    assert grove.match([*A, 5]) == 4
    assert grove.match([*A, 5, 6], limit=5) == 4
    grove.add_tail(lease, [5, 6, 7])
    assert grove.match([*A, 5, 6, 7, 8]) == 7, "the longest of several"
    grove.check()
    found = grove.tree.match("root", pack([*A, 5, 6, 8]), 7)
    assert (found.length, found.branch, found.tail.end) == (6, 6, 6)
    grove.finish()


def test_a_path_that_goes_on_past_a_tail_wins() -> None:
    grove = Grove("hybrid")
    lease = grove.insert(A, state=True)
    grove.add_tail(lease, [2, 2])
    grove.add(A + B, state=True)
    assert grove.match(A + B) == 8
    assert grove.match([*A, 2, 2, 9]) == 6
    grove.finish()


def test_a_tail_whose_window_has_a_gap_below_it_cannot_be_resumed_from() -> None:
    grove = Grove("window", window=8)
    lease = grove.insert(A + B, window=2)
    grove.add_tail(lease, [5])
    found = grove.tree.match("root", pack(A + B + [5]), 9)
    assert (found.length, found.branch) == (0, 9)
    grove.finish()


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_second_tail_with_the_same_tokens_is_given_back(name: str) -> None:
    grove = Grove(name)
    lease = grove.insert(A, state=grove.layout.state)
    grove.add_tail(lease, [5, 6])
    before = [grove.in_tree(component) for component in grove.layout.components]
    grove.add_tail(lease, [5, 6])
    assert [grove.in_tree(component) for component in grove.layout.components] == before
    assert grove.writer.held == [0] * len(before)
    grove.finish()


def test_tails_count_against_the_budget_of_states() -> None:
    grove = Grove("hybrid", state_budget=1)
    lease = grove.insert(A, state=True)
    grove.add_tail(lease, [5])
    assert grove.tree.forest.states == 1
    assert grove.match([*A, 5]) == 5, "the older state went"
    assert grove.match(A) == 0
    tail = grove.lease([*A, 5])
    grove.add_tail(lease, [6])
    assert grove.match([*A, 6]) == 0, "the leased one stays, the newcomer does not"
    assert tail.tail.state is not None
    grove.finish()


@pytest.mark.asserts
def test_nobody_extends_below_a_leased_tail() -> None:
    grove = Grove("dense")
    grove.add_tail(grove.insert(A), [5])
    lease = grove.lease([*A, 5])
    hold = grove.take(FULL, 1)
    with pytest.raises(AssertionError, match="tail must be copied"):
        grove.tree.extend(lease, pack(B), hold, None, 0)
    hold.release()
    with pytest.raises(AssertionError, match="inside a page"):
        grove.tree.add_tail(lease, pack(A), None, None, None)
    grove.finish()


# --- eviction ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_what_nobody_leases_can_all_be_evicted(name: str, page_size: int) -> None:
    grove = Grove(name, page_size)
    for branch in range(3):
        tokens = [7] * page_size + [branch] * (2 * page_size)
        grove.add(tokens, state=grove.layout.state)
    for component in grove.layout.components:
        grove.tree.evict(component, 1000)
        grove.check()
    assert not grove.tree.roots
    grove.finish()


def test_leaves_go_first_least_recently_used_and_as_many_as_are_asked_for() -> None:
    grove = Grove("dense")
    grove.add(A + B)
    grove.add(A + C + C)
    grove.match(A + B)
    assert grove.tree.evict(FULL, 1) == 2, "whole runs go"
    assert grove.shape() == [(0, 4), (4, 8)]
    assert grove.match(A + C + C) == 4
    assert grove.tree.evict(FULL, 5) == 2
    assert grove.shape() == []
    assert grove.tree.evict(FULL, 1) == 0
    grove.finish()


def test_a_leased_path_is_safe_and_what_hangs_beside_it_is_not() -> None:
    grove = Grove("dense")
    grove.add(A + B)
    grove.add(A + C)
    lease = grove.lease(A + B)
    units = lease.full_units(0)
    assert grove.tree.evict(FULL, 100) == 1
    assert grove.match(A + C) == 4
    assert lease.full_units(0) == units
    grove.release(lease)
    assert grove.tree.evict(FULL, 100) == 2
    grove.finish()


def test_a_sessions_prefix_outlives_a_one_shot_that_was_used_later() -> None:
    grove = Grove("dense")
    grove.add(A, rank=1)
    grove.add(B)
    grove.tree.evict(FULL, 1)
    assert (grove.match(A), grove.match(B)) == (4, 0)
    grove.finish()


@pytest.mark.parametrize("component", [WINDOW, STATE])
def test_one_component_can_be_evicted_where_the_rest_stays_useful(component: Component) -> None:
    grove = Grove("full+window+state", window=4)
    grove.add(A, state=True)
    grove.add(A + B, state=True)
    grove.match(A + B)
    lease = grove.lease(A + B)
    freed = grove.tree.evict(component, 1)
    assert freed == 1
    assert grove.in_tree(FULL) == 2
    assert grove.match(A) == 0
    assert grove.match(A + B) == 8
    assert grove.tree.evict(component, 10) == 0, "the rest is leased"
    grove.release(lease)
    grove.finish()


@pytest.mark.parametrize(
    "name", ["window", "hybrid", "full+window+state", "window+state", "window-only", "state"]
)
def test_a_leaf_that_nothing_can_resume_from_goes_with_its_last_use(name: str) -> None:
    grove = Grove(name)
    grove.add(A + B, state=grove.layout.state)
    component = STATE if grove.layout.state else WINDOW
    grove.tree.evict(component, 100)
    assert grove.shape() == []
    assert not grove.tree.roots, "the root goes with its last child"
    grove.finish()


def test_evicting_a_tail_frees_its_page_and_slot_and_then_its_node_may_go() -> None:
    grove = Grove("full+window+state")
    grove.add_tail(grove.insert(A), [5])
    grove.release(grove.readers[0].lease)
    assert grove.in_tree(FULL) == 2
    assert grove.tree.evict(STATE, 1) == 1
    assert grove.shape() == []
    assert grove.in_tree(FULL) == grove.in_tree(WINDOW) == 0
    grove.finish()


def test_a_flush_evicts_what_nobody_holds_and_keeps_the_rest() -> None:
    grove = Grove("full+window+state")
    grove.add(A + B, state=True)
    grove.add(A + C, state=True)
    lease = grove.lease(A + C)
    grove.tree.flush()
    assert grove.shape() == [(0, 4), (4, 8)]
    assert grove.match(A + C) == 8
    assert grove.match(A + B) == 0
    assert lease.alive
    grove.finish()


def test_a_flush_in_portions_evicts_no_more_than_there_was() -> None:
    grove = Grove("full+window+state")
    old = [[first, *A[1:], *B] for first in range(10, 14)]
    for tokens in old:
        grove.add(tokens, state=True)
    grove.add(old[0], root="other", state=True)
    grove.add(A + C, state=True)
    lease = grove.lease(A + C)
    before = grove.in_tree(FULL)
    portions = 0
    for _ in grove.tree.flushing(1):
        portions += 1
        assert portions < 50, "it comes to an end"
        if portions == 1:
            assert before - grove.in_tree(FULL) == 2, "a portion is one run"
        grove.add([100 + portions, *A[1:], *B], state=True)  # Somebody else goes on.
    assert portions > len(old)
    assert lease.alive and grove.match(A + C) == 8
    assert [grove.match(tokens) for tokens in old] == [0] * len(old) and grove.match(
        old[0], root="other"
    ) == 0
    assert grove.match([100 + portions, *A[1:], *B]) == 8
    grove.finish()


def test_a_flush_in_portions_pauses_at_each_tenant() -> None:
    """Also where it has nothing to evict: there may be thousands."""
    grove = Grove("dense")
    for number in range(5):
        grove.insert(A + B, root=f"tenant {number}")
    assert len(list(grove.tree.flushing(1))) == 5
    assert grove.in_tree(FULL) == 10, "leases keep it all"
    grove.finish()


def test_evicted_units_that_a_step_in_flight_reads_are_retired() -> None:
    grove = Grove("full+window+state")
    grove.add(A + B, state=True)
    lease = grove.lease(A + B)
    grove.ledger.step = 3
    grove.release(lease, fence=3)
    grove.tree.flush()
    for component in grove.layout.components:
        counts = grove.ledger.pool(component).counts()
        assert counts["TREE"] == 0
        assert counts["RETIRING"] > 0
    grove.ledger.settle(3)
    assert all(len(pool.free) == pool.size for pool in grove.ledger.pools.values())
    grove.finish()


def test_a_parent_whose_child_a_step_reads_is_fenced_by_it() -> None:
    grove = Grove("dense")
    grove.add(A + B)
    grove.add(A + C)
    lease = grove.lease(A + B)
    grove.ledger.step = 1
    grove.release(lease, fence=1)
    grove.tree.flush()
    assert grove.ledger.pool(FULL).counts()["RETIRING"] == 2, "the leaf and the prefix that it was read with"
    assert grove.ledger.pool(FULL).counts()["FREE"] == grove.ledger.pool(FULL).size - 2
    grove.finish()


def test_the_holder_of_shared_units_is_the_tenants_tree() -> None:
    grove = Grove("hybrid")
    grove.add(A, state=True, root="tenant 7")
    assert {repr(grant.holder) for grant in grove.ledger.live.values()} == {"TREE tenant 7"}
    assert grove.ledger.pool(FULL).by_kind[Kind.TREE] == 1
    grove.finish()
