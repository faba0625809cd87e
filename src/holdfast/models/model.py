"""A loaded model: tokens in, hidden states and logits out.

`Model.forward` runs one ragged batch against a `Memory`; `Model.logits` turns selected hidden states into
logits. A model is stateless and never allocates memory for sequences. Built by `checkpoint.load_model`,
called by the executor. `StepModel` is what steps need of one; draft heads (`heads`) are such, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from holdfast import kernels
from holdfast.kernels import Batch
from holdfast.models.blocks import Builder, Family, Team
from holdfast.models.config import ExpertsConfig, ModelConfig
from holdfast.models.fields import ConfigurationError
from holdfast.models.fp8 import Fp8Linear
from holdfast.models.fused import fuse
from holdfast.models.layers import Part
from holdfast.models.layout import MemoryShape, memory_shape
from holdfast.models.linear import DenseLinear, Embedding
from holdfast.models.memory import Memory, MemoryTypes, UnitCounts
from holdfast.models.quantised.products import QuantisedLinear
from holdfast.models.ranks import CutEmbedding, Group, Vocabulary
from holdfast.models.weights import WeightReader


class ModelDescription(Protocol):
    """What memory planning and the scheduler need to know of a model."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def context_length(self) -> int: ...
    @property
    def memory_shape(self) -> MemoryShape: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...


class StepModel(ModelDescription, Protocol):
    """What the steps of an executor need of a model."""

    @property
    def group(self) -> Group | None: ...
    @property
    def has_experts(self) -> bool: ...
    @property
    def in_eight_bits(self) -> bool: ...
    @property
    def logits_dtype(self) -> torch.dtype: ...
    @property
    def taps(self) -> tuple[int, ...]:
        """Where `forward` can read the residual stream: after so many layers each."""

    def memory(self, counts: UnitCounts, page_size: int, types: MemoryTypes | None = None) -> Memory: ...

    def forward(self, batch: Batch, memory: Memory, tapped: list[Tensor] | None = None) -> Tensor:
        """The hidden states that `logits` takes; `tapped` receives the residual streams at `taps`."""

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor: ...


class Model:
    """The blocks of one model between its token embedding and its output head."""

    def __init__(
        self,
        family: Family,
        config: ModelConfig,
        reader: WeightReader,
        context_length: int,
        team: Team | None = None,
    ) -> None:
        """Reads every weight; raises `WeightMismatch` with all names that do not fit.

        With a `team` this is one rank's part: `config` becomes the local configuration, and every rank calls
        `forward` and `logits` with the same batch.
        """
        for pattern in family.ignored:
            reader.ignore(pattern)
        builder = Builder(config, reader, context_length, team)
        self.group: Group | None = None
        self._vocabulary: Vocabulary | None = None
        if team is not None:
            self.group = team.group
            self._vocabulary = team.sharding.vocabulary(family.embedding, family.head, config.vocabulary)
            config = team.sharding.model(config)
        self.config = config
        self.context_length = context_length
        self.memory_shape: MemoryShape = memory_shape(config)
        self.device = reader.placement.device
        self.dtype = reader.placement.dtype
        size = None if self._vocabulary is None else self._vocabulary.size
        embedding, self._head = builder.embedding_and_head(family.embedding, family.head, size)
        self._embedding: Embedding | CutEmbedding = embedding
        if self.group is not None and self._vocabulary is not None:
            self._embedding = CutEmbedding(embedding, self._vocabulary, self.group)
        self._blocks = tuple(family.blocks(builder))
        self._norm = builder.norm(family.norm)
        reader.finish()
        self._dense = tuple(reader.dense)
        assert self._blocks, "a model has at least one block"
        self._fused = fuse(self._blocks, self._norm, config) if team is None else None
        self.taps: tuple[int, ...] = ()
        self._tap_blocks: frozenset[int] = frozenset()

    @property
    def has_experts(self) -> bool:
        """Whether the model has experts, so that each expert sees only some tokens."""
        return any(isinstance(layer.mlp, ExpertsConfig) for layer in self.config.layers)

    @property
    def in_eight_bits(self) -> bool:
        """Whether weights of its blocks are in 8 bits or fewer."""
        return holds_codes(block.part for block in self._blocks)

    def pack_weights(self, room: int) -> int:
        """Keep packed 12-bit copies of dense weights, for steps of few tokens; returns their bytes.

        Packs nothing if the copies could exceed `room` bytes, or no kernel reads them.
        """
        if sum(kernels.packed_size(linear.weight, linear.gated) for linear in self._dense) > room:
            return 0
        before = sum(linear.bytes for linear in self._dense)
        for linear in self._dense:
            linear.pack()
        return sum(linear.bytes for linear in self._dense) - before

    def memory(self, counts: UnitCounts, page_size: int, types: MemoryTypes | None = None) -> Memory:
        """Storage for this model's sequences on its device, in its dtype unless `types` says otherwise."""
        return Memory(self.memory_shape, counts, page_size, types or MemoryTypes.of(self.dtype), self.device)

    def tap(self, layers: Sequence[int]) -> None:
        """Let `forward` read the residual stream after so many layers each, in ascending order.

        A pass over all layers at once has no such places; the layers are computed one by one from now on.
        """
        count = len(self.config.layers)
        require_taps(layers, count)
        each, rest = divmod(len(self._blocks), count)
        if rest:
            raise ConfigurationError("hidden states between the layers of this model cannot be read")
        self.taps = tuple(layers)
        self._tap_blocks = frozenset(layer * each for layer in layers)
        self._fused = None

    def embed(self, tokens: Tensor) -> Tensor:
        """The embedding of each token, [tokens, width]."""
        return self._embedding(tokens)

    @torch.inference_mode()
    def forward(self, batch: Batch, memory: Memory, tapped: list[Tensor] | None = None) -> Tensor:
        """The normed hidden state of every token of the batch, [tokens, width].

        `tapped` receives the residual stream at each of `taps`.
        """
        epsilon, multiplier = self.config.norm_epsilon, self.config.residual_multiplier
        group = self.group
        residual = self._embedding(batch.tokens)
        if self._fused is not None and memory.types.kv == self.dtype:
            return self._fused(residual, batch, memory)
        change: Tensor | None = None
        for index, block in enumerate(self._blocks):
            if change is None:
                x = residual if block.before is None else kernels.rms_norm(residual, block.before, epsilon)
            elif block.before is None:
                x = residual = torch.add(residual, change, alpha=multiplier)
            else:
                x, residual = kernels.rms_norm_residual(
                    change, residual, block.before, epsilon, multiplier=multiplier
                )
            if tapped is not None and index in self._tap_blocks:
                tapped.append(residual)
            change = block.part(x, batch, memory)
            if group is not None:
                change = group.sum(change)
            if block.after is not None:
                change = kernels.rms_norm(change, block.after, epsilon)
        assert change is not None
        normed, total = kernels.rms_norm_residual(
            change, residual, self._norm, epsilon, multiplier=multiplier
        )
        if tapped is not None and len(self._blocks) in self._tap_blocks:
            tapped.append(total)
        return normed

    @property
    def logits_dtype(self) -> torch.dtype:
        """The dtype of `logits`: float32 where the model scales them."""
        scaled = self.config.logits_multiplier != 1.0 or self.config.logits_softcap is not None
        return torch.float32 if scaled else self.dtype

    @torch.inference_mode()
    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Logits [rows, vocabulary] of hidden states from `forward`, in `out` if given.

        `out` costs no launch with a dense head: the last kernel writes to it.
        """
        multiplier, softcap = self.config.logits_multiplier, self.config.logits_softcap
        if self._vocabulary is not None and self.group is not None:
            logits = self._vocabulary.logits(self._head(hidden), self.group)
        elif out is not None and isinstance(self._head, DenseLinear) and self.logits_dtype == self.dtype:
            return self._head(hidden, out)
        else:
            logits = self._head(hidden)
        if multiplier != 1.0:
            logits = torch.mul(logits.float(), multiplier, out=out if softcap is None else None)
        if softcap is not None:
            logits = torch.mul(torch.tanh(logits.float() / softcap), softcap, out=out)
        if out is None or logits is out:
            return logits
        return out.copy_(logits)


def holds_codes(parts: Iterable[Part]) -> bool:
    """Whether weights of these parts are in 8 bits or fewer."""
    values = (vars(part).values() for part in parts)
    return any(isinstance(each, Fp8Linear | QuantisedLinear) for part in values for each in part)


def require_taps(layers: Sequence[int], count: int) -> None:
    """Raise unless a model of so many layers can be read after each of `layers`, in ascending order."""
    if list(layers) != sorted(set(layers)) or not layers or not 0 <= layers[0] <= layers[-1] <= count:
        raise ConfigurationError(
            f"hidden states after layers {list(layers)} cannot be read: the model has {count} layers"
        )
