"""Passes of a draft head: it is fed hidden states of the target model, then drafts one token after another.

As with a draft model the passes are steps of an executor of its own. Before each of them its hidden states
are put where the head reads them: those of the target, of which a pass takes a bounded number, and then those
that the head's own last pass has left. Place `i` of a head predicts token `i + 2`, so that random numbers are
drawn for that position. Used by `head_proposer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.core.plan import Row
from holdfast.core.turn import Turn
from holdfast.engine.draft.hidden import HeadCache, Span
from holdfast.engine.draft.passes import Asked, DraftPasses
from holdfast.engine.sampling import Sampling
from holdfast.engine.start.memory_plan import MemoryPlan
from holdfast.engine.step.executor import Executor
from holdfast.engine.step.flight import Flight, Forwarded
from holdfast.engine.step.inputs import Sample
from holdfast.engine.text.stream import TurnStream
from holdfast.engine.text.tokenizer import Tokenizer
from holdfast.models.heads import FEED_TOKENS, DraftHead
from holdfast.models.model import StepModel

__all__ = ["HeadPasses"]


class HeadExecutor(Executor):
    """Runs a head. It knows at which position of its session each row's first place is."""

    def __init__(
        self,
        model: StepModel,
        memory: MemoryPlan,
        rows_max: int,
        stream_of: Callable[[Turn], TurnStream],
    ) -> None:
        super().__init__(model, memory, rows_max, stream_of)
        self.positions: dict[int, int] = {}
        """The position of the token at place 0 of a session, by its number."""
        self.hidden: Tensor | None = None
        """What the last pass has left, for all of its tokens."""

    def first_position(self, row: Row[Turn]) -> int:
        return row.start + self.positions[row.number]

    def _forward(self, rows: list[Row[Turn]], tables: list[int], samples: list[Sample]) -> Forwarded:
        outcome = super()._forward(rows, tables, samples)
        self.hidden = outcome.hidden
        return outcome


class Share(NamedTuple):
    """Some of the tokens that are asked for, in one pass."""

    asked: Asked
    first: int
    stop: int


class HeadPasses(DraftPasses):
    """Runs a draft head."""

    __slots__ = ("_silent", "head")

    executor: HeadExecutor

    def __init__(
        self, head: DraftHead, memory: MemoryPlan, cache: HeadCache, rows_max: int, tokenizer: Tokenizer
    ) -> None:
        super().__init__(head, memory, cache, rows_max, tokenizer, HeadExecutor)
        self.head = head
        self._silent = TurnStream(tokenizer, Sampling(max_tokens=1), ())
        """Of turns that are fed and do not draft."""

    @torch.inference_mode()
    def run(self, asked: list[Asked]) -> list[list[int]]:
        """Feed each row and draft; the entries have what was fed afterwards, and nothing of the drafts.

        An entry has pages for its places, those asked for, and all drafts but the last.
        """
        forgotten = self._cache.take_forgotten()
        for number in forgotten:
            self.executor.positions.pop(number, None)
        for each in asked:
            self.executor.positions[each.entry.number] = each.entry.base + 1
        flights: list[Flight] = []
        for shares in _portions(asked):
            flights.append(self._feed(shares, forgotten))
            forgotten = []
        drafting = [each for each in asked if each.drafts]
        places = _ends(shares)
        for place in range(1, max((each.drafts for each in drafting), default=0)):
            going = [index for index, each in enumerate(drafting) if each.drafts > place]
            self._go_on([places[index] for index in going])
            drafting = [drafting[index] for index in going]
            places = list(range(len(drafting)))
            plan = self._plan()
            for each in drafting:
                start = each.entry.places + len(each.tokens) + place - 1
                plan.rows.append(Row(each.turn, each.entry.number, start, 1, [], True, None))
            flights.append(self.executor.start(plan))
        drafts = self._collect(asked, flights)
        for each in asked:
            each.entry.tokens.extend(each.tokens)
            each.entry.checked = len(each.entry.tokens)
        return drafts

    def _stream_of(self, turn: Turn) -> TurnStream:
        return self._streams.get(turn.number, self._silent)

    def _feed(self, shares: Sequence[Share], forgotten: list[int]) -> Flight:
        """One pass over hidden states of the target; rows that draft sample after their last token."""
        plan = self._plan()
        plan.forgotten = forgotten
        spans: list[Span] = []
        for each, first, stop in shares:
            change = self._cache.table_change(each.entry)
            start, samples = each.entry.places + first, each.drafts > 0 and stop == len(each.tokens)
            row: Row[Turn] = Row(
                each.turn, each.entry.number, start, stop - first, each.tokens[first:stop], samples, change
            )
            plan.rows.append(row)
            spans += _cut(each.spans, first, stop)
        kinds = range(len(spans[0].features))
        parts = [torch.cat([span.features[kind][span.first : span.stop] for span in spans]) for kind in kinds]
        features = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        self.head.given[: features.shape[0]].copy_(self.head.project(features))
        return self.executor.start(plan)

    def _go_on(self, places: list[int]) -> None:
        """The next pass takes what the last one has left at some of its tokens."""
        assert self.executor.hidden is not None, "a pass came before"
        index = torch.tensor(places).to(self.head.device, non_blocking=True)
        self.head.given[: len(places)].copy_(self.executor.hidden.index_select(0, index))


def _portions(asked: list[Asked]) -> Iterator[list[Share]]:
    """All tokens in as few passes as there is room for; rows that draft end in the last one."""
    if sum(len(each.tokens) for each in asked) <= FEED_TOKENS:
        yield [Share(each, 0, len(each.tokens)) for each in asked]
        return
    last = [Share(each, len(each.tokens) - 1, len(each.tokens)) for each in asked if each.drafts]
    portion: list[Share] = []
    room = FEED_TOKENS
    for each in asked:
        first, end = 0, len(each.tokens) - (1 if each.drafts else 0)
        while first < end:
            stop = min(end, first + room)
            portion.append(Share(each, first, stop))
            room -= stop - first
            first = stop
            if not room:
                yield portion
                portion, room = [], FEED_TOKENS
    if portion:
        yield portion
    if last:
        yield last


def _ends(shares: Sequence[Share]) -> list[int]:
    """Where in a pass the last token of each row that drafts is."""
    ends: list[int] = []
    end = 0
    for each, first, stop in shares:
        end += stop - first
        if each.drafts:
            ends.append(end - 1)
    return ends


def _cut(spans: Sequence[Span], first: int, stop: int) -> Iterator[Span]:
    """The tokens `first` to `stop` of spans that follow each other."""
    for span in spans:
        count = span.stop - span.first
        if first < count and stop > 0:
            yield Span(span.features, span.first + max(0, first), span.first + min(count, stop))
        first, stop = first - count, stop - count
