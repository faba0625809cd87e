"""Split-K of attention: the lists that a step's kernels fill and read.

A step has contexts of very different lengths. To balance them, and to serve them all with one graph, the
device splits the keys of each step into pieces: one per program (see `kernels.Pieces`), or taken in turn by
persistent programs (`kernels.PieceQueue`), where there is a kernel for it. The lists have fixed addresses.
Used by the executor.
"""

from __future__ import annotations

import torch

from holdfast.engine.step.inputs import Lists, Shape
from holdfast.kernels import (
    PIECE_FIELDS,
    PieceQueue,
    Pieces,
    build_batch,
    build_queue,
    list_pieces,
    takes_queue,
    takes_scaled_queue,
    tile_count,
)
from holdfast.models.config import AttentionConfig, ModelConfig

LOW_TILE, HIGH_TILE = 16, 64
"""Matrix rows of a tile of a short row, and of a longer row: tokens times query heads."""

SHORT_ROW = 64
"""Tokens up to which a row is short: bound by reading keys, like one-token rows, not by products."""

FILLING = 4
"""Pieces per multiprocessor that fill a device."""

QUEUED_ROWS = 96
"""Rows up to which a decode step uses a queue: more rows fill the device evenly with one piece each."""

LONG_STEP = 2048
"""Tokens from which on every step uses a queue: its kernel multiplies faster, and takes longer to begin."""

LONG_HEAD = 128
"""The size of a head for which that is so; with others the kernel is for short rows, until it is measured."""


class Sharing:
    """The lists for steps up to one shape."""

    def __init__(
        self,
        attention: AttentionConfig,
        largest: Shape,
        device: torch.device,
        queue: PieceQueue | None,
        *,
        scaled: bool = False,
    ) -> None:
        """`queue` has room for steps of that shape at least; None where there is no kernel for it.

        The kernel for `scaled` keys takes decode steps of any size, and no others.
        """
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._queue = queue
        self._scaled = scaled
        self._long = queue if _is_for_long_steps(attention.head_dim, scaled) else None
        self._wanted = -(-processors * FILLING // attention.kv_heads)
        self._queries = [
            max(1, height * attention.kv_heads // attention.heads) for height in (LOW_TILE, HIGH_TILE)
        ]
        self._lines = tile_count(largest.tokens, largest.rows, self._queries[0]) + self._wanted
        self._listed = torch.zeros(2, self._lines, PIECE_FIELDS, dtype=torch.int32, device=device)
        self._arrived = torch.zeros(self._lines * attention.kv_heads, dtype=torch.int32, device=device)

    def lists(self, shape: Shape, *, ones: bool = True) -> Lists:
        """The lists of one shape: a queue with room for it, unless many rows decode; else pieces.

        A step too large for both fills the device anyway, and has none. So has one without rows of one token
        (`ones`), unless it is long enough for the queue.
        """
        if self._long is not None and shape.tokens >= LONG_STEP:
            whole = self._long.for_long_step(shape.tokens, shape.rows)
            if whole is not None:
                return Lists(queue=whole)
        if not ones:
            return Lists()
        queue = None
        queued = shape.decode if self._scaled else not shape.decode or shape.rows <= QUEUED_ROWS
        if self._queue is not None and queued:
            queue = self._queue.for_step(shape.tokens, shape.rows)
        return Lists(queue=queue) if queue is not None else Lists(self._pieces(shape))

    def warm_up(self, device: torch.device) -> None:
        """Compile the kernel that lists long steps: the first long input would wait for it."""
        if self._long is not None:
            batch = build_batch([[0]], [0], device=device)
            batch.queue = self._long.for_long_step(1, 1)
            list_pieces(batch)

    def _pieces(self, shape: Shape) -> tuple[Pieces, ...]:
        """Lists of short rows, and of longer ones where the shape may have any."""
        if shape.decode:
            lines = shape.rows + self._wanted
            return (Pieces(self._listed[0, :lines], self._arrived, self._queries[0], self._wanted),)
        lists = []
        for listed, queries, above, most in zip(
            self._listed, self._queries, (0, SHORT_ROW), (SHORT_ROW, shape.tokens), strict=True
        ):
            lines = tile_count(shape.tokens, shape.rows, queries) + self._wanted
            if lines > self._lines:
                return ()
            if most > above:
                lists.append(Pieces(listed[:lines], self._arrived, queries, self._wanted, above, most))
        return tuple(lists)


def _is_for_long_steps(head_dim: int, scaled: bool) -> bool:
    """Whether the queue of such keys is used by long steps."""
    return head_dim == LONG_HEAD and not scaled


def sharing_for(
    config: ModelConfig,
    largest: Shape,
    page_size: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    device: torch.device,
    step_tokens: int,
) -> Sharing | None:
    """The lists for a model's full attention, if it has any and runs on a GPU.

    `largest` is the largest captured shape; other steps have at most `step_tokens` tokens. `dtypes` are those
    of the model and of its keys and values.
    """
    mixers = [mixer for layer in config.layers for mixer in layer.mixers]
    full = [mixer for mixer in mixers if isinstance(mixer, AttentionConfig) and mixer.window is None]
    if not full or device.type != "cuda":
        return None
    queue = None
    computed, stored = dtypes
    scaled = stored == torch.float8_e4m3fn
    shapes = {(mixer.heads, mixer.kv_heads, mixer.head_dim) for mixer in full}
    if len(shapes) == 1:
        (heads,) = shapes
        takes = takes_scaled_queue if scaled else takes_queue
        if (scaled or computed == stored) and takes(*heads, page_size, computed, device):
            long = _is_for_long_steps(heads[2], scaled)
            tokens = max(largest.tokens, step_tokens) if long else largest.tokens
            queue = build_queue(tokens, largest.rows, *heads, device)
    widest = max(full, key=lambda mixer: mixer.kv_heads)
    return Sharing(widest, largest, device, queue, scaled=scaled)
