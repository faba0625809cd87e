"""The executor: plans to tensors to tokens.

It owns the model's storage, the block tables and the sampler, and runs plans in order: table changes, unit
copies, moves between tiers, then one forward pass over all rows as a ragged batch, then sampling. It makes no
memory decisions. Nothing here works token by token in Python except a turn's text and stops.

`start` launches a step and `finish` waits for its tokens, so that the next plan can be made in between; the
sampled token of a row stays on the device for a row that was planned before it was known. A step is sent to
the device in one copy; on a GPU a small step is one CUDA graph.

The tokens of a constrained turn are sampled under a mask, which depends on the token before. A step with such
a turn is launched without sampling; once the step before is settled, `sample` fills the masks and samples.
Other steps are sampled by `start`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from holdfast import kernels
from holdfast.core.layout import Component
from holdfast.core.plan import Row, RowResult, StepResult
from holdfast.core.registry import Plan
from holdfast.core.turn import Turn
from holdfast.engine.sampling import Sampling
from holdfast.engine.start.memory_plan import MemoryPlan
from holdfast.engine.step.constrained import ConstrainedRows
from holdfast.engine.step.flight import Flight, Forwarded, Unsampled
from holdfast.engine.step.graph_order import GraphCounts, first_shapes
from holdfast.engine.step.graphs import (
    TILES_ONLY,
    Outcome,
    Progress,
    Recorder,
    StepGraphs,
    compile_masked,
    largest_of,
    record_cuda,
    run_step,
    shapes,
    small_step_of,
)
from holdfast.engine.step.inputs import (
    Components,
    Limits,
    Lists,
    Padding,
    Sample,
    Shape,
    StepBuffers,
    Views,
    Words,
    pack,
    views,
)
from holdfast.engine.step.lead import Lead, StepCall
from holdfast.engine.step.prompt_logprobs import note_prompt
from holdfast.engine.step.results import logprobs_of, row_result, with_forced
from holdfast.engine.step.runner import DeviceGuard
from holdfast.engine.step.sampler import BatchSampler
from holdfast.engine.step.split_keys import sharing_for
from holdfast.engine.step.staging import Staging, fill
from holdfast.engine.step.tables import UNUSED_ROW, BlockTables
from holdfast.engine.step.watch import Watch
from holdfast.engine.text.stream import TurnStream
from holdfast.engine.tiers.host import HostTier, copier_for
from holdfast.kernels import Batch, TokenMasks
from holdfast.models.memory import Memory, UnitCounts
from holdfast.models.model import StepModel
from holdfast.models.resting import RowState

__all__ = ["Executor"]


class Executor:
    """Runs plans on one device."""

    def __init__(
        self,
        model: StepModel,
        memory: MemoryPlan,
        rows_max: int,
        stream_of: Callable[[Turn], TurnStream],
        *,
        ahead: bool = True,
        lead: Lead | None = None,
        watch: Watch | None = None,
    ) -> None:
        """With `ahead` nobody but the executor uses the matchers of turns in a step, even between steps.

        `lead` tells other ranks of what is done on the device, before it is done here. `watch` is given the
        hidden states of every step.
        """
        self.model = model
        self._lead = lead
        self._watch = watch
        self.guard = DeviceGuard(model.device, lead)
        self.layout = memory.layout
        # One more unit of each component for the padding of captured batches, unknown to the core.
        counts = memory.device
        self.memory = model.memory(
            UnitCounts(counts.full + 1, counts.window + 1, counts.state + 1, memory.running_states + 1),
            memory.layout.page_size,
            memory.types,
        )
        self._reserved = counts
        self.host = None
        if memory.host.full or memory.host.window or memory.host.state:
            self.host = Memory(
                model.memory_shape, memory.host, memory.layout.page_size, memory.types, torch.device("cpu")
            )
        self.tables = BlockTables(model.device, memory.layout.full, memory.layout.window > 0)
        self.sampler = BatchSampler(rows_max, model.config.vocabulary, model.device)
        self._constrained = ConstrainedRows(model.config.vocabulary, model.device, stream_of, ahead=ahead)
        self.stream_of = stream_of
        self._rows_max = rows_max
        self._staging = Staging(model.device)
        self._staging.pin(self.host)
        self.host_tier = HostTier(self.memory, self.host, copier_for(model.device), lead)
        if lead is not None:
            self.memory.follow(lead.moved_states)
        padding_state = memory.running_states if memory.types.rested else counts.state
        self._padding = Padding(padding_state, self.sampler.padding_row, UNUSED_ROW)
        self._context_max = min(model.context_length, memory.tokens_max)
        self._sharing = sharing_for(
            model.config,
            largest_of(shapes(rows_max)),
            memory.layout.page_size,
            (model.dtype, memory.types.kv),
            model.device,
            memory.tuning.step_tokens,
        )
        if self._sharing is not None:
            self._sharing.warm_up(model.device)
        self._graphs: StepGraphs | None = None
        self._sampler_rows: dict[int, tuple[int, int]] = {}
        self._free_rows = list(range(rows_max - 1, -1, -1))
        self.tokens_computed = 0

    def run(self, plan: Plan) -> StepResult:
        """Run a step to its end."""
        flight = self.start(plan)
        self.sample(flight)
        return self.finish(flight)

    # --- graphs -----------------------------------------------------------------------------------

    @torch.inference_mode()
    def capture(
        self, progress: Progress | None = None, record: Recorder | None = None, *, first_only: bool = False
    ) -> None:
        """Capture CUDA graphs of small steps: all, or those that a server needs first.

        Without them, and on a CPU, kernels are launched one by one.
        """
        if self._lead is not None:
            self._lead.prepare_graphs()
        graphs, wanted = self.prepare_graphs(record), shapes(self._rows_max)
        listed = first_shapes(wanted, small_step_of(self.model)) if first_only else wanted
        for done, shape in enumerate(listed):
            self.capture_shape(graphs, shape)
            if progress is not None:
                progress("capture", done + 1, len(listed))
        compile_masked(graphs.logits[:1])

    def prepare_graphs(self, record: Recorder | None) -> StepGraphs:
        """Allocate the buffers shared by all graphs."""
        model, wanted = self.model, shapes(self._rows_max)
        largest = largest_of(wanted)
        pages = self.layout.pages_for(self._context_max)
        # The table of a whole session, for both components, fits behind the largest step.
        words = torch.zeros(largest.words + 4 * pages, dtype=torch.int32, device=model.device)
        logits = torch.zeros(
            largest.samples, model.config.vocabulary, dtype=model.logits_dtype, device=model.device
        )
        record = record_cuda() if record is None else record
        self._graphs = StepGraphs(words, self._buffers(largest, pages), logits, record, wanted)
        return self._graphs

    @property
    def prepared_graphs(self) -> StepGraphs:
        """The graphs, once they are prepared."""
        assert self._graphs is not None
        return self._graphs

    @torch.inference_mode()
    def capture_next(self, missed: bool) -> bool:
        """Capture one more graph between two steps, the one that steps lacked most; False if none is left.

        Every launched step is sampled: the graphs' words and logits are nobody's.
        """
        shape = None if self._graphs is None else self._graphs.order.next(missed)
        if self._graphs is None or shape is None:
            return False
        self.tables.discard()  # What a failed step has left; the core sends it again.
        self.capture_shape(self._graphs, shape)
        return True

    def abandon_graphs(self) -> None:
        """Capture no more graphs; those that are captured stay in use."""
        if self._graphs is not None:
            self._graphs.order.abandon()

    @property
    def graphs(self) -> GraphCounts | None:
        """How many graphs are captured, of how many; None without graphs."""
        return None if self._graphs is None else self._graphs.order.counts

    def capture_shape(self, graphs: StepGraphs, shape: Shape) -> None:
        """Capture one shape, over a step of padding."""
        if self._lead is not None:
            self._lead.capture(shape)
        given = graphs.views(shape)
        singles = shape.rows if shape.decode else 0 if shape.rows <= TILES_ONLY else 1
        limits = Limits(1 if shape.decode else shape.tokens, self._context_max, singles, graphs.least(shape))
        batch = self._batch(graphs.buffers, given, shape, limits)
        self._bring(shape, [], [], [], self.tables.pack(), graphs.words)
        self._prepare(given, batch)
        graphs.capture(shape, batch, self._step_of(batch, given, graphs.logits[: shape.samples]))
        if self._lead is not None:
            self._lead.done()

    def _step_of(self, batch: Batch, given: Views, logits: Tensor) -> Callable[[], Outcome]:
        return lambda: run_step(self.model, self.memory, batch, given, self.tables.sampled, logits)

    def _buffers(self, shape: Shape, width: int) -> StepBuffers:
        components = Components(self.layout.full, self.layout.window > 0)
        return StepBuffers(self.model.device, shape, width, components)

    def _batch(self, buffers: StepBuffers, given: Views, shape: Shape, limits: Limits) -> Batch:
        """The batch of a step, with split-K attention where it has one-token rows or is long."""
        lists = Lists()
        if self._sharing is not None:
            lists = self._sharing.lists(shape, ones=limits.rows_of_one > 0)
        return buffers.batch(given, shape, self.layout.page_size, limits, lists)

    # --- launching --------------------------------------------------------------------------------

    @torch.inference_mode()
    def start(self, plan: Plan) -> Flight:
        """Launch a step without waiting for the device."""
        self.tables.forget(plan.forgotten)
        self.tables.discard()
        for row in plan.rows:
            if row.table is not None:
                self.tables.change(row.number, row.table)
        self._copy(plan)
        self.host_tier.start(plan.moves)
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
            name = component.name.lower()
            self.memory.settle(name, sources)
            self.memory.overwritten(name, destinations)
            if self._lead is not None:
                self._lead.copy(name, sources, destinations)
            self.copy_units(name, sources, destinations)

    def copy_units(self, name: str, sources: list[int], destinations: list[int]) -> None:
        """Copy units of a component."""
        units = self._integers(sources), self._integers(destinations)
        for storage in self.memory.storage(name):
            kernels.copy_units(storage, *units)

    def _compute(self, plan: Plan, flight: Flight) -> None:
        rows = plan.rows
        tables = [self.tables.row(row.number) for row in rows]
        samples = self._samples(plan, tables, flight)
        outcome = self._forward(rows, tables, samples)
        if self._lead is not None:
            if samples and outcome.logits is None:
                outcome = outcome._replace(logits=self.logits_of(outcome, len(samples)))
            self._lead.done()
        if self._watch is not None:
            features = outcome.features or (outcome.hidden,)
            self._watch.note(rows, features, reused=outcome.tokens is not None)
        self.tokens_computed += sum(row.count for row in rows)
        constrained = False
        end = 0
        for row in rows:
            end += row.count
            if row.turn.over:
                continue
            stream = self.stream_of(row.turn)
            if stream.sampling.prompt_logprobs is not None:
                note_prompt(self.model, self._lead, row, stream, outcome.hidden, end)
            if stream.constraint is not None and row.sample:
                constrained = True
        if not samples:
            return
        tokens, given = outcome.tokens, outcome.given
        plain = (constrained or tokens is not None) and self._plain(samples)
        if tokens is not None and plain and not constrained:
            flight.tokens = self._staging.fetch(tokens[: len(samples)])
            return
        if outcome.logits is None:
            logits = self.logits_of(outcome, len(samples))
        else:
            logits = outcome.logits[: len(samples)]
        unsampled = Unsampled(samples, given, logits, tokens, plain)
        if constrained:
            # Whether a constraint is free is known when the step before is settled.
            flight.unsampled = unsampled
            self._constrained.launch(flight)
        else:
            self._sample_special(flight, unsampled, None, ())

    def logits_of(self, outcome: Forwarded, count: int) -> Tensor:
        """The logits of a step's samples."""
        return self.model.logits(outcome.hidden.index_select(0, outcome.given.sample_place[:count]))

    # --- sampling constrained steps ---------------------------------------------------------------

    @torch.inference_mode()
    def sample(self, flight: Flight) -> None:
        """Fill the masks of a step that `start` left unsampled, and sample it."""
        unsampled, step_masks = flight.unsampled, flight.masks
        if unsampled is None:
            return
        assert step_masks is not None, "only steps with constrained turns are sampled late"
        flight.unsampled = None
        unsampled = unsampled._replace(samples=self._current(flight, unsampled.samples))
        masked = self._constrained.fill(flight, step_masks)
        for index in masked:
            sample = unsampled.samples[index]
            banned = self.sampler.banned(sample.sampler_row, sample.position)
            if banned:
                step_masks.forbid(index, banned)
        masks = step_masks.send() if masked else None
        if not unsampled.plain:
            self._sample_special(flight, unsampled, masks, masked)
        elif masks is not None:
            self._sample_masked(flight, unsampled, masks)
        elif unsampled.tokens is None:
            self._sample_special(flight, unsampled, None, ())
        else:
            flight.tokens = self._staging.fetch(unsampled.tokens[: len(unsampled.samples)])

    def _current(self, flight: Flight, samples: list[Sample]) -> list[Sample]:
        """The samples of a step, those of turns that ended meanwhile on the padding row."""
        current = list(samples)
        for index, first, stop in flight.places:
            if flight.plan.rows[index].turn.over:
                for place in range(first, stop):
                    current[place] = samples[place]._replace(sampler_row=self.sampler.padding_row)
        return current

    def _sample_masked(self, flight: Flight, unsampled: Unsampled, masks: TokenMasks) -> None:
        """Sample rows that need only their parameters, which are on the device, and their masks."""
        given, count = unsampled.given, len(unsampled.samples)
        tokens = kernels.sample_tokens(
            unsampled.logits,
            given.temperature[:count],
            given.top_k[:count],
            given.top_p[:count],
            given.min_p[:count],
            given.seeds[:count],
            given.sample_position[:count],
            masks=masks,
        )
        self._take(flight, unsampled, tokens)

    def _sample_special(
        self, flight: Flight, unsampled: Unsampled, masks: TokenMasks | None, masked: Collection[int]
    ) -> None:
        """Sample with penalties, biases, log-probabilities and minimum lengths."""
        flight.sampled = self.sampler.sample(
            unsampled.logits.float(),
            [sample.sampler_row for sample in unsampled.samples],
            [sample.position for sample in unsampled.samples],
            masks,
            masked,
        )
        self._take(flight, unsampled, flight.sampled.tokens)

    def _take(self, flight: Flight, unsampled: Unsampled, tokens: Tensor) -> None:
        """Store sampled tokens for the next step and send them to the host."""
        if self._lead is not None:
            tokens = self._lead.take(tokens)
        # A row with non-finite logits has no token; rows planned after it fail, but must still run.
        kernels.note_sampled(self.tables.sampled, unsampled.given.note[: len(unsampled.samples)], tokens)
        flight.tokens = self._staging.fetch(tokens)

    # --- the step on the device -------------------------------------------------------------------

    def _plain(self, samples: list[Sample]) -> bool:
        return self.sampler.plain(
            [sample.sampler_row for sample in samples], [sample.position for sample in samples]
        )

    def _samples(self, plan: Plan, tables: list[int], flight: Flight) -> list[Sample]:
        """The samples of a step: a row's next token, and one for each of its drafts before it."""
        samples: list[Sample] = []
        end = 0
        for index, row in enumerate(plan.rows):
            end += row.count
            if not row.sample:
                continue
            first, start = len(samples), self.first_position(row)
            for place in range(end - row.drafts - 1, end):
                position = start + row.count - (end - place) + 1
                note = tables[index] if place == end - 1 else UNUSED_ROW
                samples.append(Sample(place, position, self._sampler_row(plan, row, position), note))
            flight.places.append((index, first, len(samples)))
        return samples

    def first_position(self, row: Row[Turn]) -> int:
        """The position that a row's first token has where random numbers are drawn."""
        return row.start

    def _forward(self, rows: list[Row[Turn]], tables: list[int], samples: list[Sample]) -> Forwarded:
        """Run the forward pass, in a graph where one fits."""
        counts = [row.count for row in rows]
        tokens, count_max = sum(counts), max(counts)
        decode = count_max == 1 and len(samples) <= len(rows)
        changes = self.tables.pack()
        if self._graphs is not None:
            shape = self._graphs.find(len(rows), tokens, len(samples), decode, changes.size)
            if shape is not None:
                call = None if self._lead is None else StepCall(shape, None, self.tables.form)
                self._bring(shape, rows, tables, samples, changes, self._graphs.words, call)
                return self.replay(self._graphs, shape)
        shape = Shape(len(rows), tokens, len(samples), decode)
        limits = Limits(count_max, max(row.start + row.count for row in rows), counts.count(1))
        call = None if self._lead is None else StepCall(shape, limits, self.tables.form)
        return self.run_once(self._bring(shape, rows, tables, samples, changes, None, call), shape, limits)

    def replay(self, graphs: StepGraphs, shape: Shape) -> Forwarded:
        """Run a step whose words are brought in the graph of a shape."""
        given = graphs.views(shape)
        self._prepare(given, graphs.batch(shape))
        outcome = graphs.replay(shape)
        return Forwarded(given, outcome.hidden, outcome.logits, outcome.tokens, outcome.features)

    def run_once(self, words: Tensor, shape: Shape, limits: Limits) -> Forwarded:
        """Run a step whose words are brought without a graph."""
        given = views(words, shape)
        buffers = self._buffers(shape, self.layout.pages_for(limits.context_max))
        batch = self._batch(buffers, given, shape, limits)
        self._prepare(given, batch)
        kernels.list_pieces(batch)
        tapped: list[Tensor] | None = [] if self.model.taps else None
        hidden = self.model.forward(batch, self.memory, tapped)
        return Forwarded(given, hidden, features=tuple(tapped or ()))

    def _bring(
        self,
        shape: Shape,
        rows: list[Row[Turn]],
        tables: list[int],
        samples: list[Sample],
        changes: Words,
        target: Tensor | None,
        call: StepCall | None = None,
    ) -> Tensor:
        """Send a step's words to the device and apply the table changes; `call` is for other ranks."""
        words = self._staging.words(shape.words + changes.size)
        array = fill(words)
        states = self._states(rows)
        pack(
            array[: shape.words], shape, rows, states, tables, samples, self.sampler.parameters, self._padding
        )
        array[shape.words :] = changes
        if self._lead is not None and call is not None:
            self._lead.step(call, array)
        return self.bring_words(words, shape, target)

    def bring_array(self, array: Words, shape: Shape, target: Tensor | None) -> Tensor:
        """Send the words of another rank's step to the device."""
        words = self._staging.words(array.size)
        fill(words)[:] = array
        return self.bring_words(words, shape, target)

    def bring_words(self, words: Tensor, shape: Shape, target: Tensor | None) -> Tensor:
        """Send packed words to the device and apply the table changes behind them."""
        brought = self._staging.send(words, target)
        self.tables.apply(brought[shape.words : words.numel()])
        return brought

    def _states(self, rows: list[Row[Turn]]) -> list[tuple[int, int] | None]:
        """The state slots that each row reads (-1: zeros) and writes; None for a row without."""
        if self.memory.resting is not None:
            return self.memory.resting.begin(
                [None if row.state is None else RowState(*row.state, row.turn.number) for row in rows]
            )
        return [
            None if row.state is None else (-1 if row.state[0] is None else row.state[0], row.state[1])
            for row in rows
        ]

    def _prepare(self, given: Views, batch: Batch) -> None:
        tables = self.tables.step_tables(self._reserved.full, self._reserved.window)
        kernels.prepare_step(given.tokens, given.row_table, tables, batch)

    # --- sampling rows ----------------------------------------------------------------------------

    def _sampler_row(self, plan: Plan, row: Row[Turn], position: int) -> int:
        """The sampler row of a turn, re-admitted where a lost step has counted tokens."""
        turn = row.turn
        held = self._sampler_rows.get(turn.number)
        if held is not None and (held[1] < position or not self.sampler.counts(held[0])):
            self._sampler_rows[turn.number] = (held[0], position)
            return held[0]
        self.release(turn)
        if not self._free_rows:
            self._free_rows.append(self._take_idle_row(plan))
        stream = self.stream_of(turn)
        # Not registered until it is admitted: the device may run out of memory.
        self.sampler.admit(
            self._free_rows[-1],
            stream.sampling,
            prompt=stream.prompt_tokens if _reads_prompt(stream.sampling) else (),
            generated=stream.tokens,
            end_tokens=sorted(stream.ends),
        )
        place = self._free_rows.pop()
        self._sampler_rows[turn.number] = (place, position)
        return place

    def _take_idle_row(self, plan: Plan) -> int:
        """Release the sampler row of a retracted turn; it gets a new one later."""
        active = {row.turn.number for row in plan.rows}
        number = next(number for number in self._sampler_rows if number not in active)
        place, _ = self._sampler_rows.pop(number)
        self.sampler.release(place)
        return place

    def release(self, turn: Turn) -> None:
        """Release the sampler row of a finished turn."""
        held = self._sampler_rows.pop(turn.number, None)
        if held is not None:
            self.sampler.release(held[0])
            self._free_rows.append(held[0])

    # --- what came of it --------------------------------------------------------------------------

    def finish(self, flight: Flight) -> StepResult:
        """Wait for a step's tokens and build the result of each row; a withdrawn sample has no tokens."""
        assert flight.unsampled is None, "the step is not sampled yet"
        plan = flight.plan
        results = [RowResult([]) for _ in plan.rows]
        if flight.tokens is not None:
            tokens = flight.tokens.wait()
            if flight.masks is not None:
                self._constrained.accept(flight, tokens)
            logprobs = {} if flight.sampled is None else logprobs_of(flight.sampled, tokens)
            for index, first, stop in flight.places:
                row = plan.rows[index]
                if row.sample:
                    stream = None if row.turn.over else self.stream_of(row.turn)
                    results[index] = row_result(row, stream, tokens[first:stop], logprobs, first)
            if flight.masks is not None:
                self._take_forced(flight, results)
        return StepResult(results, self.host_tier.settle(plan.moves))

    def _take_forced(self, flight: Flight, results: list[RowResult]) -> None:
        """Add the tokens that constraints leave no choice about to the results of a step."""
        for index, _, _ in flight.places:
            row = flight.plan.rows[index]
            if row.sample and not row.turn.over:
                stream = self.stream_of(row.turn)
                constraint = stream.constraint
                if constraint is not None and not constraint.chooses:
                    results[index] = with_forced(row, stream, results[index])

    def _integers(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.model.device, non_blocking=True)


def _reads_prompt(sampling: Sampling) -> bool:
    """Whether sampling depends on earlier tokens: penalties, or a minimum length."""
    penalised = sampling.repetition_penalty != 1.0 or sampling.frequency_penalty or sampling.presence_penalty
    return bool(penalised or sampling.min_tokens)
