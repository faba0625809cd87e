"""The lease table: every lease of the prefix tree, and the locks that it keeps on nodes.

A lease locks its deepest node, the window pages that its sequence may still read, and a state or a tail until
the sequence has its own (lease.py). A node that loses its last lock becomes a candidate for eviction.
"""

from __future__ import annotations

from holdfast.core.forest import Forest
from holdfast.core.layout import Component, MemoryLayout
from holdfast.core.lease import DeadLease, Lease, LeaseRecord, LockLeak
from holdfast.core.ledger import Ledger, Site
from holdfast.core.node import Match, Node, pages_of


class LeaseTable:
    """The records of all leases, by serial; `dropped` leases were never released, and are reclaimed."""

    __slots__ = ("dropped", "forest", "layout", "leaks", "ledger", "records", "serial")

    def __init__(self, forest: Forest) -> None:
        self.forest = forest
        self.ledger: Ledger = forest.ledger
        self.layout: MemoryLayout = forest.layout
        self.records: dict[int, LeaseRecord] = {}
        self.dropped: list[LeaseRecord] = []
        self.leaks: list[LockLeak] = []
        self.serial = 0

    def open(self, node: Node, match: Match, name: str, site: Site) -> Lease:
        """Lock what `match` found, down to the end of `node`."""
        self.serial += 1
        record = LeaseRecord(self, node, name, self.serial, site)
        self.records[self.serial] = record
        self.forest.lock(node)
        if self.layout.window:
            self.lock_window(record, self.layout.window_first_page(match.length))
        if match.tail is not None:
            record.tail = match.tail
            match.tail.leases += 1
        elif node.state is not None:
            record.state_node = node
            self.forest.leased[Component.STATE] += not node.state_leases
            node.state_leases += 1
        return Lease(record)

    def release(self, record: LeaseRecord, fence: int) -> None:
        """Give up all locks of a record. For `Lease.release`."""
        if self.records.pop(record.serial, None) is None:
            raise DeadLease(f"the lease of {record.name} was reclaimed by the audit")
        self.unlock_tail(record, fence)
        self.unlock_state(record, fence)
        self.raise_window(record, record.pages, fence)
        self._unlock_node(record.node, fence)

    def unlock_state(self, record: LeaseRecord, fence: int) -> None:
        """For `Lease.unlock_state`."""
        node = record.state_node
        if node is not None:
            record.state_node = None
            node.state_leases -= 1
            self.forest.leased[Component.STATE] -= not node.state_leases
            node.fence = max(node.fence, fence)
            self.forest.candidates.offer(Component.STATE, node)

    def unlock_tail(self, record: LeaseRecord, fence: int) -> None:
        """For `Lease.unlock_tail`."""
        tail = record.tail
        if tail is not None:
            record.tail = None
            tail.leases -= 1
            tail.fence = max(tail.fence, fence)
            self.forest.candidates.offer_all(tail)

    def raise_window(self, record: LeaseRecord, first_page: int, fence: int) -> None:
        """For `Lease.raise_window`: unlock the window pages of nodes that end at or below the page."""
        before = record.window_first
        if first_page <= before:
            return
        page_size = self.layout.page_size
        node = record.node
        while node.parent is not None and node.end > before * page_size:
            if node.end <= first_page * page_size:
                self._unlock_window(node, record, fence)
            node = node.parent
        record.window_first = first_page

    def lock_window(self, record: LeaseRecord, first_page: int) -> None:
        """Lock the window pages from `first_page` to the end of the record's path."""
        page_size = self.layout.page_size
        record.window_first = min(first_page, record.pages)
        node = record.node
        while node.parent is not None and node.end > first_page * page_size:
            if not node.window_leases:
                self.forest.leased[Component.WINDOW] += pages_of(node.window)
            node.window_leases.add(record)
            node = node.parent

    def _unlock_window(self, node: Node, record: LeaseRecord, fence: int) -> None:
        if record in node.window_leases:
            node.window_leases.remove(record)
            if not node.window_leases:
                self.forest.leased[Component.WINDOW] -= pages_of(node.window)
        node.fence = max(node.fence, fence)
        self.forest.candidates.offer(Component.WINDOW, node)

    def _unlock_node(self, node: Node, fence: int) -> None:
        self.forest.unlock(node)
        node.fence = max(node.fence, fence)
        if not node.leases:
            self.forest.candidates.offer(Component.FULL, node)
            self.forest.prune(node)

    def shorten(self, record: LeaseRecord, length: int, fence: int) -> None:
        """For `Lease.shorten`: end at a page boundary inside the path."""
        assert 0 <= length <= record.length and length % self.layout.page_size == 0, (
            "not a page boundary inside"
        )
        self.unlock_tail(record, fence)
        if record.state_node is not None and record.state_node.end > length:
            self.unlock_state(record, fence)
        node = before = record.node
        while node.parent is not None and node.start >= length:
            self._unlock_window(node, record, fence)
            node = node.parent
        if node.end > length:
            upper = self.forest.split(node, length - node.start)
            self._unlock_window(node, record, fence)
            node = upper
        self.forest.lock(node)
        record.reach(node, length)
        record.window_first = min(record.window_first, record.pages)
        self._unlock_node(before, fence)

    def move(self, record: LeaseRecord, node: Node, rank: int) -> None:
        """Let a lease end at a deeper node, and keep the window pages between as well."""
        before = record.node
        first = record.window_first
        self.forest.lock(node)
        record.reach(node, node.end)
        if self.layout.window:
            self.lock_window(record, first)
        passed = node
        while passed is not before:
            passed.rank = max(passed.rank, rank)
            assert passed.parent is not None, "a lease only moves down its own path"
            passed = passed.parent
        self.forest.unlock(before)

    def reclaim_dropped(self) -> None:
        """Report leases that were dropped alive and take their locks back, behind the newest step."""
        dropped, self.dropped = self.dropped, []
        for record in dropped:
            if record.serial in self.records:
                self.leaks.append(LockLeak(record, self.ledger.step))
                self.release(record, self.ledger.step)
