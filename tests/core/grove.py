"""A prefix tree without sequences: units are taken and moved in directly, and leases are kept here."""

from holdfast.core.audit import Audit
from holdfast.core.layout import Component, named_layout
from holdfast.core.lease import Lease
from holdfast.core.ledger import Hold, Holder, Kind
from holdfast.core.points import Run
from holdfast.core.prefix import PrefixTree
from holdfast.core.tokens import pack
from tests.core.world import make_ledger


class Reader:
    """An owner of a lease and of nothing else."""

    def __init__(self, holder: Holder, lease: Lease) -> None:
        self.holder = holder
        self.lease: Lease | None = lease

    def claim(self, into: list) -> None:
        """Nothing is held."""

    def faults(self) -> list[str]:
        """Nothing can be wrong."""
        return []


class Grove:
    """A tree, its ledger and audit, and shorthands that say what a test means."""

    def __init__(self, name: str, page_size: int = 4, window: int = 8, state_budget: int = 100) -> None:
        self.layout = named_layout(name, page_size, window)
        self.ledger = make_ledger(self.layout, pages=200, slots=40)
        self.tree = PrefixTree(self.ledger, state_budget)
        self.writer = self.ledger.holder(Kind.TURN, "writer")
        self.readers: list[Reader] = []
        self.audit = Audit(self.ledger, self.tree, lambda: self.readers)

    def take(self, component: Component, count: int) -> Hold:
        return self.ledger.take(self.ledger.pool(component), count, self.writer)

    def in_tree(self, component: Component) -> int:
        return self.ledger.pool(component).by_kind[Kind.TREE]

    def match(self, tokens, limit: int | None = None, root: str = "root") -> int:
        return self.tree.match(root, pack(tokens), len(tokens) if limit is None else limit).length

    def lease(self, tokens=(), root: str = "root", name: str = "reader") -> Lease:
        """Lease the longest match, and remember the lease for the census."""
        lease = self.tree.lease(self.tree.match(root, pack(tokens), len(tokens)), name)
        self.readers.append(Reader(self.ledger.holder(Kind.SESSION, name), lease))
        return lease

    def insert(
        self, tokens, state: bool = False, root: str = "root", rank: int = 0, window: int = 0
    ) -> Lease:
        """Move whole pages in below the root, window pages from page `window` on, and a state at the end."""
        tokens = list(tokens)
        lease = self.tree.lease_root(root, "writer")
        self.readers.append(Reader(self.ledger.holder(Kind.SESSION, "writer"), lease))
        if tokens:
            count = len(tokens) // self.layout.page_size
            full = self.take(Component.FULL, count) if self.layout.full else None
            run = Run(self.take(Component.WINDOW, count - window), window) if self.layout.window else None
            self.tree.extend(lease, pack(tokens), full, run, rank)
        if state:
            self.tree.set_state(lease, self.take(Component.STATE, 1))
        return lease

    def add(self, tokens, **options) -> None:
        """Insert and let go."""
        self.release(self.insert(tokens, **options))

    def add_tail(self, lease: Lease, tokens) -> None:
        holds = tuple(self.take(c, 1) if c in self.layout.components else None for c in Component)
        self.tree.add_tail(lease, pack(tokens), *holds)

    def release(self, lease: Lease, fence: int = 0) -> None:
        self.readers = [reader for reader in self.readers if reader.lease is not lease]
        lease.release(fence)

    def shape(self) -> list[tuple[int, int]]:
        """Start and end of every node but the roots."""
        return sorted((node.start, node.end) for node in self.tree.forest.nodes() if node.parent is not None)

    def check(self) -> None:
        found = self.audit.census()
        assert not found, [str(finding) for finding in found]

    def finish(self) -> None:
        """Let everything go: all is free and nothing is found."""
        self.check()
        for reader in self.readers:
            reader.lease.release()
        self.readers = []
        self.tree.flush()
        self.ledger.step += 1
        self.ledger.settle(self.ledger.step)
        self.check()
        assert not self.tree.roots
        for pool in self.ledger.pools.values():
            assert len(pool.free) == pool.size
