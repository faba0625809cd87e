"""A step's inputs: packed on the host into one run of 32-bit words, unpacked on the device as views.

One copy sends a whole step to the device. A `Shape` is the capacity of the words in rows, tokens and samples:
exactly a step's, or more for a captured graph, in which case the rest is padding. `StepBuffers` are the
tensors that the device derives from the words. Used by the executor, by `graphs` and by the sampler.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.core.plan import Row
from holdfast.core.turn import Turn
from holdfast.kernels import Batch, Least, Pages, PieceQueue, Pieces

Words = NDArray[np.int32]

ALIGNMENT = 4
"""Alignment of each kind of input, in words, whatever a step's size.

Triton compiles a variant of a kernel for each alignment of its arguments; a fixed one avoids recompilation.
"""

SHAPES_KEPT = 1024
"""Shapes whose sizes are cached: each step asks several times."""


class Shape(NamedTuple):
    """Capacity in rows, tokens and samples; in a decode step each row has one of both."""

    rows: int
    tokens: int
    samples: int
    decode: bool

    @property
    def words(self) -> int:
        """Words of a step of this shape."""
        return _words_of(self)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Words of each kind of input, in the order of `Views`."""
        rows, samples = self.rows, self.samples
        # Seeds are first: 64-bit words need their alignment.
        return (2 * samples, *(samples,) * 7, rows, rows + 1, rows, rows, rows, self.tokens)


def aligned(size: int) -> int:
    """Rounded up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@lru_cache(SHAPES_KEPT)
def _words_of(shape: Shape) -> int:
    return sum(aligned(size) for size in shape.sizes)


class Limits(NamedTuple):
    """What sizes the kernels of a batch: most tokens of a row, longest context, one-token rows (see `Batch`).

    `least` are the fewest tokens and rows that a captured batch may hold.
    """

    count_max: int
    context_max: int
    rows_of_one: int
    least: Least = Least()


class Components(NamedTuple):
    """Which paged components a model has."""

    full: bool
    window: bool


class Lists(NamedTuple):
    """The split-K lists of a step: pieces, a queue, or neither (see `kernels.Batch`)."""

    pieces: tuple[Pieces, ...] = ()
    queue: PieceQueue | None = None


class Sample(NamedTuple):
    """A token to sample: index of its hidden state, its position, its sampler row, and its turn.

    `note` is the table row that stores the token for the next step, or the unused one.
    """

    place: int
    position: int
    sampler_row: int
    note: int


class Parameters(NamedTuple):
    """The sampling parameters of each sampler row, as `kernels.sample_tokens` takes them."""

    seeds: NDArray[np.int64]
    floats: NDArray[np.float32]
    """Temperature, top_p and min_p [3, rows]."""
    top_k: NDArray[np.int32]


class Padding(NamedTuple):
    """Padding values of rows and samples."""

    state: int
    sampler_row: int
    note: int


@dataclass(frozen=True, slots=True)
class Views:
    """The words of a step by kind: int32, except seeds (int64) and three floats (float32)."""

    seeds: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor
    sample_place: Tensor
    sample_position: Tensor
    note: Tensor
    row_table: Tensor
    row_start: Tensor
    context: Tensor
    state_source: Tensor
    state_destination: Tensor
    tokens: Tensor


def views(words: Tensor, shape: Shape) -> Views:
    """The offset of each kind of input in a step's words."""
    sizes = shape.sizes
    parts = words[: shape.words].split([aligned(size) for size in sizes])
    seeds, *others = (part[:size] for part, size in zip(parts, sizes, strict=True))
    floats = (part.view(torch.float32) for part in others[:3])
    return Views(seeds.view(torch.int64), *floats, *others[3:])


def pack(
    words: Words,
    shape: Shape,
    rows: list[Row[Turn]],
    states: list[tuple[int, int] | None],
    tables: list[int],
    samples: list[Sample],
    parameters: Parameters,
    padding: Padding,
) -> None:
    """Write a step into words of a shape with room for it; `states` are the slots of each row."""
    count, spare = len(rows), shape.rows - len(rows)
    unused = shape.samples - len(samples)
    # Padding rows of a decode step have one token like all its rows; elsewhere they have none.
    filler = 1 if shape.decode else 0
    counts = [row.count for row in rows] + [filler] * spare
    drawn = [sample.sampler_row for sample in samples] + [padding.sampler_row] * unused
    place = 0

    def put(values: list[int] | NDArray[Any], kind: type[np.generic] = np.int32) -> None:
        nonlocal place
        part = np.asarray(values, dtype=kind).view(np.int32)
        words[place : place + len(part)] = part
        place += aligned(len(part))

    put(parameters.seeds[drawn], np.int64)
    for values in parameters.floats[:, drawn]:
        put(values, np.float32)
    put(parameters.top_k[drawn])
    put([sample.place for sample in samples] + [0] * unused)
    put([sample.position for sample in samples] + [0] * unused)
    put([sample.note for sample in samples] + [padding.note] * unused)
    put(tables + [-1] * spare)
    put(list(accumulate(counts, initial=0)))
    put([row.start + row.count for row in rows] + [filler] * spare)
    put([-1 if state is None else state[0] for state in states] + [-1] * spare)
    put([padding.state if state is None else state[1] for state in states] + [padding.state] * spare)
    tokens: list[int] = []
    for row in rows:
        tokens += row.tokens
        if len(row.tokens) < row.count:
            tokens.append(-1)
    put(tokens + [0] * (shape.tokens - len(tokens)))
    assert count <= shape.rows and place == shape.words, "the step exceeds its shape"


class StepBuffers:
    """Device buffers derived from a step's words: tokens, positions, tables and slots.

    Sized for the largest step; a smaller one uses a part of each.
    """

    def __init__(
        self,
        device: torch.device,
        shape: Shape,
        width: int,
        components: Components,
    ) -> None:
        """The tables of the components have `width` columns."""

        def integers(*sizes: int, kind: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(sizes, dtype=kind, device=device)

        self._tokens, self._positions = integers(shape.tokens), integers(shape.tokens)
        self._slots = [integers(shape.tokens) if used else None for used in components]
        self._tables = [
            integers(shape.rows, width, kind=torch.int32) if used else None for used in components
        ]

    def batch(self, given: Views, shape: Shape, page_size: int, limits: Limits, lists: Lists) -> Batch:
        """The batch of one shape in these buffers."""

        def pages(component: int) -> Pages | None:
            table, slots = self._tables[component], self._slots[component]
            if table is None or slots is None:
                return None
            return Pages(table[: shape.rows], slots[: shape.tokens], page_size)

        return Batch(
            tokens=self._tokens[: shape.tokens],
            positions=self._positions[: shape.tokens],
            row_start=given.row_start,
            context=given.context,
            state_source=given.state_source,
            state_destination=given.state_destination,
            full=pages(0),
            window=pages(1),
            rows=shape.rows,
            count_max=limits.count_max,
            context_max=limits.context_max,
            rows_of_one=limits.rows_of_one,
            least=limits.least,
            pieces=lists.pieces,
            queue=lists.queue,
        )
