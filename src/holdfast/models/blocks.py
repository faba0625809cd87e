"""How a family composes a model: residual blocks, and the builder that reads their parts.

A model is a list of blocks on one residual stream: `residual + after(part(before(residual)))`. A family
yields its blocks from a `Builder`, which reads the weights and counts the layers of each memory component, so
that a family's file contains only its structure. Used by the families and by `model`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.models.config import (
    AttentionConfig,
    DeltaConfig,
    ExpertsConfig,
    Mamba2Config,
    MlpConfig,
    ModelConfig,
    Rope,
)
from holdfast.models.fields import Fields
from holdfast.models.layers import Attention, Mlp, Part, Spread
from holdfast.models.linear import Embedding, Linear
from holdfast.models.ranks import Group, SpreadNorm
from holdfast.models.recurrent import GatedDelta, Mamba2
from holdfast.models.rope import rotary_table
from holdfast.models.sharding import Sharding
from holdfast.models.weights import WeightReader


@dataclass(frozen=True, slots=True)
class Block:
    """One residual block; a norm that the family lacks is None."""

    part: Part
    before: Tensor | None = None
    after: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Team:
    """Tensor parallelism: the part of this rank, and the ranks that compute a model together."""

    sharding: Sharding
    group: Group


class Builder:
    """Reads the parts of one model in order. Each attention or state part takes the next layer of memory.

    With a `team` configurations that families give are of the whole model; parts are built for this rank.
    """

    def __init__(
        self, config: ModelConfig, reader: WeightReader, context_length: int, team: Team | None = None
    ) -> None:
        self.config = config
        self.team = team
        self.reader = reader
        self._context_length = context_length
        self._tables: dict[Rope, Tensor] = {}
        self._full_layers = 0
        self._window_layers = 0
        self._state_layers = 0

    def norm(self, name: str) -> Tensor:
        """A norm over the model's width."""
        return self.reader.norm(name, self.config.width, self.config.norm_offset)

    def attention(self, prefix: str, config: AttentionConfig) -> Attention:
        if config.window is None:
            layer, self._full_layers = self._full_layers, self._full_layers + 1
        else:
            layer, self._window_layers = self._window_layers, self._window_layers + 1
        whole = config
        if self.team is not None:
            config = self.team.sharding.attention(prefix, whole)
        return Attention(
            config,
            self.reader,
            prefix,
            width=self.config.width,
            layer=layer,
            rotary=self._rotary(config.rope),
            epsilon=self.config.norm_epsilon,
            norm_offset=self.config.norm_offset,
            spread=self._spread_norm(whole) if self.team is not None and whole.projection_norm else None,
        )

    def _spread_norm(self, whole: AttentionConfig) -> Spread:
        """The norms over all queries and all keys; keys of a head that several ranks have count once."""
        assert self.team is not None
        shared = self.team.sharding.heads(whole)
        queries = torch.full((shared.heads.size,), 1.0 / whole.heads)
        keys = torch.tensor([1.0 / (shared.copies[item] * whole.kv_heads) for item in shared.items])
        share = torch.block_diag(queries[:, None], keys[:, None]).repeat_interleave(whole.head_dim, 0)
        return self._spread(share / whole.head_dim)

    def _spread(self, share: Tensor) -> Spread:
        assert self.team is not None
        group, share = self.team.group, share.to(self.reader.placement.device)
        epsilon = self.config.norm_epsilon
        return lambda weight: SpreadNorm(group, share, weight, epsilon)

    def mamba2(self, prefix: str, config: Mamba2Config) -> Mamba2:
        spread: Spread | None = None
        if self.team is not None:
            sharding, whole = self.team.sharding, config
            config = sharding.mamba2(prefix, whole)
            if sharding.norm_is_spread(whole):
                channels = torch.arange(whole.width) // (whole.width // whole.norm_groups)
                first = sharding.ranks.rank * config.width
                mine = torch.nn.functional.one_hot(channels, whole.norm_groups)[first : first + config.width]
                spread = self._spread(mine.float() * whole.norm_groups / whole.width)
        return Mamba2(
            config,
            self.reader,
            prefix,
            width=self.config.width,
            layer=self._next_state_layer(),
            epsilon=self.config.norm_epsilon,
            spread=spread,
        )

    def gated_delta(
        self, prefix: str, config: DeltaConfig, projections: dict[str, int], order: Tensor | None = None
    ) -> GatedDelta:
        return GatedDelta(
            config,
            self.reader,
            prefix,
            projections,
            order=order,
            width=self.config.width,
            layer=self._next_state_layer(),
            epsilon=self.config.norm_epsilon,
        )

    def mlp(self, prefix: str, config: MlpConfig) -> Mlp:
        if self.team is not None:
            inputs = [f"{prefix}gate_proj", f"{prefix}up_proj"]
            config = self.team.sharding.mlp(config, inputs, f"{prefix}down_proj")
        return Mlp.read(config, self.reader, prefix, self.config.width)

    def local_experts(self, prefix: str, config: ExpertsConfig) -> ExpertsConfig:
        """This rank's part of experts that are stored one by one under `prefix`."""
        return config if self.team is None else self.team.sharding.experts(prefix, config)

    @property
    def leads(self) -> bool:
        """Whether this rank adds the terms that are added once: biases of all-reduces."""
        return self.team is None or self.team.sharding.ranks.rank == 0

    def embedding_and_head(
        self, embedding: str, head: str, vocabulary: int | None = None
    ) -> tuple[Embedding, Linear]:
        """The token embedding and the output head, with shared weights where the model ties them.

        `vocabulary`: how many tokens this rank has.
        """
        config = self.config
        vocabulary = config.vocabulary if vocabulary is None else vocabulary
        multiplier = config.embedding_multiplier
        if config.round_embedding_multiplier:
            multiplier = float(torch.tensor(multiplier).to(self.reader.placement.dtype))
        table, tied = self.reader.embedding(
            embedding,
            vocabulary,
            config.width,
            multiplier,
            tied=config.tied_embeddings,
        )
        if tied is not None:
            self.reader.ignore(rf"^{head}\.weight$")
            return table, tied
        return table, self.reader.head(head, config.width, vocabulary)

    def _next_state_layer(self) -> int:
        layer, self._state_layers = self._state_layers, self._state_layers + 1
        return layer

    def _rotary(self, rope: Rope | None) -> Tensor | None:
        if rope is None:
            return None
        if rope not in self._tables:
            device = self.reader.placement.device
            self._tables[rope] = rotary_table(rope, self._context_length, device)
        return self._tables[rope]


@dataclass(frozen=True, slots=True)
class Family:
    """A model family: how its configuration is read, and its blocks."""

    architectures: tuple[str, ...]
    configure: Callable[[Fields, str], ModelConfig]
    blocks: Callable[[Builder], Iterator[Block]]
    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"
    ignored: tuple[str, ...] = (r"rotary_emb\.inv_freq$",)
    """Patterns of checkpoint names that are not needed."""
    text_config: bool = False
    """Whether the language model's fields may be nested in `text_config`."""
    mtp: str | None = None
    """The prefix of a multi-token-prediction head's names, where checkpoints may contain one."""
