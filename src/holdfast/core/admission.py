"""Admission: one transaction that owns everything a turn allocates until it runs.

It matches the prefix tree, leases the match, copies a tail, appends the input and begins the turn on the
session's memory. Until the turn is running the whole admission can be undone, which restores the session.
"""

from __future__ import annotations

from holdfast.core.fallback import fall_back, retract
from holdfast.core.layout import MemoryLayout
from holdfast.core.ledger import OutOfUnits
from holdfast.core.points import ResumePoint
from holdfast.core.registry import Registry
from holdfast.core.sequence import Sequence
from holdfast.core.session import Session
from holdfast.core.sharing import lean, tail_sources
from holdfast.core.tokens import TOKEN_BYTES, pack
from holdfast.core.turn import Turn


class Admission:
    """The allocations of one turn so far; `pinned` are the points that were pinned before it began."""

    __slots__ = ("branch", "known", "leaned", "pinned", "registry", "session", "turn")

    def __init__(self, registry: Registry, session: Session, turn: Turn) -> None:
        self.registry = registry
        self.session = session
        self.turn = turn
        self.known = session.sequence.known
        self.branch = 0
        self.leaned = False
        self.pinned: list[ResumePoint] | None = None

    def take(self) -> None:
        """Take the session's memory for the turn, or raise `OutOfUnits`: then `undo` gives all of it back."""
        turn, sequence = self.turn, self.session.sequence
        if sequence.lease is None:
            self._lean()
        if not turn.request.tokens and not turn.generated and sequence.computed == sequence.known:
            # To continue without new input, the last known token is computed once more.
            copies = fall_back(sequence, sequence.known - 1)
            self.registry.in_flight.add_copies(copies, self.session)
        if sequence.known == turn.known_before:
            sequence.tokens.extend(turn.request.tokens)
        pinned = [point for point in sequence.points if point.pinned]
        sequence.begin(turn.holder, turn.known_before)
        self.pinned = pinned
        layout = self.registry.ledger.layout
        if turn.known_before == 0:
            sequence.cut_chunk_at(self.branch // layout.page_size * layout.page_size)
        if not turn.is_open:
            ask_for_points(layout, sequence, turn)

    def _lean(self) -> None:
        """Start from the longest prefix in the tree; a later turn takes no more than its history from it."""
        registry, session = self.registry, self.session
        packed = packed_prompt(session, self.turn)
        match = registry.tree.match(session.tenant, packed, match_limit(self.turn, packed))
        lease = registry.tree.lease(match, session.id)
        registry.ledger.purpose = "tail copy"
        try:
            copies = lean(
                session.sequence, lease, match.length, tail_sources(lease) if match.tail is not None else {}
            )
        except OutOfUnits:
            lease.release()
            raise
        self.leaned = True
        self.branch = match.branch
        registry.in_flight.add_copies(copies, session)

    def undo(self) -> None:
        """Give everything back. The session is as it was before."""
        session, sequence = self.session, self.session.sequence
        if self.pinned is not None:
            retract(sequence, session.holder, session.checkpoints)
            for point in sequence.points:
                point.pinned = point in self.pinned
        sequence.tokens.cut(self.known)
        if self.leaned:
            self.registry.in_flight.purge_copies(session)
            sequence.drop_memory()


def ask_for_points(layout: MemoryLayout, sequence: Sequence, turn: Turn) -> None:
    """Ask for resume points where an interruption, or another request, is likely to resume."""
    if len(turn.request.tokens) > layout.checkpoint_tokens:
        sequence.cut_chunk_at(turn.input_end)
    if turn.known_before == 0:
        turn.publish_at = turn.input_end
        sequence.cut_chunk_at((turn.input_end - 1) // layout.page_size * layout.page_size)


def packed_prompt(session: Session, turn: Turn) -> bytes:
    """The history and the turn's input, in the key form of the prefix tree."""
    tokens = session.sequence.tokens
    history = tokens.packed(0, len(tokens))
    return history if len(tokens) > turn.known_before else history + pack(turn.request.tokens)


def match_limit(turn: Turn, packed: bytes) -> int:
    """How much of a prompt may come from the tree: a first turn computes at least one token itself."""
    limit = turn.known_before or len(packed) // TOKEN_BYTES - 1
    first = turn.request.computes_from
    return limit if first is None else min(limit, first)
