"""Planted bugs of the prefix tree and of leases.

Each function replaces one site by a version that differs in the effect of about one statement, and never
raises of itself: the audit, or a row that reads the memory back, must notice it. See planting.py.
"""

from __future__ import annotations

from holdfast.core import node as nodes
from holdfast.core.forest import Forest
from holdfast.core.lease import Lease, LeaseRecord
from holdfast.core.lease_table import LeaseTable
from holdfast.core.ledger import Hold
from holdfast.core.node import Match, Node, Tail
from holdfast.core.points import Run
from holdfast.core.prefix import PrefixTree
from holdfast.sim.planting import Mutant, Patcher


def duplicate_insert_leaks(patcher: Patcher) -> None:
    """Pages that the tree has already are neither kept nor given back."""
    original = PrefixTree._absorb

    def faulty(self: PrefixTree, node: Node, full: Hold | None, window: Run | None) -> None:
        if full is not None:
            patcher.reach()
            patcher.park(full.split_front(len(node.key) // self.page_bytes))
        original(self, node, None, window)

    patcher.replace(PrefixTree, "_absorb", faulty)


def duplicate_insert_frees_the_trees_page(patcher: Patcher) -> None:
    """The tree's own pages are freed together with the newcomer's, and stay in the tree."""
    original = PrefixTree._absorb

    def faulty(self: PrefixTree, node: Node, full: Hold | None, window: Run | None) -> None:
        if node.full is not None:
            patcher.reach()
            self.ledger.let_go(node.full.pool, list(node.full.units), 0)
        original(self, node, full, window)

    patcher.replace(PrefixTree, "_absorb", faulty)


def publish_leaves_stale_tables(patcher: Patcher) -> None:
    """A sequence that publishes a duplicate goes on reading its own pages, which were freed."""
    original = PrefixTree.extend

    def faulty(
        self: PrefixTree, lease: Lease, key: bytes, full: Hold | None, window: Run | None, rank: int
    ) -> int:
        changed = original(self, lease, key, full, window, rank)
        if changed < lease.pages:
            patcher.reach()
        return lease.pages

    patcher.replace(PrefixTree, "extend", faulty)


def leased_leaf_is_evicted(patcher: Patcher) -> None:
    """Eviction takes a leaf that was leased again after it had become a candidate."""
    original_remove = Forest.remove

    def may_go(member: Node | Tail) -> bool:
        if isinstance(member, Tail):
            return not member.leases and member.full is not None
        may = not (member.children or member.tails or member.parent is None or member.full is None)
        if may and member.leases:
            patcher.reach()
        return may

    def remove(self: Forest, node: Node) -> Node:
        leases, node.leases = node.leases, 0
        parent = original_remove(self, node)
        node.leases = leases
        return parent

    patcher.replace(nodes, "leaf_may_go", may_go)
    patcher.replace(Forest, "remove", remove)


def lease_forgets_its_lock(patcher: Patcher) -> None:
    """A lease is handed out without locking its path."""
    original = PrefixTree.lease

    def faulty(self: PrefixTree, match: Match, name: str) -> Lease:
        lease = original(self, match, name)
        patcher.reach()
        lease.record.node.leases -= 1
        return lease

    patcher.replace(PrefixTree, "lease", faulty)


def release_keeps_the_lock(patcher: Patcher) -> None:
    """A released lease leaves its path locked for ever."""
    original = LeaseTable._unlock_node

    def faulty(self: LeaseTable, node: Node, fence: int) -> None:
        patcher.reach()
        node.leases += 1
        original(self, node, fence)

    patcher.replace(LeaseTable, "_unlock_node", faulty)


def release_keeps_window_locks(patcher: Patcher) -> None:
    """A released lease leaves the window pages of its path locked."""
    original = LeaseTable._unlock_window

    def faulty(self: LeaseTable, node: Node, record: LeaseRecord, fence: int) -> None:
        locked = record in node.window_leases
        original(self, node, record, fence)
        if locked:
            patcher.reach()
            node.window_leases.add(record)

    patcher.replace(LeaseTable, "_unlock_window", faulty)


def a_spill_takes_what_others_lease(patcher: Patcher) -> None:
    """A session that leaves takes the end of its path along, although others lease it too."""
    original = LeaseRecord.is_alone_in

    def faulty(self: LeaseRecord, node: Node) -> bool:
        leases, node.leases = node.leases, 1 if node is self.node else 0
        alone, node.leases = original(self, node), leases
        if alone and leases > (node is self.node):
            patcher.reach()
        return alone

    patcher.replace(LeaseRecord, "is_alone_in", faulty)


def match_crosses_tenants(patcher: Patcher) -> None:
    """A tenant without a tree of its own is answered from another tenant's."""
    original = PrefixTree.match

    def faulty(self: PrefixTree, root_key: str, packed: bytes, limit: int) -> Match:
        if root_key not in self.roots and self.roots:
            patcher.reach()
            root_key = next(iter(self.roots))
        return original(self, root_key, packed, limit)

    patcher.replace(PrefixTree, "match", faulty)


def state_is_left_at_the_wrong_length(patcher: Patcher) -> None:
    """The state at a history's exact end is left at the page boundary below it."""

    def faulty(
        self: PrefixTree,
        lease: Lease,
        key: bytes,
        full: Hold | None,
        window: Hold | None,
        state: Hold | None,
    ) -> None:
        for page in (full, window):
            if page is not None:
                page.release()
        if state is not None and key:
            patcher.reach()
            self.set_state(lease, state)

    patcher.replace(PrefixTree, "add_tail", faulty)


TREE_MUTANTS = tuple(
    Mutant(name, story, "memory", one, plant)
    for name, story, one, plant in (
        ("duplicate-insert-leaks", "B10", True, duplicate_insert_leaks),
        ("duplicate-insert-frees-the-trees-page", "C3", True, duplicate_insert_frees_the_trees_page),
        ("publish-leaves-stale-tables", "A4", True, publish_leaves_stale_tables),
        ("leased-leaf-is-evicted", "C8", False, leased_leaf_is_evicted),
        ("lease-forgets-its-lock", "C8", True, lease_forgets_its_lock),
        ("release-keeps-the-lock", "B6", True, release_keeps_the_lock),
        ("release-keeps-window-locks", "B10", True, release_keeps_window_locks),
        ("a-spill-takes-what-others-lease", "B6", True, a_spill_takes_what_others_lease),
        ("match-crosses-tenants", "B16", True, match_crosses_tenants),
        ("state-is-left-at-the-wrong-length", "B15", True, state_is_left_at_the_wrong_length),
    )
)
