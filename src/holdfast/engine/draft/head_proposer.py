"""The proposer of a draft head: as that of a draft model, but fed with the target's hidden states.

The executor notes the hidden states of each step (`hidden`). Before the next plan the head is fed those whose
next token is known by now: of prompts as they are computed, and of answers as they grow. A turn that is about
to decode is fed up to its last token but one and drafts in the same pass. A session that does not draft (it
rests, n-grams have something, its turn has penalties) is fed a few tokens at a time, so that it costs next to
nothing. When its turn is over, it is fed what is left.

The target's history is never computed for a head's sake. Where a session's hidden states were not seen, as
after a restart, a fork or an eviction, its memory begins at the first position that is fed
(docs/decisions/0048). If the head fails, its cache is given up and the step goes on without drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from holdfast.core.session import Session
from holdfast.core.tokens import TokenLog
from holdfast.core.turn import Turn
from holdfast.engine.draft.cache import Entry
from holdfast.engine.draft.gain import Costs
from holdfast.engine.draft.head_passes import HeadPasses
from holdfast.engine.draft.hidden import HeadCache, HiddenStates, Piece, Span
from holdfast.engine.draft.passes import Asked
from holdfast.engine.draft.proposer import FAILURES_MAX, DraftLimits, DraftProposer, Record
from holdfast.engine.step.speculation import Speculator
from holdfast.engine.step.watch import Watch
from holdfast.engine.text.stream import TurnStream

__all__ = ["FEED_LEAST", "HeadProposer"]

FEED_LEAST = 32
"""Tokens from which on a session is fed that does not draft, while its turn runs."""


class HeadProposer(DraftProposer):
    """Proposes drafts of a head for the turns of one engine."""

    __slots__ = ("_left", "states")

    cache: HeadCache

    def __init__(
        self,
        passes: HeadPasses,
        cache: HeadCache,
        limits: DraftLimits,
        costs: Costs,
        stream_of: Callable[[Turn], TurnStream],
        ngrams: Speculator | None,
        page_bytes: int,
    ) -> None:
        super().__init__(passes, cache, limits, costs, stream_of, ngrams, page_bytes)
        self.states = HiddenStates()
        self._left: list[Piece] = []
        """What is not fed in this round."""

    @property
    def watch(self) -> Watch:
        return self.states

    # --- before a plan ----------------------------------------------------------------------------

    def _ask(
        self,
        session: Session,
        turn: Turn,
        record: Record,  # noqa: ARG002
        length: int,
        left: int,  # noqa: ARG002
        needed: set[str],
    ) -> Asked | None:
        """What the head is asked for a turn that decodes; None without the hidden states for it."""
        if length < 1:
            return None
        asked = self._feed(session, turn, length, needed)
        if asked is not None and asked.drafts:
            self.passes.begin(turn, self._stream_of(turn).sampling)
        return asked

    def _others(self, asked: set[str], sessions: Mapping[str, Session]) -> list[Asked]:
        """Feed the sessions of which there are new hidden states, apart from those that draft."""
        found: list[Asked] = []
        needed = set(asked)
        for session_id, pieces in list(self.states.fresh.items()):
            session = sessions.get(session_id)
            if session is None:
                del self.states.fresh[session_id]
            elif session.unsettled:
                continue
            elif session.turn is not None and sum(len(piece.tokens) for piece in pieces) < FEED_LEAST:
                self._left += pieces
            else:
                each = self._feed(session, pieces[-1].turn, 0, needed)
                if each is not None:
                    found.append(each)
                    needed.add(session_id)
        self.states.keep(self._left)
        self._left = []
        return found

    def _feed(self, session: Session, turn: Turn, drafts: int, needed: set[str]) -> Asked | None:
        """Feed a session what is there of it, and draft if that is up to its last token but one.

        None if there is nothing, too little or no room; what is there is kept unless there is no room: then
        its memory begins anew later.
        """
        entry, log = self.cache.find(session, turn), session.sequence.tokens
        pieces = self.cache.pieces.setdefault(session.id, [])
        pieces += self.states.take(session.id, session.number)
        spans, place = self._gather(entry, pieces, log)
        first = len(entry.tokens)
        count = place + 1 - first
        drafts = min(drafts, self._limits.context - entry.places - count) if place == len(log) - 1 else 0
        enough = count >= FEED_LEAST or session.turn is None or drafts > 0
        if not spans or not enough:
            self._left += pieces
            return None
        places = entry.places + count + max(0, drafts - 1)
        if places > self._limits.context or not self.cache.reserve(entry, places, {session.id, *needed}):
            pieces.clear()
            return None
        pieces[:] = [piece for piece in pieces if piece.agreed(log) > place]
        _trim(pieces, place)
        self._left += pieces
        return Asked(turn, entry, log.slice(first, place + 1), max(0, drafts), tuple(spans))

    def _gather(self, entry: Entry, pieces: list[Piece], log: TokenLog) -> tuple[list[Span], int]:
        """The hidden states that follow what an entry holds, and the position that they end before.

        Where they do not follow it, the entry begins anew. Pieces of tokens that the log does not have are
        dropped.
        """
        pieces[:] = [piece for piece in pieces if piece.agreed(log) > piece.start]
        place = len(entry.tokens) - 1 if len(entry.tokens) > entry.base else -1
        spans: list[Span] = []
        for piece in pieces:
            # The place of a token takes the next one, which must be known.
            end = min(piece.agreed(log), len(log) - 1)
            if place < 0 or piece.start > place:
                if end <= piece.start:
                    continue
                self.cache.begin(entry, log, piece.start)
                place, spans = piece.start, []
            if end > place:
                first = piece.first + place - piece.start
                spans.append(Span(piece.features, first, first + end - place))
                place = end
        return spans, place

    def _give_up(self) -> None:
        super()._give_up()
        self.states.fresh.clear()
        self._left = []
        if self._failures >= FAILURES_MAX:
            self.states.stop()

    # --- ends -------------------------------------------------------------------------------------

    def closed(self, session_id: str) -> None:
        """A session is closed: nothing is kept of it."""
        self.states.fresh.pop(session_id, None)
        super().closed(session_id)


def _trim(pieces: Sequence[Piece], place: int) -> None:
    """Leave out of pieces what was fed: the positions before `place`."""
    for piece in pieces:
        fed = min(place - piece.start, len(piece.tokens))
        if fed > 0:
            piece.start += fed
            piece.tokens = piece.tokens[fed:]
            piece.first += fed
