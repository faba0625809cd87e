"""The proposer of a draft model: drafts for all turns that decode, in one batch before each plan.

Before a plan is made the loop calls `prepare`, which decides for each turn how many drafts are worth it
(`gain`), lets the draft model catch up with the tokens that its cache lacks, and drafts. The planner then
asks for one turn after another and gets what is ready. Where n-grams of the turn's own history propose
something, that costs nothing and is taken instead.

A turn drafts from its second token on: the first does not wait for the draft model to read the prompt, which
it does in portions beside the steps that follow. A turn with penalties does not draft, since its distribution
depends on each token before. Drafts of a constrained turn end before the first token that its constraint
refuses or forces. If the draft model fails, its cache is given up and the step goes on without drafts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from holdfast.core.session import Life, Session
from holdfast.core.turn import Turn
from holdfast.engine.draft.cache import DraftCache
from holdfast.engine.draft.gain import LENGTH_MAX, REST_MAX, Acceptance, Costs
from holdfast.engine.draft.passes import Asked, DraftPasses
from holdfast.engine.step.runner import require_device
from holdfast.engine.step.speculation import Speculator, is_penalised
from holdfast.engine.step.watch import Watch
from holdfast.engine.text.stream import TurnStream

__all__ = ["DraftLimits", "DraftProposer", "Record"]

log = logging.getLogger("holdfast.engine")

FAILURES_MAX = 3
"""Passes in a row that may fail before the engine goes on without drafts."""


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """Bounds of one batch of drafts.

    `rows` turns draft at a time. `catch_up` tokens are computed before drafts. `context` is the longest
    sequence of the draft model; the vocabularies are those of the models' tables, padding included.
    """

    rows: int
    catch_up: int
    context: int
    draft_vocabulary: int
    target_vocabulary: int


@dataclass(slots=True)
class Record:
    """A session's acceptance, and its last drafts, for the positions from `asked` on."""

    acceptance: Acceptance = field(default_factory=Acceptance)
    asked: int = 0
    pending: list[int] = field(default_factory=list)


class DraftProposer:
    """Proposes drafts of a model for the turns of one engine; a `core.planner.Proposer`."""

    __slots__ = (
        "_failures",
        "_limits",
        "_ready",
        "_stream_of",
        "accepted",
        "cache",
        "costs",
        "length_max",
        "ngrams",
        "page_bytes",
        "passes",
        "proposed",
        "records",
    )

    def __init__(
        self,
        passes: DraftPasses,
        cache: DraftCache,
        limits: DraftLimits,
        costs: Costs,
        stream_of: Callable[[Turn], TurnStream],
        ngrams: Speculator | None,
        page_bytes: int,
    ) -> None:
        """`ngrams` proposes first, if given; `page_bytes` is the size of a page, for reports."""
        self.page_bytes = page_bytes
        self.passes = passes
        self.cache = cache
        self.costs = costs
        self.length_max = LENGTH_MAX
        """Most drafts of a row."""
        self.ngrams = ngrams
        self._limits = limits
        self._stream_of = stream_of
        self._ready: dict[int, list[int]] = {}
        self._failures = 0
        self.records: dict[str, Record] = {}
        self.proposed = 0
        self.accepted = 0

    @property
    def watch(self) -> Watch | None:
        """Who is given the hidden states of the target's steps; None: nobody needs them."""
        return None

    def __call__(self, session: Session, turn: Turn) -> list[int]:
        """The drafts that are ready for a turn; before its first token those of n-grams alone."""
        drafts = self._ready.pop(turn.number, None)
        if drafts is not None:
            return drafts
        return self.ngrams(session, turn) if self.ngrams is not None and not turn.generated else []

    # --- before a plan ----------------------------------------------------------------------------

    def prepare(self, running: Iterable[Session], sessions: Mapping[str, Session]) -> None:
        """Draft for the turns among those that run that wait for their next token; `sessions` are all."""
        self._ready.clear()
        decoding = [
            (session, session.turn)
            for session in running
            if session.turn is not None and self._decodes(session, session.turn)
        ]
        asked: list[Asked] = []
        wanted: dict[int, tuple[Session, Turn]] = {}
        left = self._limits.catch_up
        for session, turn in decoding:
            record = self._learn(session)
            if self.ngrams is not None and (guesses := self.ngrams(session, turn)):
                self._ready[turn.number] = guesses
                continue
            if self._failures >= FAILURES_MAX or left < 1 or len(asked) >= self._limits.rows:
                continue
            room = min(self.length_max, turn.request.max_tokens - turn.generated - 1)
            length = record.acceptance.length(self.costs, len(decoding), room)
            each = self._ask(session, turn, record, length, left, {one.entry.holder.name for one in asked})
            if each is not None:
                asked.append(each)
                left -= len(each.tokens)
                wanted[turn.number] = session, turn
        asked += self._others({one.entry.holder.name for one in asked}, sessions)
        if asked:
            self._run(asked, wanted)

    def _others(self, asked: set[str], sessions: Mapping[str, Session]) -> list[Asked]:  # noqa: ARG002
        """What is computed beside sessions that draft, for other sessions than those."""
        return []

    def _decodes(self, session: Session, turn: Turn) -> bool:
        """Whether a turn's next row samples its next token, and drafts may follow it."""
        sequence = session.sequence
        return (
            turn.generated > 0
            and not session.unsettled
            and turn.ending is None
            and session.life is Life.RUNNING
            and turn.request.max_tokens - turn.generated > 1
            and 1 <= sequence.known - sequence.planned <= self._limits.catch_up
            and sequence.next_cut() is None
            and not is_penalised(self._stream_of(turn).sampling)
        )

    def _ask(
        self, session: Session, turn: Turn, record: Record, length: int, left: int, needed: set[str]
    ) -> Asked | None:
        """What the draft model is asked for a turn; None if nothing, or without room in its memory."""
        known = len(session.sequence.tokens)
        length = min(length, self._limits.context - known)
        if length < 1:
            return None
        entry = self.cache.find(session, turn)
        have = len(entry.tokens)
        tokens = session.sequence.tokens.slice(have, min(known, have + left))
        if max(tokens) >= self._limits.draft_vocabulary:
            record.acceptance.rest = REST_MAX  # The draft model cannot read this history.
            return None
        drafts = length if have + len(tokens) == known else 0
        # For all that is known: what does not fit as a whole would be read in vain.
        if not self.cache.reserve(entry, known + length - 1, {session.id, *needed}):
            return None
        self.passes.begin(turn, self._stream_of(turn).sampling)
        return Asked(turn, entry, tokens, drafts)

    def _run(self, asked: list[Asked], wanted: dict[int, tuple[Session, Turn]]) -> None:
        """Let the draft model compute and draft. An exception costs drafts, not the step."""
        try:
            made = self.passes.run(asked)
        except Exception as error:
            self._failures += 1
            off = "; no more drafts are made" if self._failures >= FAILURES_MAX else ""
            log.error("the draft model failed%s", off, exc_info=error)
            self._give_up()
            require_device(self.passes.model.device)
            return
        self._failures = 0
        for each, drafts in zip(asked, made, strict=True):
            if drafts:
                session, turn = wanted[each.turn.number]
                self._offer(session, turn, drafts)

    def _give_up(self) -> None:
        """A pass failed, and nobody knows what is in memory."""
        self.cache.clear()

    def _offer(self, session: Session, turn: Turn, drafts: list[int]) -> None:
        """Have drafts ready for the planner, as far as they are tokens that may come."""
        most = self._limits.target_vocabulary
        outside = next((place for place, token in enumerate(drafts) if token >= most), len(drafts))
        drafts = drafts[:outside]
        constraint = self._stream_of(turn).constraint if drafts else None
        if constraint is not None:
            drafts = constraint.cut(drafts)
        if drafts:
            record = self.records[session.id]
            record.asked, record.pending = len(session.sequence.tokens), drafts
            self._ready[turn.number] = drafts

    def _learn(self, session: Session) -> Record:
        """The record of a session, with what became of its last drafts."""
        record = self.records.get(session.id)
        if record is None:
            record = self.records[session.id] = Record()
        if record.pending:
            drafts, record.pending = record.pending, []
            said = session.sequence.tokens.slice(record.asked, record.asked + len(drafts))
            if said:
                self.proposed += len(drafts)
                self.accepted += record.acceptance.note(drafts, said)
        return record

    # --- ends -------------------------------------------------------------------------------------

    def release(self, turn: Turn) -> None:
        """A turn is over: what follows in its session is said by others."""
        self._ready.pop(turn.number, None)
        self.passes.release(turn)
        record = self.records.get(turn.session_id)
        if record is not None:
            record.pending = []
        if self.ngrams is not None:
            self.ngrams.release(turn)

    def closed(self, session_id: str) -> None:
        """A session is closed: nothing is kept of it."""
        self.records.pop(session_id, None)
        self.cache.release(session_id)

    # --- what is shown ----------------------------------------------------------------------------

    @property
    def resting(self) -> int:
        """Sessions whose turns do not draft for now, because drafts of theirs did not pay."""
        return sum(1 for record in self.records.values() if record.acceptance.rest)
