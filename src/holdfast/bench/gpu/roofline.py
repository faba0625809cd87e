"""The least time of a decode step: the bytes that it must move, over the copy bandwidth of the GPU.

Of experts it counts those that some token is expected to choose, where all are equally likely.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from holdfast.kernels import PackedCodes
from holdfast.kernels.cuda.twelve import COLUMNS
from holdfast.kernels.quantised import QuantisedWeight
from holdfast.models.config import ExpertsConfig
from holdfast.models.experts import Experts
from holdfast.models.model import Model

__all__ = ["Roofline"]


@dataclass(frozen=True, slots=True)
class Roofline:
    """`loaded_bytes` are all tensors of the model, before any KV cache is allocated."""

    model: Model
    loaded_bytes: int
    bandwidth: float

    def decode_ms(self, batch: int, context: int) -> float:
        """Milliseconds of a decode step."""
        return self.step_bytes(batch, context) / self.bandwidth * 1e3

    def step_bytes(self, batch: int, context: int) -> float:
        """Weights, keys and values once; recurrent states read and written."""
        shape = self.model.memory_shape
        moved = self.weight_bytes(batch) - self.unread_bytes(batch)
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

    def unread_bytes(self, tokens: int) -> float:
        """The weights of experts that no token is expected to choose."""
        routed = [layer.mlp for layer in self.model.config.layers if isinstance(layer.mlp, ExpertsConfig)]
        sizes = [_expert_bytes(part) for block in self.model._blocks for part in _experts(block.part)]
        return sum(
            size * (1 - config.experts_per_token / config.experts) ** tokens
            for config, size in zip(routed, sizes, strict=True)
        )


def _experts(part: object) -> Iterator[Experts]:
    """The experts in a part of a model, which may be wrapped."""
    if isinstance(part, Experts):
        yield part
    elif isinstance(part, tuple | list):
        for inner in part:
            yield from _experts(inner)
    elif type(part).__module__.startswith("holdfast.models.") and hasattr(part, "__dict__"):
        yield from _experts(list(vars(part).values()))


def _expert_bytes(experts: Experts) -> int:
    """The weights of all experts of a layer."""
    weights = (experts._weights.inner, experts._weights.outer)
    return sum(
        weight.nbytes if isinstance(weight, Tensor) else weight.bytes
        for weight in weights
        if isinstance(weight, Tensor | QuantisedWeight | PackedCodes)
    )
