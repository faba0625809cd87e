"""From a plan to tensors to tokens.

The executor keeps the model's storage, the block tables and the sampler, and runs plans in their order: table
changes, unit copies, moves between tiers, then one forward pass over all rows as a ragged batch, then
sampling. It decides nothing about memory. Nothing here works token by token in Python except what a turn
says: its text and its stops.

`start` launches a step and `finish` waits for its tokens, so that the next plan can be made in between; the
token a row sampled is kept on the device for a row that was planned before it was known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from holdfast import kernels
from holdfast.core.layout import Component, Tier
from holdfast.core.plan import Row, RowResult, StepResult, TierMove
from holdfast.core.registry import Plan
from holdfast.core.turn import Turn
from holdfast.engine.memory_plan import MemoryPlan
from holdfast.engine.sampler import BatchSampler, Sampled, token_logprobs
from holdfast.engine.stream import TokenLogprob, TurnStream
from holdfast.engine.tables import BlockTables
from holdfast.kernels import Batch, Pages
from holdfast.models.memory import Memory
from holdfast.models.model import Model

NUMERIC_ERROR = "numeric_error"


@dataclass(slots=True)
class Flight:
    """A step that was launched: what it sampled, still on the device."""

    plan: Plan
    sampled: Sampled | None
    tokens: Tensor | None
    places: list[tuple[int, int, int]]
    """For each row that samples: its index in the plan, its first and its end place among the samples."""


class Executor:
    """Runs plans on one device."""

    def __init__(
        self, model: Model, memory: MemoryPlan, rows_max: int, stream_of: Callable[[Turn], TurnStream]
    ) -> None:
        self.model = model
        self.layout = memory.layout
        self.memory = model.memory(memory.device, memory.layout.page_size)
        self.host = None
        if memory.host.full or memory.host.window or memory.host.state:
            self.host = Memory(
                model.memory_shape, memory.host, memory.layout.page_size, model.dtype, torch.device("cpu")
            )
        self.tables = BlockTables(model.device, memory.layout.full, memory.layout.window > 0)
        self.sampler = BatchSampler(rows_max, model.config.vocabulary, model.device)
        self.stream_of = stream_of
        self._sampler_rows: dict[int, tuple[int, int]] = {}
        self._free_rows = list(range(rows_max - 1, -1, -1))
        self.tokens_computed = 0

    def run(self, plan: Plan) -> StepResult:
        """Run a step to its end."""
        return self.finish(self.start(plan))

    # --- launching --------------------------------------------------------------------------------

    @torch.inference_mode()
    def start(self, plan: Plan) -> Flight:
        """Launch a step. Nothing here waits for the device."""
        self.tables.forget(plan.forgotten)
        for row in plan.rows:
            if row.table is not None:
                self.tables.change(row.number, row.table)
        self._copy(plan)
        for move in plan.moves:
            self._move(move)
        flight = Flight(plan, None, None, [])
        if plan.rows:
            self._compute(plan, flight)
        return flight

    def _copy(self, plan: Plan) -> None:
        by_component: dict[Component, tuple[list[int], list[int]]] = {}
        for copy in plan.copies:
            sources, destinations = by_component.setdefault(copy.component, ([], []))
            sources.append(copy.source)
            destinations.append(copy.destination)
        for component, (sources, destinations) in by_component.items():
            for storage in self.memory.storage(component.name.lower()):
                kernels.copy_units(storage, self._integers(sources), self._integers(destinations))

    def _move(self, move: TierMove) -> None:
        assert self.host is not None, "a move needs a host pool"
        name = move.component.name.lower()
        for here, there in zip(self.memory.storage(name), self.host.storage(name), strict=True):
            source, destination = (here, there) if move.source_tier is Tier.DEVICE else (there, here)
            destination[move.destinations] = source[move.sources].to(destination.device)

    def _compute(self, plan: Plan, flight: Flight) -> None:
        rows = plan.rows
        counts = [row.count for row in rows]
        batch, row_index = self._batch(rows, counts)
        hidden = self.model.forward(batch, self.memory)
        self.tokens_computed += sum(counts)
        wanted: list[int] = []
        end = 0
        samplers: list[int] = []
        positions: list[int] = []
        for index, row in enumerate(rows):
            end += row.count
            self._note_prompt(row, hidden, end)
            if not row.sample:
                continue
            first = len(wanted)
            for place in range(end - row.drafts - 1, end):
                wanted.append(place)
                positions.append(row.start + row.count - (end - place) + 1)
                samplers.append(self._sampler_row(plan, row, positions[-1]))
            flight.places.append((index, first, len(wanted)))
        if not wanted:
            return
        logits = self.model.logits(hidden[wanted])
        flight.sampled = self.sampler.sample(logits, samplers, positions)
        flight.tokens = flight.sampled.tokens
        lasts = [stop - 1 for _, _, stop in flight.places]
        owners = row_index[[index for index, _, _ in flight.places]]
        # A row whose logits were not finite has no token; what is planned after it is lost, but must run.
        self.tables.note_sampled(owners, flight.tokens[lasts].clamp(min=0))

    def _batch(self, rows: list[Row[Turn]], counts: list[int]) -> tuple[Batch, Tensor]:
        """The step's rows as one ragged batch, and the table row of each."""
        device = self.model.device
        starts = [row.start for row in rows]
        contexts = [row.start + row.count for row in rows]
        row_index = self._integers([self.tables.row(row.number) for row in rows])
        count = torch.tensor(counts, dtype=torch.int64)
        row_start = torch.zeros(len(rows) + 1, dtype=torch.int32)
        row_start[1:] = torch.cumsum(count, 0)
        shift = torch.tensor(starts, dtype=torch.int64) - row_start[:-1]
        positions = torch.arange(int(row_start[-1]), dtype=torch.int64) + torch.repeat_interleave(
            shift, count
        )
        tokens: list[int] = []
        fed: list[tuple[int, int]] = []
        for index, row in enumerate(rows):
            tokens += row.tokens
            if len(row.tokens) < row.count:
                fed.append((len(tokens), index))
                tokens.append(0)
        token_tensor = torch.tensor(tokens, dtype=torch.int64).to(device)
        if fed:
            token_tensor[[place for place, _ in fed]] = self.tables.sampled(
                row_index[[index for _, index in fed]]
            )
        owner = torch.repeat_interleave(torch.arange(len(rows)), count).to(device)
        positions = positions.to(device)
        width = self.layout.pages_for(max(contexts))
        states = [row.state if row.state is not None else (None, 0) for row in rows]
        batch = Batch(
            tokens=token_tensor,
            positions=positions,
            row_start=row_start.to(device),
            context=torch.tensor(contexts, dtype=torch.int32).to(device),
            state_source=self._small([-1 if source is None else source for source, _ in states]),
            state_destination=self._small([destination for _, destination in states]),
            full=self._pages(self.tables.full(row_index, width), owner, positions)
            if self.layout.full
            else None,
            window=self._pages(self.tables.window(row_index, width), owner, positions)
            if self.layout.window
            else None,
            rows=len(rows),
            count_max=max(counts),
            context_max=max(contexts),
            rows_of_one=counts.count(1),
        )
        return batch, row_index

    def _pages(self, table: Tensor, owner: Tensor, positions: Tensor) -> Pages:
        page_size = self.layout.page_size
        units = table[owner, positions // page_size].to(torch.int64)
        return Pages(table, units * page_size + positions % page_size, page_size)

    def _note_prompt(self, row: Row[Turn], hidden: Tensor, end: int) -> None:
        """Log-probabilities of the prompt's own tokens, where a turn asks for them."""
        if row.turn.over:
            return
        stream = self.stream_of(row.turn)
        top = stream.sampling.prompt_logprobs
        if top is None or row.start + 1 >= len(stream.prompt_tokens):
            return
        # What is computed again, after a retraction, has been noted before.
        first = max(row.start, stream.input_first + len(stream.prompt_logprobs)) + 1
        following = stream.prompt_tokens[first : row.start + row.count + 1]
        if not following:
            return
        place = end - row.count + first - 1 - row.start
        logits = self.model.logits(hidden[place : place + len(following)])
        values, ids, tops = token_logprobs(logits, self._integers(following), top)
        for token, value, best, best_values in zip(
            following, values.tolist(), ids.tolist(), tops.tolist(), strict=True
        ):
            stream.prompt_logprobs.append(
                TokenLogprob(token, value, tuple(zip(best, best_values, strict=True)))
            )

    # --- sampling rows ----------------------------------------------------------------------------

    def _sampler_row(self, plan: Plan, row: Row[Turn], position: int) -> int:
        """The sampler row of a turn; taken anew where a lost step has counted tokens that were never said."""
        turn = row.turn
        held = self._sampler_rows.get(turn.number)
        if held is not None and held[1] < position:
            self._sampler_rows[turn.number] = (held[0], position)
            return held[0]
        if held is not None:
            self.sampler.release(held[0])
            place = held[0]
        else:
            place = self._free_rows.pop() if self._free_rows else self._take_idle_row(plan)
        stream = self.stream_of(turn)
        self.sampler.admit(
            place,
            stream.sampling,
            prompt=stream.prompt_tokens,
            generated=stream.tokens,
            end_tokens=sorted(stream.ends),
        )
        self._sampler_rows[turn.number] = (place, position)
        return place

    def _take_idle_row(self, plan: Plan) -> int:
        """The sampler row of a turn that is not in this step: one that was retracted takes another later."""
        active = {row.turn.number for row in plan.rows}
        number = next(number for number in self._sampler_rows if number not in active)
        place, _ = self._sampler_rows.pop(number)
        self.sampler.release(place)
        return place

    def release(self, turn: Turn) -> None:
        """A turn is over: its sampler row is free."""
        held = self._sampler_rows.pop(turn.number, None)
        if held is not None:
            self.sampler.release(held[0])
            self._free_rows.append(held[0])

    # --- what came of it --------------------------------------------------------------------------

    def finish(self, flight: Flight) -> StepResult:
        """Wait for a step's tokens and say what came of each row."""
        plan = flight.plan
        results = [RowResult([]) for _ in plan.rows]
        if flight.tokens is not None and flight.sampled is not None:
            tokens = flight.tokens.tolist()
            logprobs = _logprobs(flight.sampled, tokens)
            for index, first, stop in flight.places:
                results[index] = self._result(plan.rows[index], tokens[first:stop], logprobs, first)
        return StepResult(results, [True] * len(plan.moves))

    def _result(
        self, row: Row[Turn], sampled: list[int], logprobs: dict[int, TokenLogprob], first: int
    ) -> RowResult:
        """The drafts that the model agrees with, then its own next token, up to where the turn stops."""
        drafts = row.tokens[row.count - row.drafts :]
        accepted = 0
        while accepted < len(drafts) and sampled[accepted] == drafts[accepted]:
            accepted += 1
        said = sampled[: accepted + 1]
        if any(token < 0 for token in said):
            return RowResult([], error=NUMERIC_ERROR)
        if row.turn.over:
            return RowResult(said)
        stream = self.stream_of(row.turn)
        count = stream.sampling.logprobs
        asked = None
        if count is not None:
            found = [logprobs[first + place] for place in range(len(said))]
            asked = [replace(each, top=each.top[:count]) for each in found]
        taken = stream.push(said, asked)
        return RowResult(taken, stream.finish)

    def _integers(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.model.device)

    def _small(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32).to(self.model.device)


def _logprobs(sampled: Sampled, tokens: list[int]) -> dict[int, TokenLogprob]:
    """Log-probabilities by the place of their sample."""
    if sampled.logprobs is None or sampled.top_ids is None or sampled.top_logprobs is None:
        return {}
    values, ids, tops = sampled.logprobs.tolist(), sampled.top_ids.tolist(), sampled.top_logprobs.tolist()
    return {
        place: TokenLogprob(tokens[place], value, tuple(zip(best, best_values, strict=True)))
        for place, value, best, best_values in zip(sampled.logprob_rows, values, ids, tops, strict=True)
    }
