"""Passes of the draft model: it catches up with the tokens of sequences, then drafts one token after another.

The passes are steps of an `Executor` of its own, with plans that are made here: the first computes what the
cache lacks of each row, the others one token each, which stays on the device from one pass to the next. The
host waits once, for all drafts together.

A draft is sampled as the target's token at that position will be: with the same temperature, top-k, top-p,
min-p and biases, and with the same random numbers, which are a function of seed, position and token. Two
similar distributions that race with the same waiting times mostly choose the same token; so drafts are
accepted nearly as often as by rejection sampling, and the target's tokens stay those that it would sample
without drafts. Used by `proposer`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, Protocol

from holdfast.core.in_flight import Plan
from holdfast.core.plan import Row
from holdfast.core.turn import Turn
from holdfast.engine.draft.cache import DraftCache, Entry
from holdfast.engine.draft.hidden import Span
from holdfast.engine.sampling import Sampling
from holdfast.engine.start.memory_plan import MemoryPlan
from holdfast.engine.step.executor import Executor
from holdfast.engine.step.flight import Flight
from holdfast.engine.text.stream import TurnStream
from holdfast.engine.text.tokenizer import Tokenizer
from holdfast.models.model import StepModel

__all__ = ["Asked", "DraftPasses"]


class Asked(NamedTuple):
    """Tokens of a turn that the draft model computes, and how many it drafts after them.

    `spans` are the hidden states of the tokens, for a head.
    """

    turn: Turn
    entry: Entry
    tokens: list[int]
    drafts: int
    spans: tuple[Span, ...] = ()


class RunsPasses(Protocol):
    """Makes an executor."""

    def __call__(
        self,
        model: StepModel,
        memory: MemoryPlan,
        rows_max: int,
        stream_of: Callable[[Turn], TurnStream],
    ) -> Executor: ...


class DraftPasses:
    """Runs a draft model."""

    __slots__ = ("_cache", "_step", "_streams", "_tokenizer", "executor", "model", "tokens_computed")

    def __init__(
        self,
        model: StepModel,
        memory: MemoryPlan,
        cache: DraftCache,
        rows_max: int,
        tokenizer: Tokenizer,
        runs: RunsPasses = Executor,
    ) -> None:
        """`runs` makes the executor of the passes."""
        self.model = model
        self.executor = runs(model, memory, rows_max, self._stream_of)
        self._cache = cache
        self._tokenizer = tokenizer
        self._streams: dict[int, TurnStream] = {}
        self._step = 0
        self.tokens_computed = 0

    def begin(self, turn: Turn, sampling: Sampling) -> None:
        """Sample the drafts of a turn as its tokens are sampled; what only reports is left out.

        So are biases of tokens that the draft model's tables do not have.
        """
        if turn.number not in self._streams:
            size = self.model.config.vocabulary
            bias = {token: value for token, value in sampling.logit_bias.items() if token < size}
            plain = replace(sampling, logprobs=None, prompt_logprobs=None, min_tokens=0, logit_bias=bias)
            self._streams[turn.number] = TurnStream(self._tokenizer, plain, ())

    def release(self, turn: Turn) -> None:
        """Release what a turn that is over has here."""
        if self._streams.pop(turn.number, None) is not None:
            self.executor.release(turn)

    @property
    def turns(self) -> int:
        """Turns that have something here."""
        return len(self._streams)

    def run(self, asked: list[Asked]) -> list[list[int]]:
        """Compute the tokens of each row and draft; the entries have what was computed afterwards.

        An entry has pages for its tokens, those asked for, and all drafts but the last.
        """
        plan = self._plan()
        plan.forgotten = self._cache.take_forgotten()
        for each in asked:
            change = self._cache.table_change(each.entry)
            start, samples = len(each.entry.tokens), each.drafts > 0
            plan.rows.append(
                Row(each.turn, each.entry.number, start, len(each.tokens), each.tokens, samples, change)
            )
        flights = [self.executor.start(plan)]
        for place in range(1, max((each.drafts for each in asked), default=0)):
            plan = self._plan()
            for each in asked:
                if each.drafts > place:
                    start = len(each.entry.tokens) + len(each.tokens) + place - 1
                    plan.rows.append(Row(each.turn, each.entry.number, start, 1, [], True, None))
            flights.append(self.executor.start(plan))
        drafts = self._collect(asked, flights)
        for each, made in zip(asked, drafts, strict=True):
            each.entry.tokens.extend(each.tokens)
            each.entry.checked = len(each.entry.tokens)
            each.entry.tokens.extend(made[:-1])
        return drafts

    def _collect(self, asked: list[Asked], flights: list[Flight]) -> list[list[int]]:
        """The drafts of each row. They end before a token that could not be sampled."""
        by_turn: dict[int, list[int]] = {each.turn.number: [] for each in asked}
        for flight in flights:
            self.tokens_computed += sum(row.count for row in flight.plan.rows)
            if flight.tokens is None:
                continue
            tokens = flight.tokens.wait()
            for index, first, _ in flight.places:
                by_turn[flight.plan.rows[index].turn.number].append(tokens[first])
        return [_valid(by_turn[each.turn.number]) for each in asked]

    def _plan(self) -> Plan:
        self._step += 1
        return Plan(self._step)

    def _stream_of(self, turn: Turn) -> TurnStream:
        return self._streams[turn.number]


def _valid(drafts: list[int]) -> list[int]:
    """The drafts up to one that could not be sampled: the model's numbers were not finite."""
    bad = next((place for place, token in enumerate(drafts) if token < 0), None)
    return drafts if bad is None else drafts[:bad]
