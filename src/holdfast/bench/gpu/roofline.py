"""The least time of a decode step: the bytes that it must move, over the copy bandwidth of the GPU."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.kernels.cuda.twelve import COLUMNS
from holdfast.models.config import ExpertsConfig
from holdfast.models.model import Model

__all__ = ["Roofline"]


@dataclass(frozen=True, slots=True)
class Roofline:
    """`loaded_bytes` are all tensors of the model, before any KV cache is allocated."""

    model: Model
    loaded_bytes: int
    bandwidth: float

    def decode_ms(self, batch: int, context: int) -> float | None:
        """Milliseconds of a decode step; None with experts, whose bytes depend on the routing."""
        if any(isinstance(layer.mlp, ExpertsConfig) for layer in self.model.config.layers):
            return None
        return self.step_bytes(batch, context) / self.bandwidth * 1e3

    def step_bytes(self, batch: int, context: int) -> float:
        """Weights, keys and values once; recurrent states read and written."""
        shape = self.model.memory_shape
        moved = float(self.weight_bytes(batch))
        for pages in (shape.full, shape.window):
            if pages is not None:
                seen = context if pages is shape.full else min(context, shape.window_tokens)
                moved += batch * pages.bytes_per_page(seen, 2)
        if shape.state is not None:
            moved += 2 * batch * shape.state.bytes_per_slot(2)
        return moved

    def weight_bytes(self, tokens: int) -> int:
        """The weights that a step reads: no embeddings, and one of the two copies of a packed weight."""
        model = self.model
        twice = [(linear.weight.nbytes, linear.twelve.nbytes) for linear in model._dense if linear.twelve]
        spared = sum(dense if tokens <= COLUMNS[-1] else packed for dense, packed in twice)
        return self.loaded_bytes - model.config.vocabulary * model.config.width * 2 - spared
