"""Sessions that drive the core as the scheduler does: open, turns row by row, close.

Every row is a step of its own: read its state slot, extend its memory, collect the block-table changes for an
executor, settle, advance. It is the same memory work as in a real turn.
"""

from __future__ import annotations

from collections.abc import Sequence as ReadOnly

from holdfast.core.audit import Audit
from holdfast.core.layout import Component, MemoryLayout, Tier, named_layout
from holdfast.core.ledger import Holder, Kind, Ledger
from holdfast.core.prefix import PrefixTree
from holdfast.core.sequence import Sequence
from holdfast.core.sharing import lean, publish

ROOT = "tenant"
WINDOW = 1024
CHECKPOINTS = 1
POOL_TOKENS = 1 << 20


class World:
    """A ledger, its tree, and the sessions that are open."""

    __slots__ = ("ledger", "sessions", "tree")

    def __init__(
        self,
        layout_name: str,
        page_size: int,
        tokens: int = POOL_TOKENS,
        window_tokens: int = POOL_TOKENS,
        states: int = 8192,
    ) -> None:
        layout: MemoryLayout = named_layout(layout_name, page_size, WINDOW)
        sizes = {
            Component.FULL: tokens // page_size,
            Component.WINDOW: window_tokens // page_size,
            Component.STATE: states,
        }
        self.ledger = Ledger(layout, {(part, Tier.DEVICE): sizes[part] for part in layout.components})
        self.tree = PrefixTree(self.ledger)
        self.sessions: list[Session] = []

    def owners(self) -> list[Sequence]:
        """All owners of Holds, for the audit."""
        return [session.sequence for session in self.sessions]


class Session:
    """One session: its sequence and its holders. With an `audit`, every row runs its share of a census."""

    __slots__ = ("audit", "checkpoints", "holder", "name", "sequence", "turns", "world")

    def __init__(self, world: World, name: str) -> None:
        ledger = world.ledger
        self.world = world
        self.name = name
        self.turns = 0
        self.audit: Audit | None = None
        self.holder = ledger.holder(Kind.SESSION, name)
        self.checkpoints = ledger.holder(Kind.CHECKPOINT, name)
        self.sequence = Sequence(ledger, self.holder)

    def row(self, count: int) -> None:
        """One step that computes `count` tokens of this session alone."""
        sequence, ledger = self.sequence, self.world.ledger
        ledger.step = sequence.fence = step = ledger.step + 1
        sequence.state_source()
        sequence.extend(count)
        sequence.table_changes()
        ledger.settle(step)
        sequence.advance(count)
        audit = self.audit
        if audit is not None:
            audit.tick(1)

    def _begin(self, inputs: ReadOnly[int]) -> None:
        sequence = self.sequence
        known = sequence.known
        sequence.tokens.extend(inputs)
        if sequence.lease is None:
            self._lean()
        self.turns += 1
        sequence.begin(self._turn_holder(), known)

    def _turn_holder(self) -> Holder:
        return self.world.ledger.holder(Kind.TURN, f"{self.name} turn {self.turns}")

    def _lean(self) -> None:
        """Lease the longest cached prefix of the input, without its last token."""
        sequence, tree = self.sequence, self.world.tree
        packed = sequence.tokens.packed(0, sequence.known)
        match = tree.match(ROOT, packed, sequence.known - 1)
        assert match.tail is None, "no benchmark leaves tails in the tree"
        lean(sequence, tree.lease(match, self.name), match.length, {})

    def _decode(self, generated: ReadOnly[int]) -> None:
        append, row = self.sequence.tokens.append, self.row
        for token in generated:
            append(token)
            row(1)

    def first_turn(self, inputs: ReadOnly[int], generated: ReadOnly[int]) -> None:
        """A turn on an empty sequence: match, compute the rest, publish the input, generate."""
        sequence = self.sequence
        self._begin(inputs)
        known, page_size = sequence.known, self.world.ledger.layout.page_size
        sequence.cut_chunk_at((known - 1) // page_size * page_size)
        while sequence.planned < known:
            cut = sequence.next_cut()
            self.row((known if cut is None else cut) - sequence.planned)
            if cut is not None:
                sequence.pass_cut()
        publish(self.world.tree, sequence, known)
        self._decode(generated)
        self._end()

    def turn(self, inputs: ReadOnly[int], generated: ReadOnly[int]) -> None:
        """A later turn: one row for its input, then one for each generated token."""
        self.start_turn(inputs, generated)
        self._end()

    def start_turn(self, inputs: ReadOnly[int], generated: ReadOnly[int]) -> None:
        """Start a later turn and leave it running."""
        self._begin(inputs)
        self.row(len(inputs))
        self._decode(generated)

    def _end(self) -> None:
        """Commit the turn; only its mark stays, for a late interrupt."""
        sequence = self.sequence
        sequence.commit(self.holder, self.checkpoints)
        sequence.thin_points(CHECKPOINTS)

    def close(self) -> None:
        """Release all memory; the published first input stays in the tree."""
        self.sequence.close()
