"""The prompts of waiting turns: how much of each the prefix tree has, and who else is computing the rest.

A match is kept for as long as the tree has not changed. Called by the planner alone.
"""

from __future__ import annotations

from typing import NamedTuple

from holdfast.core.admission import match_limit, packed_prompt
from holdfast.core.registry import Registry
from holdfast.core.session import Session
from holdfast.core.tokens import TOKEN_BYTES
from holdfast.core.turn import Turn


class PromptMatch(NamedTuple):
    """The longest prefix of a packed prompt that the tree had at a version."""

    version: int
    length: int
    packed: bytes


class Prompts:
    """Matches of waiting turns, by the number of the turn."""

    __slots__ = ("matches", "registry")

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.matches: dict[int, PromptMatch] = {}

    def forget(self, turn: Turn) -> None:
        """Drop the match of a turn that waits no more."""
        self.matches.pop(turn.number, None)

    def cached(self, turn: Turn) -> int:
        """How many tokens of a waiting turn's prompt are in memory, as of the tree's present shape."""
        session = self.registry.sessions[turn.session_id]
        if session.sequence.lease is not None:
            return session.sequence.computed
        return self._match(session, turn).length

    def _match(self, session: Session, turn: Turn) -> PromptMatch:
        tree = self.registry.tree
        known = self.matches.get(turn.number)
        if known is None or known.version != tree.version:
            packed = known.packed if known is not None else packed_prompt(session, turn)
            match = tree.match(session.tenant, packed, match_limit(turn, packed))
            known = self.matches[turn.number] = PromptMatch(tree.version, match.length, packed)
        return known

    def waits_for_prefix(self, session: Session, turn: Turn) -> bool:
        """Whether a running turn is computing a longer prefix of this prompt than the tree has.

        Where a prefix can be resumed only from a point, the running turn is asked to leave one; if it is past
        the place already, waiting would gain nothing.
        """
        if session.sequence.lease is not None or turn.known_before:
            return False
        registry = self.registry
        page_size = registry.ledger.layout.page_size
        page_bytes = page_size * TOKEN_BYTES
        match = self._match(session, turn)
        for other in registry.queues.running:
            running = other.turn
            assert running is not None
            if other.tenant != session.tenant or running.known_before or running.ending is not None:
                continue
            sequence = other.sequence
            end = (running.input_end - 1) // page_size * page_size
            if sequence.lease is None or sequence.lease.length >= end:
                continue
            theirs = sequence.tokens.packed(0, end)
            limit = min(len(theirs), match_limit(turn, match.packed) * TOKEN_BYTES) // page_bytes
            shared = shared_pages(theirs, match.packed, limit, page_bytes) * page_size
            if shared <= match.length:
                continue
            if registry.ledger.layout.cuts_anywhere:
                return True
            if any(point.length == shared for point in sequence.points):
                return True
            if sequence.planned < shared:
                sequence.cut_chunk_at(shared)
                return True
        return False


def shared_pages(left: bytes, right: bytes, limit: int, page_bytes: int) -> int:
    """How many whole pages two packed runs have in common, at most `limit`."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if left[low * page_bytes : middle * page_bytes] == right[low * page_bytes : middle * page_bytes]:
            low = middle
        else:
            high = middle - 1
    return low
