"""The prefix tree: the only place where memory is shared.

A radix tree over page-aligned runs of tokens (node.py has its parts). Keys are packed tokens, so
comparing is a memory compare, and the point where two runs part is found by bisection. `match` answers
the longest prefix from which every component can resume and changes nothing but recency; `lease` locks
it; `extend` moves a sequence's units in, fills tombstones and frees true duplicates. Full pages are
locked on the deepest node alone: only leaves are evicted, so a locked node keeps its ancestors. Each
tenant has a root of its own, and no path leads from one to another.

Nothing here allocates units: the tree only ever receives them, and gives them back.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from holdfast.core.eviction import EvictionQueue
from holdfast.core.layout import Component
from holdfast.core.lease import DeadLease, Lease, LeaseRecord, LockLeak
from holdfast.core.ledger import Grant, Hold, Kind, Ledger
from holdfast.core.node import Match, Node, Tail, Withdrawn, leaf_may_go, state_may_go, window_may_go
from holdfast.core.tokens import TOKEN_BYTES, common_bytes

Queues = dict[Component, EvictionQueue[Node | Tail]]


class PrefixTree:
    """Shared prefixes of all tenants."""

    __slots__ = (
        "dropped",
        "layout",
        "leaks",
        "leases",
        "ledger",
        "page_bytes",
        "queues",
        "roots",
        "serial",
        "state_budget",
        "states",
        "tick",
        "version",
    )

    def __init__(self, ledger: Ledger, state_budget: int = 1 << 30) -> None:
        self.ledger = ledger
        self.layout = ledger.layout
        self.page_bytes = ledger.layout.page_size * TOKEN_BYTES
        self.state_budget = state_budget
        self.states = 0
        self.roots: dict[str, Node] = {}
        self.leases: dict[int, LeaseRecord] = {}
        self.dropped: list[LeaseRecord] = []
        self.leaks: list[LockLeak] = []
        self.serial = 0
        self.tick = 0
        self.version = 0
        self.queues: dict[str, Queues] = {}

    # --- looking up -------------------------------------------------------------------------------

    def match(self, root_key: str, packed: bytes, limit: int) -> Match:
        """The longest resumable prefix of `packed`, at most `limit` tokens; touches recency alone."""
        node = self.roots.get(root_key)
        found = Match(root_key, node, self.version)
        if node is None:
            return found
        self.tick += 1
        node.used = tick = self.tick
        windowed, stateful = bool(self.layout.window), self.layout.state
        page_bytes = self.page_bytes
        stop = limit // self.layout.page_size * page_bytes
        at = covered = 0
        while True:
            if node.tails:
                self._match_tail(found, node, packed, at, limit, covered)
            child = node.children.get(packed[at : at + page_bytes]) if at < stop else None
            if child is None:
                found.branch = max(found.branch, node.end)
                return found
            child.used = tick
            same = common_bytes(child.key, packed, at, stop, page_bytes)
            if windowed:
                covered = self._covered_from(child, covered)
            at += same
            length = at // TOKEN_BYTES
            whole = same == len(child.key)
            resumable = child.state is not None and whole if stateful else True
            if resumable and (not windowed or self._window_reaches(length, covered)):
                found.length, found.node, found.tail = length, child, None
            if not whole:
                found.branch = max(found.branch, length)
                return found
            node = child

    def _match_tail(self, found: Match, node: Node, packed: bytes, at: int, limit: int, covered: int) -> None:
        for tail in node.tails.values():
            if found.length < tail.end <= limit and packed.startswith(tail.key, at):
                tail.used = self.tick
                found.branch = max(found.branch, tail.end)
                if not self.layout.window or self._window_reaches(tail.end, covered):
                    found.length, found.node, found.tail = tail.end, node, tail

    def _covered_from(self, node: Node, covered: int) -> int:
        """From which token on window pages are there without a gap, up to the end of `node`."""
        if node.window is None:
            return node.end
        first = node.window_first * self.layout.page_size
        return covered if first <= node.start else first

    def _window_reaches(self, length: int, covered: int) -> bool:
        return self.layout.window_first_page(length) * self.layout.page_size >= covered

    # --- leases -----------------------------------------------------------------------------------

    def lease(self, match: Match, name: str) -> Lease:
        """Lock what `match` found. The tree must not have changed since."""
        if match.version != self.version:
            raise ValueError("the tree has changed since this match; match again")
        node = match.node
        if node is None:
            node = self._root(match.root_key)
        elif match.tail is None and match.length < node.end:
            node = self._split(node, match.length - node.start)
        frame = sys._getframe(1)
        self.serial += 1
        record = LeaseRecord(self, node, name, self.serial, (frame.f_code, frame.f_lineno))
        self.leases[self.serial] = record
        node.leases += 1
        if self.layout.window:
            self._lock_window(record, self.layout.window_first_page(match.length))
        if match.tail is not None:
            record.tail = match.tail
            match.tail.leases += 1
        elif node.state is not None:
            record.state_node = node
            node.state_leases += 1
        return Lease(record)

    def share(self, lease: Lease, name: str, pages: int, window_first: int) -> Lease:
        """A second lease, of the path's first `pages` pages, with window pages from `window_first` on."""
        record = lease.record
        match = Match(record.node.root_key, record.node, self.version)
        match.length = record.length
        shared = self.lease(match, name)
        shared.shorten(pages * self.layout.page_size)
        if self.layout.window:
            assert window_first >= min(record.window_first, pages), "those window pages are not leased"
            shared.raise_window(window_first)
            self._lock_window(shared.record, window_first)
        return shared

    def lease_root(self, root_key: str, name: str) -> Lease:
        """A lease of nothing: what a sequence starts from when no prefix matched."""
        return self.lease(Match(root_key, self.roots.get(root_key), self.version), name)

    def release(self, record: LeaseRecord, fence: int) -> None:
        """Give up all locks of a record. For `Lease.release`."""
        if self.leases.pop(record.serial, None) is None:
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
            node.fence = max(node.fence, fence)
            self._offer(Component.STATE, node)

    def unlock_tail(self, record: LeaseRecord, fence: int) -> None:
        """For `Lease.unlock_tail`."""
        tail = record.tail
        if tail is not None:
            record.tail = None
            tail.leases -= 1
            tail.fence = max(tail.fence, fence)
            self.offer(tail)

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

    def _lock_window(self, record: LeaseRecord, first_page: int) -> None:
        """Lock the window pages from `first_page` to the end of the record's path."""
        page_size = self.layout.page_size
        record.window_first = min(first_page, record.pages)
        node = record.node
        while node.parent is not None and node.end > first_page * page_size:
            node.window_leases.add(record)
            node = node.parent

    def _unlock_window(self, node: Node, record: LeaseRecord, fence: int) -> None:
        node.window_leases.discard(record)
        node.fence = max(node.fence, fence)
        self._offer(Component.WINDOW, node)

    def _unlock_node(self, node: Node, fence: int) -> None:
        node.leases -= 1
        node.fence = max(node.fence, fence)
        if not node.leases:
            self._offer(Component.FULL, node)
            self._prune(node)

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
            upper = self._split(node, length - node.start)
            self._unlock_window(node, record, fence)
            node = upper
        node.leases += 1
        record.reach(node, length)
        record.window_first = min(record.window_first, record.pages)
        self._unlock_node(before, fence)

    # --- moving memory in -------------------------------------------------------------------------

    def extend(
        self, lease: Lease, key: bytes, full: Hold | None, window: tuple[Hold, int] | None, rank: int
    ) -> int:
        """Move a run of units in below the lease's end; the lease then reaches to the run's end.

        `full` has a unit for each page of `key`; `window` a Hold and the page number of its first
        unit, up to the run's end. Runs that are there already keep the tree's units, and the newcomer's
        are given back behind the fence on their Hold. Returns the first page whose unit is now another
        one than the newcomer's, or the page past the run if none is.
        """
        record = lease.record
        page_size = self.layout.page_size
        assert key and len(key) % self.page_bytes == 0, "runs are whole pages"
        assert record.tail is None, "the tail must be copied and unlocked first"
        fence = max(
            (hold.grant.fence for hold in (full, window[0] if window else None) if hold is not None),
            default=0,
        )
        if window is not None and window[1] > record.length // page_size:
            self.raise_window(record, window[1], fence)
        self.tick += 1
        self.version += 1
        node = record.node
        at, changed = 0, (record.length + len(key) // TOKEN_BYTES) // page_size
        while at < len(key):
            child = node.children.get(key[at : at + self.page_bytes])
            if child is None:
                node = self._append(node, key[at:], full, window)
                full = window = None
                break
            changed = min(changed, child.start // page_size)
            same = common_bytes(child.key, key, at, len(key), self.page_bytes)
            if same < len(child.key):
                child = self._split(child, same // TOKEN_BYTES)
            full, window = self._absorb(child, full, window)
            child.used = self.tick
            node, at = child, at + same
        for left in (full, window[0] if window else None):
            if left is not None:
                left.release()
        self._move_lease(record, node, rank)
        return changed

    def fill_window(self, lease: Lease, window: Hold, first: int) -> None:
        """Give window pages `first..` up to the lease's end to the nodes of its path that lack them."""
        record = lease.record
        page_size = self.layout.page_size
        assert first + len(window) == record.length // page_size, "window pages must reach to the lease's end"
        self.version += 1
        node = record.node
        while len(window):
            assert node.parent is not None, "the path is as long as the lease"
            start = max(node.start // page_size, first)
            self._absorb_window(node, window.split(start - first), start)
            node = node.parent
        window.release()
        self._lock_window(record, min(first, record.window_first))

    def _append(self, node: Node, key: bytes, full: Hold | None, window: tuple[Hold, int] | None) -> Node:
        child = Node(node, key, node.end + len(key) // TOKEN_BYTES, node.holder)
        child.used = self.tick
        if full is not None:
            child.full = full.move_to(node.holder)
        if window is not None and len(window[0]):
            child.window, child.window_first = window[0].move_to(node.holder), window[1]
        elif window is not None:
            window[0].release()
        node.children[key[: self.page_bytes]] = child
        return child

    def _absorb(
        self, node: Node, full: Hold | None, window: tuple[Hold, int] | None
    ) -> tuple[Hold | None, tuple[Hold, int] | None]:
        """Give a node that is there already what it lacks of the newcomer's units; free the duplicates."""
        pages_end = node.end // self.layout.page_size
        if full is not None:
            duplicate = full.split_front(len(node.key) // self.page_bytes)
            duplicate.release()
        if window is None:
            return full, None
        hold, first = window
        if first >= pages_end:
            return full, window
        self._absorb_window(node, hold.split_front(pages_end - first), first)
        return full, (hold, pages_end)

    def _absorb_window(self, node: Node, mine: Hold, first: int) -> None:
        """Take window pages from `first` to the node's end as far as the node lacks them; free the rest."""
        had = node.window_first if node.window is not None else node.end // self.layout.page_size
        if had > first:
            fresh = mine.split_front(had - first).move_to(node.holder)
            if node.window is not None:
                fresh.join(node.window)
            node.window, node.window_first = fresh, first
        mine.release()

    def _move_lease(self, record: LeaseRecord, node: Node, rank: int) -> None:
        """Let a lease end at a deeper node, and keep the window pages between as well."""
        before = record.node
        first = record.window_first
        node.leases += 1
        record.reach(node, node.end)
        if self.layout.window:
            self._lock_window(record, first)
        passed = node
        while passed is not before:
            passed.rank = max(passed.rank, rank)
            assert passed.parent is not None, "a lease only moves down its own path"
            passed = passed.parent
        before.leases -= 1

    def set_state(self, lease: Lease, state: Hold) -> None:
        """Leave the state at exactly the lease's end; a duplicate, or one over the budget, is released."""
        node = lease.record.node
        if node.state is not None or node.parent is None or not self._make_room_for_state(node.root_key):
            state.release()
            return
        node.state = state.move_to(node.holder)
        self.states += 1
        self.version += 1
        self._offer(Component.STATE, node)

    def add_tail(self, lease: Lease, key: bytes, holds: tuple[Hold | None, Hold | None, Hold | None]) -> None:
        """Leave a partly filled page and the state at its exact end below the lease's end."""
        node = lease.record.node
        full, window, state = holds
        assert 0 < len(key) < self.page_bytes, "a tail ends inside a page"
        if key in node.tails or (state is not None and not self._make_room_for_state(node.root_key)):
            for hold in holds:
                if hold is not None:
                    hold.release()
            return
        moved = [hold.move_to(node.holder) if hold is not None else None for hold in (full, window, state)]
        tail = Tail(node, key, *moved)
        self.tick += 1
        tail.used = self.tick
        self.states += state is not None
        self.version += 1
        node.tails[key] = tail
        self.offer(tail)

    def _make_room_for_state(self, root_key: str) -> bool:
        """Whether one more state may stay; a tenant's own give way before another's."""
        if self.states < self.state_budget or self.evict(Component.STATE, 1, root_key):
            return True
        return self.evict(Component.STATE, 1) > 0

    # --- giving memory back -----------------------------------------------------------------------

    def alone_from(self, lease: Lease) -> int:
        """From which length on a path serves its lessee alone: nothing else leases it or hangs below it."""
        record, node = lease.record, lease.record.node
        while node.parent is not None and record.tail is None and record.is_alone_in(node):
            node = node.parent
        return node.end

    def withdraw(self, lease: Lease) -> Withdrawn:
        """Take the last run of a path, which serves its lessee alone, out of the tree, and give it to it."""
        record = lease.record
        node, parent = record.node, record.node.parent
        assert parent is not None and record.is_alone_in(node), "somebody else needs that run"
        taken = Withdrawn(node.full, node.window, node.window_first)
        if record.state_node is node:
            taken.state, node.state, record.state_node = node.state, None, None
            self.states -= 1
        for hold in taken.holds():
            hold.fence(node.fence)
        node.full = node.window = None
        node.leases = 0
        parent.leases += 1
        record.reach(parent, parent.end)
        record.window_first = min(record.window_first, record.pages)
        self._remove(node)
        return taken

    def evict(self, component: Component, count: int, root_key: str | None = None) -> int:
        """Free at least `count` units, of one tenant or of all, if unlocked ones allow it; returns how many.

        A tenant's go least recently used first. Among tenants it is for the caller to choose.
        """
        freed = 0
        for key in [root_key] if root_key is not None else list(self.roots):
            queues = self.queues.get(key)
            while queues is not None and freed < count:
                victim = queues[component].pop()
                if victim is None:
                    break
                freed += self._evict(victim, component)
        return freed

    def _evict(self, victim: Node | Tail, component: Component) -> int:
        """Take one component of a candidate, or all of it; returns how many units of that component went."""
        pool = self.ledger.pool(component)
        before = pool.by_kind[Kind.TREE]
        if isinstance(victim, Tail):
            self._remove_tail(victim)
        elif component is Component.FULL:
            self._prune(self._remove(victim))
        else:
            self._entomb(victim, component)
        return before - pool.by_kind[Kind.TREE]

    def flush(self) -> None:
        """Evict everything that nobody leases."""
        for component in self.layout.components:
            self.evict(component, self.ledger.pool(component).size + 1)

    def _entomb(self, node: Node, component: Component) -> None:
        """Evict one component of a node; the node goes too if nothing can resume from what is left."""
        self.version += 1
        if component is Component.WINDOW:
            assert node.window is not None, "only nodes with window pages are queued"
            node.window.release(node.fence)
            node.window = None
        else:
            self._release_state(node)
        self._prune(node)

    def _release_state(self, node: Node | Tail) -> None:
        if node.state is not None:
            node.state.release(node.fence)
            node.state = None
            self.states -= 1

    def _prune(self, node: Node) -> None:
        """Remove childless nodes that no look-up can resume from."""
        stateful, windowed = self.layout.state, bool(self.layout.window)
        while node.parent is not None and not (node.children or node.tails or node.leases):
            useless = (stateful and node.state is None) or (windowed and node.window is None)
            if not useless:
                return
            node = self._remove(node)
        if node.parent is None and not (node.children or node.tails or node.leases):
            if self.roots.get(node.root_key) is node:
                del self.roots[node.root_key], self.queues[node.root_key]
            self.version += 1

    def _remove(self, node: Node) -> Node:
        """Take a leaf out of the tree and give its units back; returns its parent."""
        parent = node.parent
        assert parent is not None and not node.children and not node.tails and not node.leases, (
            "not a free leaf"
        )
        first_page = node.key[: self.page_bytes]
        assert parent.children.get(first_page) is node, "not a leaf of the tree"
        self.version += 1
        self._release_state(node)
        if node.full is not None:
            node.full.release(node.fence)
        if node.window is not None:
            node.window.release(node.fence)
        node.full = node.window = None
        del parent.children[first_page]
        parent.fence = max(parent.fence, node.fence)
        self._offer(Component.FULL, parent)
        return parent

    def _remove_tail(self, tail: Tail) -> None:
        self.version += 1
        self._release_state(tail)
        for hold in (tail.full, tail.window):
            if hold is not None:
                hold.release(tail.fence)
        tail.full = tail.window = None
        node = tail.node
        del node.tails[tail.key]
        node.fence = max(node.fence, tail.fence)
        self._offer(Component.FULL, node)
        self._prune(node)

    def lacks(self, member: Node | Tail) -> bool:
        """Whether a member could be evicted, but would never come up: for the census."""
        queues = self.queues.get(member.root_key, {})
        return any(queue.lacks(member) for queue in queues.values())

    def offer(self, member: Node | Tail) -> None:
        """Queue a member for each component that it may be evicted for."""
        for component in self.layout.components:
            self._offer(component, member)

    def _offer(self, component: Component, member: Node | Tail) -> None:
        """Queue a member that may have become a candidate for eviction, among those of its tenant."""
        queues = self.queues.get(member.root_key)
        if queues is not None:  # What the audit healed may be a lease of a tree that is gone.
            queues[component].offer(member)

    # --- shape ------------------------------------------------------------------------------------

    def _root(self, root_key: str) -> Node:
        root = self.roots.get(root_key)
        if root is None:
            self.queues[root_key] = {
                Component.FULL: EvictionQueue(1, leaf_may_go),
                Component.WINDOW: EvictionQueue(2, window_may_go),
                Component.STATE: EvictionQueue(4, state_may_go),
            }
            root = self.roots[root_key] = Node(
                None, b"", 0, self.ledger.holder(Kind.TREE, root_key, root_key)
            )
        return root

    def _split(self, node: Node, tokens: int) -> Node:
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
        upper.window_leases = {record for record in node.window_leases if record.window_first < boundary}
        upper.used, upper.rank, upper.fence = node.used, node.rank, node.fence
        self._offer(Component.WINDOW, upper)
        return upper

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

    def reclaim_dropped(self) -> None:
        """Report leases that were dropped alive and take their locks back, behind the newest step."""
        dropped, self.dropped = self.dropped, []
        for record in dropped:
            if record.serial in self.leases:
                self.leaks.append(LockLeak(record, self.ledger.step))
                self.release(record, self.ledger.step)
