"""The prefix tree under random use, against a flat map of prefixes (tests/property/tree_model.py).

Insertions are predicted unit by unit. Eviction may choose, so what it leaves is checked instead: nothing
new, nothing that is leased is gone, as much freed as was asked for or nothing free left to go, and giving
up a lock never makes a prefix unreachable. Look-ups are compared with brute force over all lengths.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.core.audit import Audit
from holdfast.core.layout import Component, named_layout
from holdfast.core.lease import Lease
from holdfast.core.ledger import Hold, Kind
from holdfast.core.points import Run
from holdfast.core.prefix import PrefixTree
from holdfast.core.tokens import pack
from tests.core.world import LAYOUTS, make_ledger
from tests.property.tree_model import Forest, Path, path_of

PICK = st.integers(0, 9)
ROOT = st.sampled_from(["one", "two"])
PAGES = st.lists(st.integers(1, 2), max_size=5)
REST = st.lists(st.integers(1, 2), max_size=3)
READERS_MAX = 6


class Reader:
    """Somebody who leans on the tree and holds nothing else."""

    def __init__(self, holder, lease: Lease) -> None:
        self.holder = holder
        self.lease: Lease | None = lease

    def claim(self, into: list) -> None:
        """Nothing is held."""

    def faults(self) -> list[str]:
        """Nothing can be wrong."""
        return []

    @property
    def root(self) -> str:
        """Whose tree it reads."""
        return self.lease.record.node.holder.name

    @property
    def path(self) -> Path:
        """The tokens of its page-aligned path."""
        return path_of(self.lease.record.node)


class TreeMachine(RuleBasedStateMachine):
    """A few readers over the trees of two tenants; subclasses say which layout."""

    layout_name = "dense"

    @initialize(
        page_size=st.sampled_from([1, 2, 3]),
        window=st.sampled_from([1, 2, 5, 9]),
        state_budget=st.sampled_from([1, 3, 100]),
    )
    def build(self, page_size: int, window: int, state_budget: int) -> None:
        self.layout = named_layout(self.layout_name, page_size, window)
        self.ledger = make_ledger(self.layout, 2000, 400)
        self.tree = PrefixTree(self.ledger, state_budget)
        self.readers: list[Reader] = []
        self.audit = Audit(self.ledger, self.tree, lambda: self.readers)
        self.writer = self.ledger.holder(Kind.TURN, "writer")
        self.model = Forest(self.layout)
        self.seen = -1, set(), {}, self.model

    def take(self, component: Component, count: int) -> Hold:
        return self.ledger.take(self.ledger.pool(component), count, self.writer)

    def whole(self, pages: list[int]) -> list[int]:
        """A run of tokens in which each page repeats one token: paths meet often."""
        return [token for token in pages for _ in range(self.layout.page_size)]

    def pick(self, index: int) -> Reader:
        return self.readers[index % len(self.readers)]

    def resync(self, keeps_ends: bool = True) -> None:
        """The tree gave something up of its own choice: nothing else may have changed."""
        left = Forest.of(self.tree)
        assert self.model.contains(left)
        if keeps_ends:
            assert left.ends() == self.model.ends(), "a prefix that could be resumed from is gone"
        self.model = left

    # --- looking up -------------------------------------------------------------------------------

    @rule(root=ROOT, pages=PAGES, rest=REST, less=st.integers(0, 3))
    def match(self, root: str, pages: list[int], rest: list[int], less: int) -> None:
        tokens = self.whole(pages) + rest
        version, before = self.tree.version, Forest.of(self.tree)
        limit = max(0, len(tokens) - less)
        found = self.tree.match(root, pack(tokens), limit)
        assert (found.length, found.branch) == self.model.match(root, tuple(tokens), limit)
        assert self.tree.version == version
        assert Forest.of(self.tree).same(before)

    @precondition(lambda self: len(self.readers) < READERS_MAX)
    @rule(root=ROOT, pages=PAGES, rest=REST)
    def lease(self, root: str, pages: list[int], rest: list[int]) -> None:
        tokens = self.whole(pages) + rest
        match = self.tree.match(root, pack(tokens), len(tokens))
        expected = self.model.match(root, tuple(tokens), len(tokens))[0]
        lease = self.tree.lease(match, "reader")
        reader = Reader(self.ledger.holder(Kind.SESSION, "reader"), lease)
        self.readers.append(reader)
        aligned = expected // self.layout.page_size * self.layout.page_size
        assert (reader.root, reader.path) == (root, tuple(tokens[:aligned]))
        if expected > aligned:
            tail = lease.tail
            holds = (tail.full, tail.window, tail.state)
            held = tuple(None if hold is None else hold.units[0] for hold in holds)
            assert held == self.model.tails[root, tuple(tokens[:expected])]
        elif expected:
            state = self.model.units.get((root, tuple(tokens[:expected]), "state"))
            assert lease.state_unit(expected) == state

    # --- moving memory in -------------------------------------------------------------------------

    @precondition(lambda self: self.readers)
    @rule(at=PICK, pages=PAGES.filter(len), gap=PICK, rank=st.integers(0, 1))
    def extend(self, at: int, pages: list[int], gap: int, rank: int) -> None:
        reader = self.pick(at)
        lease, size = reader.lease, self.layout.page_size
        lease.unlock_tail()
        run = tuple(self.whole(pages))
        before, path = lease.pages, reader.path + run
        full = self.take(Component.FULL, len(pages)) if self.layout.full else None
        end = before + len(pages)
        first = min(before + gap % 3, end)
        window = Run(self.take(Component.WINDOW, end - first), first) if self.layout.window else None
        offered = list(full.units) if full else [], list(window.hold.units) if window else []
        changed = self.tree.extend(lease, pack(run), full, window, rank)
        lowest = end
        for page in range(before, end):
            prefix = path[: (page + 1) * size]
            if (reader.root, prefix) in self.model.there:
                lowest = min(lowest, page)
            self.model.there.add((reader.root, prefix))
            if full is not None:
                self.model.units.setdefault((reader.root, prefix, "full"), offered[0][page - before])
            if window is not None and page >= first:
                self.model.units.setdefault((reader.root, prefix, "window"), offered[1][page - first])
        assert changed == lowest
        assert lease.pages == end
        assert Forest.of(self.tree).same(self.model)

    @precondition(lambda self: self.readers and self.layout.window)
    @rule(at=PICK, back=st.integers(0, 5))
    def fill_window(self, at: int, back: int) -> None:
        reader = self.pick(at)
        end = reader.lease.pages
        first = max(0, end - back)
        hold = self.take(Component.WINDOW, end - first)
        offered = list(hold.units)
        self.tree.fill_window(reader.lease, Run(hold, first))
        for page in range(first, end):
            prefix = reader.path[: (page + 1) * self.layout.page_size]
            self.model.units.setdefault((reader.root, prefix, "window"), offered[page - first])
        assert Forest.of(self.tree).same(self.model)

    @precondition(lambda self: self.readers and self.layout.state)
    @rule(at=PICK)
    def set_state(self, at: int) -> None:
        reader = self.pick(at)
        hold = self.take(Component.STATE, 1)
        unit, room = hold.units[0], self.tree.forest.states < self.tree.state_budget
        key = (reader.root, reader.path, "state")
        self.tree.set_state(reader.lease, hold)
        if room and reader.path and key not in self.model.units:
            self.model.units[key] = unit
            assert Forest.of(self.tree).same(self.model)
        else:
            if Forest.of(self.tree).units.get(key) == unit:
                self.model.units[key] = unit
            self.resync(keeps_ends=False)
        assert self.tree.forest.states == self.model.count(Component.STATE) <= self.tree.state_budget

    @precondition(lambda self: self.readers and self.layout.page_size > 1)
    @rule(at=PICK, tokens=st.lists(st.integers(1, 2), min_size=1, max_size=2))
    def add_tail(self, at: int, tokens: list[int]) -> None:
        reader = self.pick(at)
        key = tuple(tokens[: self.layout.page_size - 1])
        holds = tuple(
            self.take(component, 1) if component in self.layout.components else None
            for component in Component
        )
        units = tuple(None if hold is None else hold.units[0] for hold in holds)
        where = (reader.root, reader.path + key)
        self.tree.add_tail(reader.lease, pack(key), *holds)
        if where not in self.model.tails and where in Forest.of(self.tree).tails:
            self.model.tails[where] = units
        self.resync(keeps_ends=not self.layout.state)

    # --- locks ------------------------------------------------------------------------------------

    @precondition(lambda self: 0 < len(self.readers) < READERS_MAX)
    @rule(at=PICK, pages=PICK, window=PICK)
    def share(self, at: int, pages: int, window: int) -> None:
        reader = self.pick(at)
        reader.lease.unlock_tail()
        pages %= reader.lease.pages + 1
        first = min(pages, max(reader.lease.window_first, window))
        path = reader.path
        lease = self.tree.share(reader.lease, "second", pages, first)
        self.readers.append(Reader(self.ledger.holder(Kind.SESSION, "second"), lease))
        assert self.readers[-1].path == path[: pages * self.layout.page_size]
        self.resync()

    @precondition(lambda self: self.readers)
    @rule(at=PICK, pages=PICK)
    def shorten(self, at: int, pages: int) -> None:
        reader = self.pick(at)
        pages %= reader.lease.pages + 1
        path = reader.path[: pages * self.layout.page_size]
        reader.lease.shorten(len(path))
        assert reader.path == path
        self.resync()

    @precondition(lambda self: self.readers)
    @rule(at=PICK, first=PICK)
    def unlock(self, at: int, first: int) -> None:
        lease = self.pick(at).lease
        lease.unlock_tail()
        lease.unlock_state()
        lease.raise_window(min(first, lease.pages))
        assert lease.state_unit(lease.length) is None
        self.resync()

    @precondition(lambda self: self.readers)
    @rule(at=PICK, drop=st.booleans())
    def leave(self, at: int, drop: bool) -> None:
        reader = self.readers.pop(at % len(self.readers))
        if drop:
            reader.lease = None
            kinds = [finding.kind for finding in self.audit.census()]
            assert kinds == ["dropped lease"]
        else:
            reader.lease.release()
        self.resync()

    # --- giving memory back -----------------------------------------------------------------------

    @rule(index=st.integers(0, 2), count=st.integers(0, 5))
    def evict(self, index: int, count: int) -> None:
        components = self.layout.components
        component = components[index % len(components)]
        before = self.model.count(component)
        freed = self.tree.evict(component, count)
        self.resync(keeps_ends=False)
        assert freed == before - self.model.count(component)
        assert freed >= count or self.tree.evict(component, 1) == 0

    @rule()
    def flush(self) -> None:
        """What nobody leases goes, and nothing else."""
        self.tree.flush()
        self.resync(keeps_ends=False)
        paths = [(reader.root, reader.path) for reader in self.readers]
        assert all(
            any(root == other and path == long[: len(path)] for other, long in paths)
            for root, path in self.model.there
        )
        tails = {reader.lease.tail for reader in self.readers if reader.lease.tail is not None}
        for component in self.layout.components:
            pool = self.ledger.pool(component)
            of_tails = sum(hold.pool is pool for tail in tails for hold in tail.holds())
            assert pool.by_kind[Kind.TREE] == self.tree.forest.leased[component] + of_tails

    # --- what always holds ------------------------------------------------------------------------

    @invariant()
    def leased_units_stay(self) -> None:
        size = self.layout.page_size
        for reader in self.readers:
            lease, path = reader.lease, reader.path
            prefixes = [path[:end] for end in range(size, len(path) + 1, size)]
            if self.layout.full:
                units = [self.model.units[reader.root, prefix, "full"] for prefix in prefixes]
                assert lease.full_units(0) == units
                assert lease.full_units(len(units) // 2) == units[len(units) // 2 :]
            if self.layout.window:
                kept = prefixes[lease.window_first :]
                units = [self.model.units[reader.root, prefix, "window"] for prefix in kept]
                assert lease.window_units(lease.window_first) == units

    @invariant()
    def the_version_changes_with_the_tree(self) -> None:
        """A match, and what is remembered of one, is good for as long as the version stays."""
        nodes = {node: node.start for node in self.tree.forest.nodes() if node.parent is not None}
        roots, forest = set(self.tree.roots.values()), Forest.of(self.tree)
        if self.seen[0] == self.tree.version:
            assert self.seen[1] <= roots, "a root that a match may have found is gone"
            assert self.seen[2] == nodes and self.seen[3].same(forest)
        self.seen = self.tree.version, roots, nodes, forest

    @invariant()
    def nothing_is_found(self) -> None:
        found = self.audit.census()
        assert not found, [str(finding) for finding in found]

    def teardown(self) -> None:
        if not hasattr(self, "tree"):
            return
        for reader in self.readers:
            reader.lease.release()
        self.readers = []
        self.tree.flush()
        self.nothing_is_found()
        assert not self.tree.roots
        for pool in self.ledger.pools.values():
            assert sorted(pool.free) == list(range(pool.size))


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_tree_agrees_with_a_map_of_prefixes(name: str) -> None:
    machine = type("Machine", (TreeMachine,), {"layout_name": name})
    case = machine.TestCase
    case.settings = settings(max_examples=60, stateful_step_count=40)
    case().runTest()
