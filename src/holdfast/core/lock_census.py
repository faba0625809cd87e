"""The census of locks: leases without an owner, locks without a lease, leases of evicted nodes.

A part of the whole census (audit.py), which calls it. Findings are healed on the spot.
"""

from __future__ import annotations

from holdfast.core.findings import Finding, FindingKind
from holdfast.core.lease import LeaseRecord
from holdfast.core.ledger import Ledger
from holdfast.core.node import Node, Tail, pages_of
from holdfast.core.prefix import PrefixTree
from holdfast.core.slices import Locks, Owner

LOCK = FindingKind.LOCK_WITHOUT_LESSEE


class LockCensus:
    """The locks of one prefix tree."""

    __slots__ = ("ledger", "tree")

    def __init__(self, ledger: Ledger, tree: PrefixTree) -> None:
        self.ledger = ledger
        self.tree = tree

    def findings(self, claimed: list[LeaseRecord], owners: list[Owner]) -> list[Finding]:
        """Compare the leases that `owners` claim with the lease table, and that with the locks on nodes."""
        tree, step = self.tree, self.ledger.step
        found: list[Finding] = []
        kept = set(claimed)
        for record in [record for record in tree.leases.records.values() if record not in kept]:
            detail = f"no owner keeps the lease of {record.length} tokens, taken at {record.taken_at}"
            found.append(Finding(LOCK, detail, record.name, "unlocked", step))
            tree.leases.release(record, step)
        for record in [record for record in tree.leases.records.values() if record.astray]:
            detail = f"the lease of {record.length} tokens, taken at {record.taken_at}, locks past its end"
            found.append(Finding(LOCK, detail, record.name, "unlocked", step))
            tree.leases.unlock_state(record, step)
            tree.leases.unlock_tail(record, step)
            record.window_first = min(record.window_first, record.pages)
        locks = Locks(tree.leases.records.values(), self.ledger.layout)
        nodes = list(tree.forest.nodes())
        there: set[Node | Tail] = set(nodes)
        for node in nodes:
            if node.tails:
                there.update(node.tails.values())
            if not locks.agree(node):
                found.append(self._lock_drift(node, locks))
        self._member_findings(there, found)
        if not there.issuperset(locks.paths) or not there.issuperset(locks.tails):
            found += [
                self._leased_but_gone(record, owners)
                for record in tree.leases.records.values()
                if record.node not in there or (record.tail is not None and record.tail not in there)
            ]
        self._leased_findings(nodes, locks, found)
        return found

    def _member_findings(self, members: set[Node | Tail], found: list[Finding]) -> None:
        """Nodes and tails that could be evicted but are in no queue, and states that are miscounted."""
        forest, step = self.tree.forest, self.ledger.step
        for member in [member for member in members if forest.candidates.lacks(member)]:
            detail = f"the run that ends at {member.end} could be evicted, but is not queued"
            found.append(Finding(FindingKind.NOT_QUEUED, detail, f"TREE {member.root_key}", "queued", step))
            forest.candidates.offer_all(member)
        states = sum(member.state is not None for member in members)
        if states != forest.states:
            detail = f"{forest.states} states counted in the tree, {states} there"
            found.append(Finding(FindingKind.COUNTER, detail, "tree", "recounted", step))
            forest.states = states

    def _leased_findings(self, nodes: list[Node], locks: Locks, found: list[Finding]) -> None:
        """Units that leases keep, recounted; if they differ, the locks of all nodes are set right as well."""
        forest = self.tree.forest
        pages, seen = 0, set[Node]()
        for end in locks.paths:
            node: Node | None = end
            while node is not None and node not in seen:
                seen.add(node)
                pages += pages_of(node.full)
                node = node.parent
        leased = [pages, sum(pages_of(node.window) for node in locks.windows), len(locks.states)]
        if leased == forest.leased:
            return
        detail = f"{forest.leased} units counted as leased, {leased} are"
        found.append(Finding(FindingKind.COUNTER, detail, "tree", "recounted", self.ledger.step))
        forest.leased = leased
        for node in reversed(nodes):
            node.locks = node.leases + sum(child.locks > 0 for child in node.children.values())

    def _lock_drift(self, node: Node, locks: Locks) -> Finding:
        """Set a node's locks to the number of its leases."""
        paths, states = locks.paths.get(node, 0), locks.states.get(node, 0)
        detail = f"{node.leases} and {node.state_leases} locks at {node.end} for {paths} and {states} leases"
        lessees = sorted(record.name for record in self.tree.leases.records.values() if record.node is node)
        holder = ", ".join(lessees) or repr(node.holder)
        node.leases, node.state_leases = paths, states
        node.window_leases = locks.windows.get(node, set())
        self.tree.forest.candidates.offer_all(node)
        for tail in node.tails.values():
            tail.leases = locks.tails.get(tail, 0)
            self.tree.forest.candidates.offer_all(tail)
        return Finding(LOCK, detail, holder, "recounted", self.ledger.step)

    def _leased_but_gone(self, record: LeaseRecord, owners: list[Owner]) -> Finding:
        """A lease of a node or tail that is not in the tree any more: its units may belong to others."""
        detail = f"the lease of {record.length} tokens, taken at {record.taken_at}, is of an evicted node"
        kind, healed = FindingKind.CLAIMED_WHILE_FREE, "its owners are to be dropped"
        finding = Finding(kind, detail, record.name, healed, self.ledger.step)
        finding.owners = [
            owner for owner in owners if owner.lease is not None and owner.lease.record is record
        ]
        return finding
