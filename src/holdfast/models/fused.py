"""Models whose whole forward pass is one call of the C kernels.

`fuse` inspects the blocks of a model: if all are plain attention and gated MLPs with packed weights, it
returns one pass over all of them, else None. Results equal those of the blocks up to rounding. Called by
`model`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from holdfast.kernels import Batch
from holdfast.kernels.cpu.attention import head_fits
from holdfast.kernels.cpu.decoder import DecoderLayer, DecoderPass, DecoderSizes
from holdfast.kernels.cpu.matrix import PANEL
from holdfast.models.blocks import Block
from holdfast.models.config import AttentionConfig, MlpConfig, ModelConfig
from holdfast.models.layers import Attention, Mlp
from holdfast.models.linear import PackedLinear
from holdfast.models.memory import Memory


class FusedDecoder:
    """The blocks of one model as one pass."""

    __slots__ = ("_pass", "_window")

    def __init__(self, whole: DecoderPass, *, window: bool) -> None:
        self._pass = whole
        self._window = window

    def __call__(self, residual: Tensor, batch: Batch, memory: Memory) -> Tensor:
        """The normed hidden state of every token; `residual` is overwritten."""
        pages, storage = (batch.window, memory.window) if self._window else (batch.full, memory.full)
        assert pages is not None and storage is not None, "the batch lacks the pages of the model's component"
        return self._pass(residual, batch, pages, storage)


def fuse(blocks: Sequence[Block], norm: Tensor, config: ModelConfig) -> FusedDecoder | None:
    """The fused pass for these blocks, or None where a part is not supported."""
    if norm.device.type != "cpu" or len(blocks) % 2:
        return None
    layers: list[DecoderLayer] = []
    kinds: set[tuple[AttentionConfig, int]] = set()
    tables: dict[int, Tensor] = {}
    for first, second in zip(blocks[::2], blocks[1::2], strict=True):
        layer = _layer(first, second)
        if layer is None:
            return None
        attention, mlp = first.part, second.part
        assert isinstance(attention, Attention) and isinstance(mlp, Mlp)
        cos_sin = attention.rotation.cos_sin
        if cos_sin is None:
            return None
        tables[id(cos_sin)] = cos_sin
        kinds.add((attention.config, mlp.config.width))
        layers.append(layer)
    if len(kinds) != 1 or len(tables) != 1:
        return None
    ((chosen, inner),) = kinds
    (cos_sin,) = tables.values()
    sizes = DecoderSizes(
        width=config.width,
        inner=inner,
        heads=chosen.heads,
        kv_heads=chosen.kv_heads,
        head_dim=chosen.head_dim,
        window=chosen.window,
        epsilon=config.norm_epsilon,
        scale=chosen.scale,
        residual_multiplier=config.residual_multiplier,
    )
    whole = DecoderPass(layers, norm, cos_sin.float().contiguous(), sizes)
    return FusedDecoder(whole, window=chosen.window is not None)


def _layer(first: Block, second: Block) -> DecoderLayer | None:
    """Two blocks as one layer, or None where they are not plain attention and a gated MLP."""
    attention, mlp = first.part, second.part
    if not isinstance(attention, Attention) or not isinstance(mlp, Mlp):
        return None
    if not _plain_attention(attention.config) or not _plain_mlp(mlp.config):
        return None
    if first.before is None or second.before is None or first.after is not None or second.after is not None:
        return None
    products = (*attention.projections, *mlp.projections)
    packed = [product.matrix for product in products if isinstance(product, PackedLinear)]
    if len(packed) != len(products) or first.before.dtype != torch.float32:
        return None
    rotation = attention.rotation
    return DecoderLayer(first.before, second.before, rotation.query_norm, rotation.key_norm, *packed)


def _plain_attention(config: AttentionConfig) -> bool:
    multipliers = (config.input_multiplier, config.key_multiplier, config.output_multiplier)
    special = config.projection_norm or config.sinks or config.output_gate or multipliers != (1.0, 1.0, 1.0)
    return not special and head_fits(config.heads, config.kv_heads, config.head_dim)


def _plain_mlp(config: MlpConfig) -> bool:
    plain = config.gated and config.activation == "silu" and config.width % PANEL == 0
    return plain and config.gate_multiplier == config.output_multiplier == 1.0
