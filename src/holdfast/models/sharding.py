"""Tensor parallelism: which part of each kind of layer a rank has.

A rank's model is a model of its own with fewer heads and narrower MLPs: a *local* configuration, and weights
that look like a checkpoint of that configuration (`cuts`). Each method here describes one kind of layer: it
returns the local configuration and cuts the weights under the names that the family gives.

    query heads, heads of states     in equal runs; the number of ranks must divide them
    KV heads, groups of B and C,     those that a rank's heads read: a part of them, or copies where they are
    key heads                        fewer than the ranks, or where a rank's heads begin inside of a group
    width of MLPs and experts        in runs as equal as groups of quantised weights allow
    vocabulary                       in runs, the last one shorter

Inputs of a layer (rows of its first projection) are cut so that its last projection has the same columns: one
sum over the ranks after each block. Biases of last projections are rank 0's. Routers and norms over the
model's width are whole on each rank. Called by `blocks`, by families with names of their own, and before a
model is loaded (`local_config`), which rejects what does not divide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from holdfast.models.config import (
    AttentionConfig,
    DeltaConfig,
    ExpertsConfig,
    LayerConfig,
    Mamba2Config,
    MixerConfig,
    MlpConfig,
    ModelConfig,
)
from holdfast.models.cuts import Cut, Cuts, beside
from holdfast.models.fields import ConfigurationError
from holdfast.models.ranks import Ranks, Vocabulary

__all__ = ["Indivisible", "Sharding", "Shared", "local_config"]


class Indivisible(ConfigurationError):
    """A model cannot be divided over so many ranks; the message names what does not divide."""


class Shared(NamedTuple):
    """The heads of a rank that share others: KV heads of queries, groups or key heads of states.

    `heads` of this rank, and for each of its local groups, which have `each` heads, the whole group `items`.
    """

    heads: Cut
    groups: Cut
    each: int
    items: tuple[int, ...]
    copies: tuple[int, ...]
    """How many local groups, of all ranks, are of each whole group."""


def _shared(what: str, heads: int, groups: int, ranks: Ranks) -> Shared:
    if heads % ranks.size:
        raise Indivisible(f"{ranks.size} ranks do not divide {heads} {what}")
    local, group = heads // ranks.size, heads // groups
    each = math.gcd(local, group)
    everywhere = [first // group for first in range(0, heads, each)]
    mine = everywhere[ranks.rank * local // each : (ranks.rank + 1) * local // each]
    return Shared(
        Cut.run(heads, ranks.rank * local, local),
        Cut.items(groups, mine),
        each,
        tuple(mine),
        tuple(everywhere.count(item) for item in range(groups)),
    )


def _run(what: str, total: int, unit: int, ranks: Ranks) -> Cut:
    """A run of whole units, as equal as those of the other ranks can be."""
    units = -(-total // unit)
    if units < ranks.size:
        groups = f" in groups of {unit}" if unit > 1 else ""
        raise Indivisible(f"{ranks.size} ranks do not divide {what} of {total}{groups}")
    first = ranks.rank * units // ranks.size * unit
    end = min(total, (ranks.rank + 1) * units // ranks.size * unit)
    return Cut.run(total, first, end - first)


class Sharding:
    """The part of one rank: local configurations, and `cuts` of the weights by name."""

    __slots__ = ("_unit", "cuts", "ranks")

    def __init__(self, ranks: Ranks, unit: int = 1) -> None:
        """`unit` columns of quantised weights share a scale: widths are cut between them."""
        self.ranks = ranks
        self.cuts = Cuts()
        self._unit = unit

    # --- attention --------------------------------------------------------------------------------

    def heads(self, config: AttentionConfig) -> Shared:
        """The query and KV heads of this rank."""
        return _shared("attention heads (num_attention_heads)", config.heads, config.kv_heads, self.ranks)

    def local_attention(self, config: AttentionConfig) -> AttentionConfig:
        shared = self.heads(config)
        return replace(config, heads=shared.heads.size, kv_heads=len(shared.items))

    def attention(self, prefix: str, config: AttentionConfig) -> AttentionConfig:
        """Attention with the names of `layers.Attention` under `prefix`."""
        shared, cuts = self.heads(config), self.cuts
        queries, keys = shared.heads.times(config.head_dim), shared.groups.times(config.head_dim)
        gated = 2 if config.output_gate else 1
        cuts.module(f"{prefix}q_proj", rows=shared.heads.times(gated * config.head_dim))
        for name in ("k_proj", "v_proj"):
            cuts.module(f"{prefix}{name}", rows=keys)
        cuts.module(f"{prefix}o_proj", columns=queries)
        cuts.tensor(f"{prefix}sinks", shared.heads)
        if config.projection_norm:
            cuts.tensor(f"{prefix}q_norm.weight", queries)
            cuts.tensor(f"{prefix}k_norm.weight", keys)
        return self.local_attention(config)

    # --- states -----------------------------------------------------------------------------------

    def scans(self, config: Mamba2Config) -> Shared:
        """The heads of a Mamba2 mixer, and the groups whose B and C they read."""
        return _shared("Mamba2 heads", config.heads, config.groups, self.ranks)

    def norm_is_spread(self, config: Mamba2Config) -> bool:
        """Whether groups of the gated norm have channels on several ranks."""
        return config.norm != "gate_only" and config.norm_groups % self.ranks.size != 0

    def local_mamba2(self, config: Mamba2Config) -> Mamba2Config:
        shared = self.scans(config)
        spread = self.norm_is_spread(config) or config.norm == "gate_only"
        norm_groups = 1 if spread else config.norm_groups // self.ranks.size
        return replace(config, heads=shared.heads.size, groups=len(shared.items), norm_groups=norm_groups)

    def mamba2(self, prefix: str, config: Mamba2Config) -> Mamba2Config:
        """A mixer with the names of `recurrent.Mamba2` under `prefix`."""
        shared, cuts = self.scans(config), self.cuts
        heads, inner = shared.heads, shared.heads.times(config.head_dim)
        grouped = shared.groups.times(config.state_dim)
        channels = beside(inner, grouped, grouped)
        cuts.module(f"{prefix}in_proj", rows=beside(inner, channels, heads))
        cuts.tensor(f"{prefix}conv1d.weight", channels, None, None)
        cuts.tensor(f"{prefix}conv1d.bias", channels)
        for name in ("A_log", "D", "dt_bias"):
            cuts.tensor(f"{prefix}{name}", heads)
        cuts.tensor(f"{prefix}norm.weight", inner)
        cuts.module(f"{prefix}out_proj", columns=inner)
        return self.local_mamba2(config)

    def deltas(self, config: DeltaConfig) -> Shared:
        """The value heads of a gated-delta mixer, and the key heads that they read."""
        what = "value heads (linear_num_value_heads)"
        return _shared(what, config.value_heads, config.key_heads, self.ranks)

    def local_delta(self, config: DeltaConfig) -> DeltaConfig:
        shared = self.deltas(config)
        return replace(config, value_heads=shared.heads.size, key_heads=len(shared.items))

    def delta(self, prefix: str, config: DeltaConfig) -> DeltaConfig:
        """A mixer with the names of `recurrent.GatedDelta` under `prefix`, but for its input projections."""
        shared, cuts = self.deltas(config), self.cuts
        keys, values = shared.groups.times(config.key_dim), shared.heads.times(config.value_dim)
        cuts.tensor(f"{prefix}conv1d.weight", beside(keys, keys, values), None, None)
        for name in ("A_log", "dt_bias"):
            cuts.tensor(f"{prefix}{name}", shared.heads)
        cuts.module(f"{prefix}out_proj", columns=values)
        return self.local_delta(config)

    # --- MLPs and experts -------------------------------------------------------------------------

    def inner(self, width: int) -> Cut:
        """The part of an MLP's or of each expert's width."""
        return _run("a width of an MLP", width, self._unit, self.ranks)

    def local_mlp(self, config: MlpConfig) -> MlpConfig:
        return replace(config, width=self.inner(config.width).size)

    def mlp(self, config: MlpConfig, inputs: Sequence[str], output: str) -> MlpConfig:
        """An MLP whose first projections are the modules `inputs`, the last one `output`."""
        inner = self.inner(config.width)
        for name in inputs:
            self.cuts.module(name, rows=inner)
        self.cuts.module(output, columns=inner)
        return self.local_mlp(config)

    def local_experts(self, config: ExpertsConfig) -> ExpertsConfig:
        shared = None if config.shared is None else self.local_mlp(config.shared)
        return replace(config, width=self.inner(config.width).size, shared=shared)

    def experts(self, prefix: str, config: ExpertsConfig) -> ExpertsConfig:
        """Experts that are stored one by one under `prefix`0., `prefix`1. and so on."""
        inner = self.inner(config.width)
        for expert in range(config.experts):
            for name in ("gate_proj", "up_proj"):
                self.cuts.module(f"{prefix}{expert}.{name}", rows=inner)
            self.cuts.module(f"{prefix}{expert}.down_proj", columns=inner)
        return replace(config, width=inner.size)

    # --- the whole model --------------------------------------------------------------------------

    def vocabulary(self, embedding: str, head: str, total: int) -> Vocabulary:
        """The rows of the token embedding and of the output head."""
        each = -(-total // self.ranks.size)
        each = -(-each // self._unit) * self._unit
        first = self.ranks.rank * each
        if (self.ranks.size - 1) * each >= total:
            raise Indivisible(f"{self.ranks.size} ranks do not divide a vocabulary of {total}")
        rows = Cut.run(total, first, min(each, total - first))
        self.cuts.module(embedding, rows=rows)
        self.cuts.module(head, rows=rows)
        return Vocabulary(total, each, first, rows.size)

    def model(self, config: ModelConfig) -> ModelConfig:
        """The local configuration of a whole model; its vocabulary is whole, since logits are gathered."""
        return replace(config, layers=tuple(self._layer(layer) for layer in config.layers))

    def _layer(self, layer: LayerConfig) -> LayerConfig:
        mlp = layer.mlp
        if isinstance(mlp, MlpConfig):
            mlp = self.local_mlp(mlp)
        elif mlp is not None:
            mlp = self.local_experts(mlp)
        return LayerConfig(tuple(self._mixer(mixer) for mixer in layer.mixers), mlp)

    def _mixer(self, mixer: MixerConfig) -> MixerConfig:
        match mixer:
            case AttentionConfig():
                return self.local_attention(mixer)
            case Mamba2Config():
                return self.local_mamba2(mixer)
            case DeltaConfig():
                return self.local_delta(mixer)


def local_config(config: ModelConfig, ranks: Ranks, unit: int = 1) -> ModelConfig:
    """A rank's configuration; raises `Indivisible` where the model cannot be divided."""
    sharding = Sharding(ranks, unit)
    sharding.vocabulary("embedding", "head", config.vocabulary)
    return sharding.model(config)
