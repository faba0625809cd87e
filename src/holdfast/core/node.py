"""The parts of the prefix tree: nodes, tails, and the result of a look-up.

A node holds, per component, its units or a tombstone:

    full    all pages of its run, always (where the layout has the component)
    window  a suffix of its run's pages, from `window_first` on, or a tombstone
    state   one slot, the state at exactly the node's end, or a tombstone
    tails   leaves that end inside a page: that page, and the state at the exact end

Only the tree changes them; leases read them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from holdfast.core.ledger import Hold, Holder
from holdfast.core.tokens import TOKEN_BYTES


def pages_of(hold: Hold | None) -> int:
    """How many pages a node has of a component; none where it has a tombstone."""
    return 0 if hold is None else len(hold)


class WindowLock(Protocol):
    """A lease, as a node sees it: it keeps a path's window pages from `window_first` on."""

    window_first: int


class Node:
    """One run of pages. `end` is its length counted from the root, in tokens.

    `leases` end here; `locks` are these and the children that have locks: without any, eviction can reach the
    node.
    """

    __slots__ = (
        "children",
        "end",
        "fence",
        "full",
        "holder",
        "key",
        "leases",
        "locks",
        "parent",
        "queued",
        "rank",
        "state",
        "state_leases",
        "tails",
        "used",
        "window",
        "window_first",
        "window_leases",
    )

    def __init__(self, parent: Node | None, key: bytes, end: int, holder: Holder) -> None:
        self.parent = parent
        self.key = key
        self.end = end
        self.holder = holder
        self.children: dict[bytes, Node] = {}
        self.full: Hold | None = None
        self.window: Hold | None = None
        self.window_first = 0
        self.state: Hold | None = None
        self.tails: dict[bytes, Tail] = {}
        self.leases = 0
        self.locks = 0
        self.window_leases: set[WindowLock] = set()
        self.state_leases = 0
        self.used = 0
        self.rank = 0
        self.queued = 0
        self.fence = 0

    @property
    def root_key(self) -> str:
        """Whose tree this is a part of."""
        return self.holder.name

    @property
    def start(self) -> int:
        """Where the run begins, in tokens from the root."""
        return self.end - len(self.key) // TOKEN_BYTES


class Tail:
    """A leaf that ends inside a page. It has no children, and is never written to."""

    __slots__ = ("fence", "full", "key", "leases", "node", "queued", "rank", "state", "used", "window")

    def __init__(
        self, node: Node, key: bytes, used: int, full: Hold | None, window: Hold | None, state: Hold | None
    ) -> None:
        self.node = node
        self.key = key
        self.full = full
        self.window = window
        self.state = state
        self.leases = 0
        self.used = used
        self.rank = 0
        self.queued = 0
        self.fence = 0

    @property
    def root_key(self) -> str:
        """Whose tree this is a part of."""
        return self.node.root_key

    @property
    def end(self) -> int:
        """The exact length that the tail completes, in tokens from the root."""
        return self.node.end + len(self.key) // TOKEN_BYTES

    def holds(self) -> Iterator[Hold]:
        """Everything the tail holds, for the census."""
        for hold in (self.full, self.window, self.state):
            if hold is not None:
                yield hold


class Withdrawn:
    """The units of a run that was taken out of the tree; `first` is the number of its first window page."""

    __slots__ = ("first", "full", "state", "window")

    def __init__(self, full: Hold | None, window: Hold | None, first: int) -> None:
        self.full = full
        self.window = window
        self.first = first
        self.state: Hold | None = None

    def holds(self) -> Iterator[Hold]:
        """Everything that was taken out."""
        for hold in (self.full, self.window, self.state):
            if hold is not None:
                yield hold


class Match:
    """The result of a look-up: `length` can be resumed from; full KV reaches to `branch`."""

    __slots__ = ("branch", "length", "node", "root_key", "tail", "version")

    def __init__(self, root_key: str, node: Node | None, version: int) -> None:
        self.root_key = root_key
        self.node = node
        self.version = version
        self.length = 0
        self.branch = 0
        self.tail: Tail | None = None


def leaf_may_go(member: Node | Tail) -> bool:
    """Whether a member can be taken out of the tree whole."""
    if isinstance(member, Tail):
        return not member.leases and member.full is not None
    return not (
        member.leases or member.children or member.tails or member.parent is None or member.full is None
    )


def window_may_go(member: Node | Tail) -> bool:
    """Whether a member has window pages without a lease."""
    if isinstance(member, Tail):
        return not member.leases and member.window is not None
    return member.window is not None and not member.window_leases


def state_may_go(member: Node | Tail) -> bool:
    """Whether a member has a state without a lease."""
    if isinstance(member, Tail):
        return not member.leases and member.state is not None
    return member.state is not None and not member.state_leases
