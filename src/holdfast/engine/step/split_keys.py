"""How attention's keys are shared out over a GPU: the lists that a step's kernels fill and read.

Contexts of very different lengths stand in one step. So that none keeps the others waiting, and one graph
serves them all, the device cuts the keys of each step into pieces: for programs that have one each (see
`kernels.Pieces`), or for programs that take one after another (`kernels.PieceQueue`), where there is a kernel
that does. The lists lie in the same place for every step. Used by the executor.
"""

from __future__ import annotations

import torch

from holdfast.engine.step.inputs import Lists, Shape
from holdfast.kernels import PIECE_FIELDS, PieceQueue, Pieces, build_queue, takes_queue, tile_count
from holdfast.models.config import AttentionConfig, ModelConfig

LOW_TILE, HIGH_TILE = 16, 64
"""Rows of the matrix that a tile of a short row is, and one of a longer row: tokens times query heads."""

SHORT_ROW = 64
"""Tokens up to which a row is short: it waits for its keys, as rows of one token do, and not for products."""

FILLING = 4
"""Pieces for each multiprocessor that a device is filled with."""

QUEUED_ROWS = 96
"""Rows up to which a decode step takes pieces from a queue: more fill the device evenly with a piece each."""


class Sharing:
    """The lists for steps of at most one shape."""

    def __init__(
        self, attention: AttentionConfig, largest: Shape, device: torch.device, queue: PieceQueue | None
    ) -> None:
        """`queue` has room for steps of that shape; None where there is no kernel for it."""
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._queue = queue
        self._wanted = -(-processors * FILLING // attention.kv_heads)
        self._queries = [
            max(1, height * attention.kv_heads // attention.heads) for height in (LOW_TILE, HIGH_TILE)
        ]
        self._lines = tile_count(largest.tokens, largest.rows, self._queries[0]) + self._wanted
        self._listed = torch.zeros(2, self._lines, PIECE_FIELDS, dtype=torch.int32, device=device)
        self._arrived = torch.zeros(self._lines * attention.kv_heads, dtype=torch.int32, device=device)

    def lists(self, shape: Shape) -> Lists:
        """The lists of one shape: a queue where there is one with room for it, unless many rows decode.

        Else pieces; a step that is too large for both fills the device anyway, and has none.
        """
        queue = None
        if self._queue is not None and not (shape.decode and shape.rows > QUEUED_ROWS):
            queue = self._queue.for_step(shape.tokens, shape.rows)
        return Lists(queue=queue) if queue is not None else Lists(self._pieces(shape))

    def _pieces(self, shape: Shape) -> tuple[Pieces, ...]:
        """Of short rows, and of longer ones where the shape may have any."""
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


def sharing_for(
    config: ModelConfig, largest: Shape, page_size: int, dtype: torch.dtype, device: torch.device
) -> Sharing | None:
    """What a model's full attention needs, where it has any and runs on a GPU."""
    mixers = [mixer for layer in config.layers for mixer in layer.mixers]
    full = [mixer for mixer in mixers if isinstance(mixer, AttentionConfig) and mixer.window is None]
    if not full or device.type != "cuda":
        return None
    queue = None
    shapes = {(mixer.heads, mixer.kv_heads, mixer.head_dim) for mixer in full}
    if len(shapes) == 1:
        (heads,) = shapes
        if takes_queue(*heads, page_size, dtype, device):
            queue = build_queue(largest.tokens, largest.rows, *heads, device)
    return Sharing(max(full, key=lambda mixer: mixer.kv_heads), largest, device, queue)
