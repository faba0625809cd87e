"""The prefix tree: the only place where memory is shared.

A radix tree over page-aligned runs of tokens. Keys are packed tokens, so comparing is a memory compare, and
the point where two runs part is found by bisection. `match` answers the longest prefix from which every
component can resume and changes nothing but recency; `lease` locks it; `extend` moves a sequence's units in,
fills tombstones and frees true duplicates. Full pages are locked on the deepest node alone: only leaves are
evicted, so a locked node keeps its ancestors. Each tenant has a root of its own, and no path leads from one
to another.

    forest.py        the nodes (node.py has their parts), how they are split and removed
    lease_table.py   the leases, and the locks that they keep
    eviction.py      what may be evicted, and in which order

Nothing here allocates units: the tree only ever receives them, and gives them back.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from holdfast.core.forest import Forest
from holdfast.core.layout import Component
from holdfast.core.lease import Lease
from holdfast.core.lease_table import LeaseTable
from holdfast.core.ledger import Hold, Kind, Ledger
from holdfast.core.node import Match, Node, Tail, Withdrawn, pages_of
from holdfast.core.points import Run
from holdfast.core.tokens import TOKEN_BYTES, common_bytes


class PrefixTree:
    """Shared prefixes of all tenants. At most `state_budget` recurrent states stay in it."""

    __slots__ = ("forest", "layout", "leases", "ledger", "page_bytes", "state_budget")

    def __init__(self, ledger: Ledger, state_budget: int = 1 << 30) -> None:
        self.ledger = ledger
        self.layout = ledger.layout
        self.state_budget = state_budget
        self.forest = Forest(ledger)
        self.leases = LeaseTable(self.forest)
        self.page_bytes = self.forest.page_bytes

    @property
    def roots(self) -> dict[str, Node]:
        """The root of each tenant."""
        return self.forest.roots

    @property
    def version(self) -> int:
        """Grows with every change: a match of an older version is out of date."""
        return self.forest.version

    # --- looking up -------------------------------------------------------------------------------

    def match(self, root_key: str, packed: bytes, limit: int) -> Match:
        """The longest resumable prefix of `packed`, at most `limit` tokens; touches recency alone."""
        forest = self.forest
        node = forest.roots.get(root_key)
        found = Match(root_key, node, forest.version)
        if node is None:
            return found
        forest.tick += 1
        node.used = tick = forest.tick
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
                tail.used = self.forest.tick
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
        if match.version != self.forest.version:
            raise ValueError("the tree has changed since this match; match again")
        node = match.node
        if node is None:
            node = self.forest.root(match.root_key)
        elif match.tail is None and match.length < node.end:
            node = self.forest.split(node, match.length - node.start)
        frame = sys._getframe(1)
        return self.leases.open(node, match, name, (frame.f_code, frame.f_lineno))

    def share(self, lease: Lease, name: str, pages: int, window_first: int) -> Lease:
        """A second lease, of the path's first `pages` pages, with window pages from `window_first` on."""
        record = lease.record
        match = Match(record.node.root_key, record.node, self.forest.version)
        match.length = record.length
        shared = self.lease(match, name)
        shared.shorten(pages * self.layout.page_size)
        if self.layout.window:
            assert window_first >= min(record.window_first, pages), "those window pages are not leased"
            shared.raise_window(window_first)
            self.leases.lock_window(shared.record, window_first)
        return shared

    def lease_root(self, root_key: str, name: str) -> Lease:
        """A lease of nothing: what a sequence starts from when no prefix matched."""
        return self.lease(Match(root_key, self.forest.roots.get(root_key), self.forest.version), name)

    # --- moving memory in -------------------------------------------------------------------------

    def extend(self, lease: Lease, key: bytes, full: Hold | None, window: Run | None, rank: int) -> int:
        """Move a run of units in below the lease's end; the lease then reaches to the run's end.

        `full` has a unit for each page of `key`; `window` ends with the run, and may begin anywhere below.
        Runs that are there already keep the tree's units, and the newcomer's are given back behind the fence
        on their Hold. Returns the first page whose unit is now another one than the newcomer's, or the page
        past the run if none is.
        """
        record, forest = lease.record, self.forest
        page_size = self.layout.page_size
        assert key and len(key) % self.page_bytes == 0, "runs are whole pages"
        assert record.tail is None, "the tail must be copied and unlocked first"
        if window is not None and window.first > record.length // page_size:
            fence = max(window.hold.grant.fence, full.grant.fence if full is not None else 0)
            self.leases.raise_window(record, window.first, fence)
        forest.tick += 1
        forest.version += 1
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
                child = forest.split(child, same // TOKEN_BYTES)
            self._absorb(child, full, window)
            child.used = forest.tick
            node, at = child, at + same
        for left in (full, window.hold if window is not None else None):
            if left is not None:
                left.release()
        self.leases.move(record, node, rank)
        return changed

    def fill_window(self, lease: Lease, window: Run) -> None:
        """Give window pages up to the lease's end to the nodes of its path that lack them."""
        record = lease.record
        page_size = self.layout.page_size
        assert window.end == record.length // page_size, "window pages must reach to the lease's end"
        self.forest.version += 1
        node, first = record.node, window.first
        while len(window.hold):
            assert node.parent is not None, "the path is as long as the lease"
            start = max(node.start // page_size, first)
            self._absorb_window(node, Run(window.hold.split(start - first), start))
            node = node.parent
        window.hold.release()
        self.leases.lock_window(record, min(first, record.window_first))

    def _append(self, node: Node, key: bytes, full: Hold | None, window: Run | None) -> Node:
        child = Node(node, key, node.end + len(key) // TOKEN_BYTES, node.holder)
        child.used = self.forest.tick
        if full is not None:
            child.full = full.move_to(node.holder)
        if window is not None and len(window.hold):
            child.window, child.window_first = window.hold.move_to(node.holder), window.first
        elif window is not None:
            window.hold.release()
        node.children[key[: self.page_bytes]] = child
        return child

    def _absorb(self, node: Node, full: Hold | None, window: Run | None) -> None:
        """Give a node that is there already what it lacks of the newcomer's units; free the duplicates.

        The units of this node's pages are taken off the front of `full` and `window`.
        """
        pages_end = node.end // self.layout.page_size
        if full is not None:
            full.split_front(len(node.key) // self.page_bytes).release()
        if window is not None and window.first < pages_end:
            mine = Run(window.hold.split_front(pages_end - window.first), window.first)
            self._absorb_window(node, mine)
            window.first = pages_end

    def _absorb_window(self, node: Node, mine: Run) -> None:
        """Take window pages up to the node's end as far as the node lacks them; free the rest."""
        had = node.window_first if node.window is not None else node.end // self.layout.page_size
        if had > mine.first:
            fresh = mine.hold.split_front(had - mine.first).move_to(node.holder)
            if node.window is not None:
                fresh.join(node.window)
            if node.window_leases:
                self.forest.leased[Component.WINDOW] += had - mine.first
            node.window, node.window_first = fresh, mine.first
        mine.hold.release()

    def set_state(self, lease: Lease, state: Hold) -> None:
        """Leave the state at exactly the lease's end; a duplicate, or one over the budget, is released."""
        node, forest = lease.record.node, self.forest
        if node.state is not None or node.parent is None or not self._make_room_for_state(node.root_key):
            state.release()
            return
        node.state = state.move_to(node.holder)
        forest.states += 1
        forest.version += 1
        forest.candidates.offer(Component.STATE, node)

    def add_tail(
        self, lease: Lease, key: bytes, full: Hold | None, window: Hold | None, state: Hold | None
    ) -> None:
        """Leave a partly filled page and the state at its exact end below the lease's end."""
        node, forest = lease.record.node, self.forest
        assert 0 < len(key) < self.page_bytes, "a tail ends inside a page"
        holds = (full, window, state)
        if key in node.tails or (state is not None and not self._make_room_for_state(node.root_key)):
            for hold in holds:
                if hold is not None:
                    hold.release()
            return
        moved = [hold.move_to(node.holder) if hold is not None else None for hold in holds]
        forest.tick += 1
        tail = Tail(node, key, forest.tick, *moved)
        forest.states += state is not None
        forest.version += 1
        node.tails[key] = tail
        forest.candidates.offer_all(tail)

    def _make_room_for_state(self, root_key: str) -> bool:
        """Whether one more state may stay; a tenant's own give way before another's."""
        if self.forest.states < self.state_budget or self.evict(Component.STATE, 1, root_key):
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
        assert parent is not None and record.is_alone_in(node), "another lease needs that run"
        taken = Withdrawn(node.full, node.window, node.window_first)
        if record.state_node is node:
            taken.state, node.state, record.state_node = node.state, None, None
            self.forest.states -= 1
            self.forest.leased[Component.STATE] -= 1
        for hold in taken.holds():
            hold.fence(node.fence)
        self.forest.lock(parent)
        self.forest.unlock(node, node.leases)
        if node.window_leases:
            self.forest.leased[Component.WINDOW] -= pages_of(node.window)
        node.full = node.window = None
        record.reach(parent, parent.end)
        record.window_first = min(record.window_first, record.pages)
        self.forest.remove(node)
        return taken

    def evict(self, component: Component, count: int, root_key: str | None = None) -> int:
        """Free at least `count` units, of one tenant or of all, if unlocked ones allow it; returns how many.

        A tenant's go least recently used first. Among tenants it is for the caller to choose.
        """
        freed = 0
        candidates = self.forest.candidates
        for key in [root_key] if root_key is not None else list(self.forest.roots):
            while freed < count:
                victim = candidates.pop(key, component)
                if victim is None:
                    break
                freed += self._evict(victim, component)
        return freed

    def _evict(self, victim: Node | Tail, component: Component) -> int:
        """Take one component of a candidate, or all of it; returns how many units of that component went."""
        pool = self.ledger.pool(component)
        before = pool.by_kind[Kind.TREE]
        if isinstance(victim, Tail):
            self.forest.remove_tail(victim)
        elif component is Component.FULL:
            self.forest.prune(self.forest.remove(victim))
        else:
            self._entomb(victim, component)
        return before - pool.by_kind[Kind.TREE]

    def flush(self) -> None:
        """Evict everything without a lease."""
        for component in self.layout.components:
            self.evict(component, self.ledger.pool(component).size + 1)

    def flushing(self, units: int) -> Iterator[None]:
        """Evict everything without a lease, a few `units` at a time: steps and verbs may come between two.

        It ends, however much comes meanwhile: of each tenant no more is evicted than the tree had in all.
        """
        for key in list(self.forest.roots):
            for component in self.layout.components:
                left = self.ledger.pool(component).by_kind[Kind.TREE]
                while left > 0 and (freed := self.evict(component, units, key)):
                    left -= freed
                    yield
            yield

    def _entomb(self, node: Node, component: Component) -> None:
        """Evict one component of a node; the node goes too if nothing can resume from what is left."""
        self.forest.version += 1
        if component is Component.WINDOW:
            assert node.window is not None, "only nodes with window pages are queued"
            node.window.release(node.fence)
            node.window = None
        else:
            self.forest.release_state(node)
        self.forest.prune(node)
