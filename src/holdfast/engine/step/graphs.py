"""Steps as CUDA graphs: the forward pass and the sampling of a batch in one launch.

A graph is captured for each of a few shapes: decode steps by their number of rows, and small mixed steps (a
turn's input beside others' decoding) by tokens and rows. A step takes the smallest shape that fits; the
remaining rows are padding in reserved units. A graph reads the step's words and the buffers derived from them
at fixed addresses, and leaves the hidden states, the logits of its samples and the sampled tokens. All graphs
write their logits to the same buffer: steps that a graph cannot sample, such as constrained ones, read them
there. `graph_order` says which shapes are captured first, and which while a server serves. Used by the
executor.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from holdfast import kernels
from holdfast.engine.constraints.masks import words_for
from holdfast.engine.step.graph_order import ShapeOrder
from holdfast.engine.step.inputs import Shape, StepBuffers, Views, views
from holdfast.kernels import Batch, Least, TokenMasks
from holdfast.models.memory import Memory
from holdfast.models.model import StepModel

MIXED_TOKENS = (32, 64, 128, 192, 256, 384, 512)
MIXED_ROWS = (1, 4, 16, 64, 128, 256)
SMALL_STEP, SMALL_STEP_OF_PRODUCTS, SMALL_STEP_OF_EXPERTS = 256, 192, 384
"""Tokens up to which a mixed step takes little longer than a decode step: both read all weights once.

Lower where our few-token product kernel runs, which is fast up to fewer tokens than cuBLAS; with experts,
each expert sees only some of the tokens. Chosen for the highest session throughput on an H200.
"""

TILES_ONLY = 4
"""Rows up to which a mixed step runs one-token rows in the same attention launch as all others."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outputs of a step on the device: hidden states of all tokens, logits and one token per sample.

    The logits are valid until the next step. `features` are residual streams, where the model has taps.
    """

    hidden: Tensor
    logits: Tensor
    tokens: Tensor
    features: tuple[Tensor, ...] = ()


class Recorded(Protocol):
    """A step that can be replayed over the same buffers."""

    def replay(self) -> None: ...


Recorder = Callable[[Callable[[], Outcome]], tuple[Recorded, Outcome]]


def decode_rows(rows_max: int) -> list[int]:
    """Row counts of captured decode steps: multiples of four, then four per doubling."""
    rows = [1, 2, 4]
    while rows[-1] < rows_max:
        power = 1 << (rows[-1].bit_length() - 1)
        rows.append(rows[-1] + max(4, power // 4))
    return [*(count for count in rows if count < rows_max), rows_max]


def mixed_rows(rows_max: int) -> list[int]:
    """Row counts of captured mixed steps, up to the most that may run."""
    most = min(rows_max, MIXED_ROWS[-1])
    return [rows for rows in MIXED_ROWS if rows < most] + [most]


def shapes(rows_max: int) -> list[Shape]:
    """All captured shapes, largest first, so that small ones reuse the memory of large ones."""
    decode = [Shape(rows, rows, rows, True) for rows in decode_rows(rows_max)]
    mixed = [
        Shape(rows, tokens, rows, False)
        for tokens in MIXED_TOKENS
        for rows in mixed_rows(rows_max)
        if rows <= tokens
    ]
    return sorted(decode + mixed, key=lambda shape: (shape.tokens, shape.rows), reverse=True)


def small_step_of(model: StepModel) -> int:
    """The largest token count at which a model's steps stay short."""
    if model.has_experts:
        return SMALL_STEP_OF_EXPERTS
    if kernels.takes_products(model.dtype, model.device) and not model.in_eight_bits:
        return SMALL_STEP_OF_PRODUCTS
    return SMALL_STEP


def largest_of(wanted: list[Shape]) -> Shape:
    """A shape with room for each of these."""
    return Shape(
        max(shape.rows for shape in wanted),
        max(shape.tokens for shape in wanted),
        max(shape.samples for shape in wanted),
        decode=False,
    )


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector out of a capture: freeing may call the driver, which ends a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def record_cuda() -> Recorder:
    """Records steps as CUDA graphs that share a memory pool.

    While a server serves, other threads (the disk's, those that copy or fill masks) may call the driver
    during a capture: the capture is of this thread's calls alone.
    """
    pool = torch.cuda.graph_pool_handle()

    def record(step: Callable[[], Outcome]) -> tuple[Recorded, Outcome]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()  # Kernels are compiled and libraries allocate workspaces before the capture.
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with _no_collection(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            outcome = step()
        return graph, outcome

    return record


def run_step(
    model: StepModel, memory: Memory, batch: Batch, given: Views, sampled: Tensor, logits: Tensor
) -> Outcome:
    """The forward pass, the logits, the samples of plain rows, and their tokens stored for the next step."""
    kernels.list_pieces(batch)
    tapped: list[Tensor] | None = [] if model.taps else None
    hidden = model.forward(batch, memory, tapped)
    logits = model.logits(hidden.index_select(0, given.sample_place), out=logits)
    tokens = kernels.sample_tokens(
        logits,
        given.temperature,
        given.top_k,
        given.top_p,
        given.min_p,
        given.seeds,
        given.sample_position,
    )
    if model.group is not None:
        model.group.broadcast(tokens)
    kernels.note_sampled(sampled, given.note, tokens)
    return Outcome(hidden, logits, tokens, tuple(tapped or ()))


def compile_masked(logits: Tensor) -> None:
    """Sample once in each way under a mask: compiling kernels while serving would stall every stream."""
    device = logits.device
    heat, top_p = torch.ones(2, 1, device=device)
    whole = torch.zeros(1, dtype=torch.int32, device=device)
    nothing = torch.zeros(1, words_for(logits.shape[1]), dtype=torch.int32, device=device)
    special = logits.float(), whole.long()
    ways = ((logits, whole, False), (*special, False), (*special, True))
    for values, positions, greedy in ways:
        kernels.sample_tokens(
            values,
            heat,
            whole,
            top_p,
            top_p,
            whole.long(),
            positions,
            greedy=greedy,
            masks=TokenMasks(nothing, whole),
        )


class StepGraphs:
    """The captured shapes of one executor."""

    def __init__(
        self, words: Tensor, buffers: StepBuffers, logits: Tensor, record: Recorder, wanted: Sequence[Shape]
    ) -> None:
        """Every step's words are copied to `words` before its graph runs; all graphs share the buffers."""
        self.words = words
        self.buffers = buffers
        self.logits = logits
        self.order = ShapeOrder(wanted)
        self._record = record
        self._recorded: dict[Shape, tuple[Recorded, Outcome, Batch]] = {}
        self._views: dict[Shape, Views] = {}

    def views(self, shape: Shape) -> Views:
        """A shape's inputs in the words."""
        found = self._views.get(shape)
        if found is None:
            found = self._views[shape] = views(self.words, shape)
        return found

    def capture(self, shape: Shape, batch: Batch, step: Callable[[], Outcome]) -> None:
        """Record a shape; its words and buffers hold a step of padding."""
        recorded, outcome = self._record(step)
        self._recorded[shape] = (recorded, outcome, batch)
        self.order.done(shape)

    def least(self, shape: Shape) -> Least:
        """The fewest tokens and rows of a step that takes this shape rather than a smaller one."""
        smaller = [tokens for tokens in MIXED_TOKENS if tokens < shape.tokens]
        fewer = [rows for rows in MIXED_ROWS if rows < shape.rows]
        return Least(max(smaller, default=0) + 1, max(fewer, default=0) + 1)

    def find(self, rows: int, tokens: int, samples: int, decode: bool, more: int) -> Shape | None:
        """The smallest captured shape with room for a step, or None; `more` words follow its own."""
        found = self.order.find(rows if decode else max(rows, samples), tokens, decode)
        return found if found is not None and found.words + more <= self.words.numel() else None

    def batch(self, shape: Shape) -> Batch:
        """The buffers of a captured shape."""
        return self._recorded[shape][2]

    def replay(self, shape: Shape) -> Outcome:
        """Replay a captured shape over the current words and buffers."""
        recorded, outcome, _ = self._recorded[shape]
        recorded.replay()
        return outcome
