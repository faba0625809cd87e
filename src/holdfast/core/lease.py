"""Leases: a sequence reads a path of the prefix tree, and the tree keeps it.

A `Lease` is linear like a Hold: released once, dead afterwards, and reported when it is dropped
alive. It locks

- the deepest node's full pages, and with them all above, since only leaves are evicted;
- window pages from `window_first` on, as long as the sequence may still read them;
- the recurrent state at the end it was taken with, until the sequence has a state of its own;
- a tail, until the copies of its page and slot have settled.

The tree holds the units; a lease only names a node and a length, so nothing here can go stale when
nodes are split above it.
"""

from __future__ import annotations

from typing import NoReturn, Protocol

from holdfast.core.layout import MemoryLayout
from holdfast.core.ledger import Ledger, LedgerError, Site
from holdfast.core.node import Node, Tail


class DeadLease(LedgerError):
    """A Lease was used after it was released."""


class Lessor(Protocol):
    """A lease's view of its table."""

    layout: MemoryLayout
    ledger: Ledger
    dropped: list[LeaseRecord]

    def unlock_state(self, record: LeaseRecord, fence: int) -> None:
        """Give up the lock on the state at the path's end."""

    def unlock_tail(self, record: LeaseRecord, fence: int) -> None:
        """Give up the lock on the tail."""

    def raise_window(self, record: LeaseRecord, first_page: int, fence: int) -> None:
        """Give up the locks on window pages below `first_page`."""

    def release(self, record: LeaseRecord, fence: int) -> None:
        """Give up every lock."""

    def shorten(self, record: LeaseRecord, length: int, fence: int) -> None:
        """End the path at an earlier page boundary."""


class LeaseRecord:
    """The record of a Lease in the table; it outlives a Lease that was dropped."""

    __slots__ = (
        "length",
        "name",
        "node",
        "pages",
        "serial",
        "site",
        "state_node",
        "table",
        "tail",
        "window_first",
    )

    def __init__(self, table: Lessor, node: Node, name: str, serial: int, site: Site) -> None:
        self.table = table
        self.node = node
        self.name = name
        self.serial = serial
        self.site = site
        self.length = node.end
        self.pages = node.end // table.layout.page_size
        self.window_first = self.pages
        self.state_node: Node | None = None
        self.tail: Tail | None = None

    def reach(self, node: Node, length: int) -> None:
        """Let the path end at another node, at a page boundary."""
        self.node = node
        self.length = length
        self.pages = length // self.table.layout.page_size

    def is_alone_in(self, node: Node) -> bool:
        """Whether a node on its path serves this lease alone, given that the nodes below it do."""
        last = node is self.node
        others = node.leases - last + len(node.children) - (not last) + len(node.tails)
        states = node.state_leases - (self.state_node is node)
        return not (others or states or node.window_leases - {self})

    @property
    def astray(self) -> bool:
        """Whether it locks window pages, a state or a tail past its end, where its lessee never reads."""
        if self.window_first > self.pages or (self.tail is not None and self.tail.node is not self.node):
            return True
        return self.state_node is not None and self.state_node.end > self.length

    @property
    def taken_at(self) -> str:
        """File and line where the lease was taken."""
        code, line = self.site
        return f"{code.co_filename.rpartition('/')[2]}:{line} ({code.co_name})"


class _Dead:
    """Stands where a dead Lease's record was: every look at it raises."""

    __slots__ = ()

    def __getattr__(self, name: str) -> NoReturn:
        raise DeadLease(f"{name!r} was asked of a Lease that is dead: it was released")


_DEAD = _Dead()


class Lease:
    """Locks on a path of the prefix tree, held by one sequence."""

    __slots__ = ("record",)

    record: LeaseRecord

    def __init__(self, record: LeaseRecord) -> None:
        self.record = record

    def __del__(self) -> None:
        record = self.record
        if record.__class__ is LeaseRecord:
            record.table.dropped.append(record)
            record.table.ledger.drops += 1

    @property
    def alive(self) -> bool:
        """Whether this lease still locks anything."""
        return self.record.__class__ is LeaseRecord

    @property
    def length(self) -> int:
        """Tokens of the page-aligned path; a tail is not counted."""
        return self.record.length

    @property
    def pages(self) -> int:
        """Pages of the path."""
        return self.record.pages

    @property
    def window_first(self) -> int:
        """The lowest page whose window unit this lease keeps; the number of pages if none."""
        return self.record.window_first

    def full_units(self, first_page: int) -> list[int]:
        """The full pages from `first_page` to the end of the path, in order."""
        parts: list[list[int]] = []
        node = self.record.node
        page_size = self.record.table.layout.page_size
        while node.parent is not None and node.end // page_size > first_page:
            if node.full is not None:
                skip = max(0, first_page - node.start // page_size)
                parts.append(node.full.units[skip:])
            node = node.parent
        return [unit for part in reversed(parts) for unit in part]

    def window_units(self, first_page: int) -> list[int]:
        """The window pages from `first_page` to the end of the path; all must be locked by this lease."""
        parts: list[list[int]] = []
        node = self.record.node
        page_size = self.record.table.layout.page_size
        assert first_page >= self.record.window_first, "those window pages are not leased"
        while node.parent is not None and node.end // page_size > first_page:
            assert node.window is not None, "a leased window page is gone"
            parts.append(node.window.units[max(0, first_page - node.window_first) :])
            node = node.parent
        return [unit for part in reversed(parts) for unit in part]

    def state_unit(self, length: int) -> int | None:
        """The slot of the recurrent state at exactly `length`, if this lease keeps it."""
        node = self.record.state_node
        if node is None or node.end != length:
            return None
        assert node.state is not None, "a locked state is gone"
        return node.state.units[0]

    @property
    def tail(self) -> Tail | None:
        """The tail that the lessee copies, until `unlock_tail`."""
        return self.record.tail

    def unlock_state(self, fence: int = 0) -> None:
        """Give up the state lock; no effect without one."""
        self.record.table.unlock_state(self.record, fence)

    def unlock_tail(self, fence: int = 0) -> None:
        """Give up the tail: its copies have settled. No effect without one."""
        self.record.table.unlock_tail(self.record, fence)

    def raise_window(self, first_page: int, fence: int = 0) -> None:
        """Keep window pages from `first_page` on only."""
        self.record.table.raise_window(self.record, first_page, fence)

    def shorten(self, length: int, fence: int = 0) -> None:
        """End at `length`, a page boundary inside the path, and give up the locks past it."""
        self.record.table.shorten(self.record, length, fence)

    def release(self, fence: int = 0) -> None:
        """Give up every lock; `fence` is the newest step whose plan reads through this lease."""
        record = self.record
        record.table.release(record, fence)
        self.record = _DEAD  # type: ignore[assignment]


class LockLeak:
    """A live Lease that was dropped, as the table saw it."""

    __slots__ = ("length", "name", "step", "taken_at")

    def __init__(self, record: LeaseRecord, step: int) -> None:
        self.length = record.length
        self.name = record.name
        self.step = step
        self.taken_at = record.taken_at
