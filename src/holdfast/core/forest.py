"""The nodes of the prefix tree: one root for each tenant, and the ways in which nodes are split and removed.

`version` grows with every change of shape or content, so that a look-up knows whether it is out of date;
`tick` orders uses. `states` counts the state slots that nodes and tails hold, `leased` the units of nodes, by
component, that leases keep from eviction. Used by the prefix tree and its lease table alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.core.eviction import Candidates
from holdfast.core.layout import Component
from holdfast.core.ledger import Grant, Kind, Ledger
from holdfast.core.node import Node, Tail, pages_of
from holdfast.core.tokens import TOKEN_BYTES


class Forest:
    """All nodes of all tenants."""

    __slots__ = (
        "candidates",
        "layout",
        "leased",
        "ledger",
        "page_bytes",
        "roots",
        "states",
        "tick",
        "version",
    )

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.layout = ledger.layout
        self.page_bytes = ledger.layout.page_size * TOKEN_BYTES
        self.candidates = Candidates(ledger.layout.components)
        self.roots: dict[str, Node] = {}
        self.leased = [0] * len(Component)
        self.states = 0
        self.tick = 0
        self.version = 0

    def root(self, root_key: str) -> Node:
        """The root of a tenant, made if it is not there."""
        root = self.roots.get(root_key)
        if root is None:
            self.candidates.open(root_key)
            holder = self.ledger.holder(Kind.TREE, root_key, root_key)
            root = self.roots[root_key] = Node(None, b"", 0, holder)
        return root

    def lock(self, node: Node) -> None:
        """One more lease ends at a node. Full pages count as leased from the first lock on their node on."""
        node.leases += 1
        locked: Node | None = node
        while locked is not None:
            locked.locks += 1
            if locked.locks > 1:
                return
            self.leased[Component.FULL] += pages_of(locked.full)
            locked = locked.parent

    def unlock(self, node: Node, leases: int = 1) -> None:
        """So many leases fewer end at a node."""
        node.leases -= leases
        node.locks -= leases
        locked: Node | None = node
        while locked is not None and not locked.locks:
            self.leased[Component.FULL] -= pages_of(locked.full)
            locked = locked.parent
            if locked is not None:
                locked.locks -= 1

    def split(self, node: Node, tokens: int) -> Node:
        """Cut a node after its first `tokens` tokens. The new node is the upper part, and is returned."""
        parent = node.parent
        cut = tokens * TOKEN_BYTES
        assert parent is not None and 0 < cut < len(node.key) and cut % self.page_bytes == 0, (
            "not inside the run"
        )
        self.version += 1
        upper = Node(parent, node.key[:cut], node.start + tokens, node.holder)
        parent.children[node.key[: self.page_bytes]] = upper
        node.key = node.key[cut:]
        node.parent = upper
        upper.children[node.key[: self.page_bytes]] = node
        if node.full is not None:
            upper.full = node.full.split_front(cut // self.page_bytes)
        boundary = upper.end // self.layout.page_size
        if node.window is not None and node.window_first < boundary:
            upper.window = node.window.split_front(boundary - node.window_first)
            upper.window_first, node.window_first = node.window_first, boundary
        upper.locks = int(node.locks > 0)
        upper.window_leases = {record for record in node.window_leases if record.window_first < boundary}
        if node.window_leases and not upper.window_leases:
            self.leased[Component.WINDOW] -= pages_of(upper.window)
        upper.used, upper.rank, upper.fence = node.used, node.rank, node.fence
        self.candidates.offer(Component.WINDOW, upper)
        return upper

    def release_state(self, node: Node | Tail) -> None:
        """Give up the state of a node or tail. No effect without one."""
        if node.state is not None:
            node.state.release(node.fence)
            node.state = None
            self.states -= 1

    def prune(self, node: Node) -> None:
        """Remove childless nodes that no look-up can resume from."""
        stateful, windowed = self.layout.state, bool(self.layout.window)
        while node.parent is not None and not (node.children or node.tails or node.leases):
            useless = (stateful and node.state is None) or (windowed and node.window is None)
            if not useless:
                return
            node = self.remove(node)
        if node.parent is None and not (node.children or node.tails or node.leases):
            if self.roots.get(node.root_key) is node:
                del self.roots[node.root_key]
                self.candidates.close(node.root_key)
            self.version += 1

    def remove(self, node: Node) -> Node:
        """Take a leaf out of the tree and give its units back; returns its parent."""
        parent = node.parent
        assert parent is not None and not node.children and not node.tails and not node.leases, (
            "not a free leaf"
        )
        first_page = node.key[: self.page_bytes]
        assert parent.children.get(first_page) is node, "not a leaf of the tree"
        self.version += 1
        self.release_state(node)
        if node.full is not None:
            node.full.release(node.fence)
        if node.window is not None:
            node.window.release(node.fence)
        node.full = node.window = None
        del parent.children[first_page]
        parent.fence = max(parent.fence, node.fence)
        self.candidates.offer(Component.FULL, parent)
        return parent

    def remove_tail(self, tail: Tail) -> None:
        """Take a tail out of the tree and give its units back."""
        self.version += 1
        self.release_state(tail)
        for hold in (tail.full, tail.window):
            if hold is not None:
                hold.release(tail.fence)
        tail.full = tail.window = None
        node = tail.node
        del node.tails[tail.key]
        node.fence = max(node.fence, tail.fence)
        self.candidates.offer(Component.FULL, node)
        self.prune(node)

    def nodes(self) -> Iterator[Node]:
        """Every node of every root, parents first."""
        pending = list(self.roots.values())
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())

    def claim(self, into: list[Grant]) -> None:
        """Name everything the tree holds, for the census."""
        for node in self.nodes():
            if node.full is not None:
                into.append(node.full.grant)
            if node.window is not None:
                into.append(node.window.grant)
            if node.state is not None:
                into.append(node.state.grant)
            for tail in node.tails.values():
                into.extend(hold.grant for hold in tail.holds())
