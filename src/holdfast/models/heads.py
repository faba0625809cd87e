"""Draft heads: one layer that drafts from the hidden states of the model that it belongs to.

The token after a position and the model's hidden state there go in; out come the logits of the token after
that, and a hidden state from which the head itself goes on. So place `i` of a head holds the token of
position `i + 1`. A head is a `StepModel`: an executor of its own runs it over pages of its own. Hidden states
come in through the buffer `given`, at a fixed address, so that steps can be captured as CUDA graphs.

Here are what all heads share and the multi-token-prediction heads of Qwen3-Next and Qwen3.5, which are in the
model's own checkpoint; EAGLE-3 heads are in `eagle3`. Loaded by `engine/draft`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from holdfast import kernels
from holdfast.kernels import Batch
from holdfast.models.blocks import Builder
from holdfast.models.checkpoint import Checkpoint
from holdfast.models.config import AttentionConfig, ExpertsConfig, LayerConfig, ModelConfig
from holdfast.models.families import decoder
from holdfast.models.fields import ConfigurationError
from holdfast.models.layers import Part
from holdfast.models.layout import MemoryShape, memory_shape
from holdfast.models.memory import Memory, MemoryTypes, UnitCounts
from holdfast.models.model import Model, holds_codes
from holdfast.models.ranks import Group
from holdfast.models.weights import Placement, WeightReader

__all__ = ["FEED_TOKENS", "DraftHead", "MtpHead", "load_mtp", "mtp_config"]

FEED_TOKENS = 1024
"""Most tokens of one pass of a head. Captured steps have fewer."""


class DraftHead(ABC):
    """What all heads share: their configuration is that of a model of one layer."""

    def __init__(self, config: ModelConfig, target: Model) -> None:
        """`config` has the head's layer, and the vocabulary of the model."""
        assert len(config.layers) == 1 and config.vocabulary == target.config.vocabulary
        self.config = config
        self.context_length = target.context_length
        self.memory_shape: MemoryShape = memory_shape(config)
        self.device = target.device
        self.dtype = target.dtype
        self.taps: tuple[int, ...] = ()
        self.group: Group | None = None
        self.given = torch.zeros(FEED_TOKENS, config.width, dtype=target.dtype, device=target.device)
        """The hidden state of each token of the next pass."""

    @property
    @abstractmethod
    def parts(self) -> Sequence[Part]:
        """The parts of the layer."""

    @property
    def outputs(self) -> int:
        """Tokens that the head tells apart."""
        return self.config.vocabulary

    @property
    @abstractmethod
    def feature_width(self) -> int:
        """Numbers that a pass reads of each token of the model."""

    @abstractmethod
    def project(self, features: Tensor) -> Tensor:
        """What the model gives for each token as hidden states of the head's width."""

    @abstractmethod
    def forward(self, batch: Batch, memory: Memory, tapped: list[Tensor] | None = None) -> Tensor:
        """The hidden state of every token of the batch: what `logits` and the next pass take."""

    @abstractmethod
    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Logits [rows, vocabulary] over the tokens of the model."""

    @property
    def logits_dtype(self) -> torch.dtype:
        return self.dtype

    @property
    def has_experts(self) -> bool:
        return isinstance(self.config.layers[0].mlp, ExpertsConfig)

    @property
    def in_eight_bits(self) -> bool:
        return holds_codes(self.parts)

    def memory(self, counts: UnitCounts, page_size: int, types: MemoryTypes | None = None) -> Memory:
        """Storage for the head's keys and values."""
        return Memory(self.memory_shape, counts, page_size, types or MemoryTypes.of(self.dtype), self.device)


class MtpHead(DraftHead):
    """The multi-token-prediction head of Qwen3-Next and Qwen3.5.

    Norms of the embedding and of the model's normed hidden state, joined and projected; a layer of full
    attention and an MLP; a norm. Embedding and output head are the model's.
    """

    def __init__(self, target: Model, reader: WeightReader, prefix: str) -> None:
        config = mtp_config(target.config)
        super().__init__(config, target)
        (layer,) = config.layers
        (attention,) = layer.mixers
        assert isinstance(attention, AttentionConfig)
        builder, at = Builder(config, reader, target.context_length), f"{prefix}layers.0."
        self._target = target
        self._embedding_norm = builder.norm(f"{prefix}pre_fc_norm_embedding")
        self._hidden_norm = builder.norm(f"{prefix}pre_fc_norm_hidden")
        self._join = reader.linear([f"{prefix}fc"], 2 * config.width, [config.width])
        self._before = builder.norm(f"{at}input_layernorm")
        self._attention = builder.attention(f"{at}self_attn.", attention)
        self._between = builder.norm(f"{at}post_attention_layernorm")
        self._mlp = decoder.feed_forward(builder, f"{at}mlp.", layer.mlp)
        self._after = builder.norm(f"{prefix}norm")

    @property
    def parts(self) -> Sequence[Part]:
        return self._attention, self._mlp

    @property
    def feature_width(self) -> int:
        return self.config.width

    @property
    def logits_dtype(self) -> torch.dtype:
        return self._target.logits_dtype

    def project(self, features: Tensor) -> Tensor:
        """The model's hidden states as they are."""
        return features

    @torch.inference_mode()
    def forward(self, batch: Batch, memory: Memory, tapped: list[Tensor] | None = None) -> Tensor:  # noqa: ARG002
        epsilon = self.config.norm_epsilon
        embedded = kernels.rms_norm(self._target.embed(batch.tokens), self._embedding_norm, epsilon)
        hidden = kernels.rms_norm(self.given[: batch.tokens.shape[0]], self._hidden_norm, epsilon)
        residual = self._join(torch.cat((embedded, hidden), dim=-1))
        change = self._attention(kernels.rms_norm(residual, self._before, epsilon), batch, memory)
        x, residual = kernels.rms_norm_residual(change, residual, self._between, epsilon)
        normed, _ = kernels.rms_norm_residual(self._mlp(x, batch, memory), residual, self._after, epsilon)
        return normed

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return self._target.logits(hidden, out)


def mtp_config(config: ModelConfig) -> ModelConfig:
    """The configuration of a model's head: its last layer with full attention."""
    for layer in reversed(config.layers):
        (mixer, *_) = layer.mixers
        if isinstance(mixer, AttentionConfig):
            return replace(config, layers=(LayerConfig((mixer,), layer.mlp),))
    raise ConfigurationError("a multi-token-prediction head needs a model with full attention layers")


def load_mtp(checkpoint: Checkpoint, target: Model, placement: Placement, *, dummy: bool = False) -> MtpHead:
    """The multi-token-prediction head in a model's own checkpoint; with `dummy`, of dummy weights."""
    prefix = checkpoint.family.mtp
    assert prefix is not None, "the family has heads"
    reader = WeightReader(None if dummy else checkpoint.source(), placement, None, checkpoint.quantisation)
    reader.ignore(rf"^(?!{re.escape(prefix)})")
    head = MtpHead(target, reader, prefix)
    reader.finish()
    return head
