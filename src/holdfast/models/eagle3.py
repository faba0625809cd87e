"""EAGLE-3 heads as published: a directory beside the model, with one layer that reads three of the model's.

The residual stream of the model after a low, a middle and a high layer is joined and projected by `fc`. One
layer's attention takes the normed embedding joined with the normed hidden state. The output head has a
vocabulary of its own, mostly smaller: `d2t` has the distance of each of its tokens to that of the model.

Two forms of config.json are read: that of EAGLE and SGLang (the keys of a Llama, `draft_vocab_size`,
`eagle_config`), and that of speculators (`speculators_model_type`, `transformer_layer_config`). Loaded by
`engine/draft`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from holdfast import kernels
from holdfast.kernels import Batch
from holdfast.models.blocks import Builder
from holdfast.models.config import AttentionConfig, LayerConfig, MlpConfig, ModelConfig
from holdfast.models.families import decoder
from holdfast.models.fields import ConfigurationError, Fields, reading
from holdfast.models.heads import DraftHead
from holdfast.models.layers import Part
from holdfast.models.linear import Embedding
from holdfast.models.memory import Memory
from holdfast.models.model import Model, require_taps
from holdfast.models.quantised.forms import Quantisation, read_quantisation
from holdfast.models.sources import SafetensorsSource, Source
from holdfast.models.weights import Placement, WeightReader

__all__ = ["Eagle3Description", "Eagle3Head", "load_eagle3", "open_eagle3"]

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3DraftModel", "Eagle3Speculator")
TAPS = 3
"""Layers of the model that a head reads."""

NEVER = -1e4
"""The logit of a token that the head does not know. It is finite in every dtype, and is never sampled."""


@dataclass(frozen=True, slots=True)
class Eagle3Description:
    """A head, described. `taps`: after how many of the model's layers it reads; None: the usual ones."""

    path: Path
    layer: LayerConfig
    width: int
    target_width: int
    vocabulary: int
    outputs: int
    norm_epsilon: float
    norm_before_residual: bool
    taps: tuple[int, ...] | None
    quantisation: Quantisation | None

    def taps_of(self, layers: int) -> tuple[int, ...]:
        """Where a model of so many layers is read."""
        return self.taps if self.taps is not None else (2, layers // 2, layers - 3)

    def check(self, target: ModelConfig) -> None:
        """Raise unless this is a head of that model, as far as descriptions tell."""
        if self.vocabulary != target.vocabulary:
            raise ConfigurationError(
                f"'vocab_size' is {self.vocabulary}, and the model's is {target.vocabulary}"
            )
        if self.target_width != target.width:
            raise ConfigurationError(
                f"fc.weight takes hidden states of {self.target_width} ('target_hidden_size' or "
                f"'hidden_size'), and the model's have {target.width}"
            )
        require_taps(self.taps_of(len(target.layers)), len(target.layers))


def open_eagle3(path: Path) -> Eagle3Description | None:
    """The description of an EAGLE-3 head; None if the directory contains something else."""
    if not (path / "config.json").is_file():
        return None
    with reading(path / "config.json"):
        fields = Fields.read(path / "config.json")
        if not _is_eagle3(fields):
            return None
        return _describe(fields, path)


def _is_eagle3(fields: Fields) -> bool:
    if fields.has("speculators_model_type"):
        return fields.text("speculators_model_type") == "eagle3"
    names = fields.texts("architectures") if fields.has("architectures") else ()
    return any(name in ARCHITECTURES for name in names) or fields.has("draft_vocab_size")


def _describe(fields: Fields, path: Path) -> Eagle3Description:
    whole = fields
    if whole.has("transformer_layer_config"):
        fields = whole.inner("transformer_layer_config")
    if (layers := fields.integer("num_hidden_layers", 1)) != 1:
        raise ConfigurationError(
            f"{fields.where}: EAGLE-3 heads of {layers} layers are not supported, only of 1"
        )
    width = fields.integer("hidden_size")
    bias = fields.flag("attention_bias")
    attention = decoder.attention(fields, input_width=2 * width, input_bias=bias, output_bias=bias)
    vocabulary = fields.integer("vocab_size")
    return Eagle3Description(
        path=path,
        layer=LayerConfig((attention,), decoder.gated_mlp(fields)),
        width=width,
        target_width=whole.integer("target_hidden_size", width),
        vocabulary=vocabulary,
        outputs=whole.integer("draft_vocab_size", vocabulary),
        norm_epsilon=fields.number("rms_norm_eps", 1e-6),
        norm_before_residual=whole.flag("norm_before_residual"),
        taps=_taps(whole),
        quantisation=read_quantisation(whole, path),
    )


def _taps(fields: Fields) -> tuple[int, ...] | None:
    """After how many layers the model is read.

    At the top level of config.json the numbers say that. In `eagle_config` they name the layers by their
    index, so that layer 0 is read after one layer.
    """
    key = "eagle_aux_hidden_state_layer_ids"
    named = fields.integers(key)
    inner = fields.inner("eagle_config").integers(key)
    found = named or tuple(layer + 1 for layer in inner)
    if not found:
        return None
    if len(found) != TAPS:
        raise ConfigurationError(f"{fields.where}: {key!r} should name {TAPS} layers, not {len(found)}")
    return found


class Eagle3Head(DraftHead):
    """An EAGLE-3 head; without an embedding or an output head of its own it uses the model's."""

    def __init__(self, described: Eagle3Description, target: Model, reader: WeightReader) -> None:
        (attention,), mlp, width = described.layer.mixers, described.layer.mlp, described.width
        assert isinstance(attention, AttentionConfig) and isinstance(mlp, MlpConfig)
        config = ModelConfig(
            architecture="EAGLE-3",
            vocabulary=target.config.vocabulary,
            width=width,
            context_length=target.context_length,
            layers=(described.layer,),
            norm_epsilon=described.norm_epsilon,
        )
        super().__init__(config, target)
        self._described = described
        self._target = target
        builder = Builder(config, reader, target.context_length)
        at = "layers.0." if reader.has("layers.0.hidden_norm.weight") else "midlayer."
        self._join = reader.linear(["fc"], TAPS * described.target_width, [width], bias=reader.has("fc.bias"))
        self._embedding_norm = builder.norm(f"{at}input_layernorm")
        self._hidden_norm = builder.norm(f"{at}hidden_norm")
        self._attention = builder.attention(f"{at}self_attn.", attention)
        self._between = builder.norm(f"{at}post_attention_layernorm")
        self._mlp = builder.mlp(f"{at}mlp.", mlp)
        self._after = builder.norm("norm")
        same = width == target.config.width
        self._embedding: Embedding | None = None
        if reader.has("embed_tokens.weight") or not same:
            self._embedding, _ = reader.embedding(
                "embed_tokens", described.vocabulary, width, 1.0, tied=False
            )
        whole = described.outputs == described.vocabulary
        self._head = None
        if reader.has("lm_head.weight") or not (whole and same):
            self._head = reader.head("lm_head", width, described.outputs)
        self._ids = None if whole and not reader.has("d2t") else self._read_ids(reader)

    def _read_ids(self, reader: WeightReader) -> Tensor:
        """The model's token for each of the head's."""
        described = self._described
        count, vocabulary = described.outputs, described.vocabulary
        if reader.dummy:
            return torch.arange(count, device=self.device)
        distances = reader.part("d2t", ((count,),), (torch.int64, torch.int32))
        if distances is None:
            return torch.zeros(count, dtype=torch.int64)
        ids = torch.arange(count) + distances.to(torch.int64)
        outside = ((ids < 0) | (ids >= vocabulary)).nonzero().flatten().tolist()
        if outside:
            first = outside[0]
            reader.reject(
                f"d2t maps token {first} to {int(ids[first])}, and the model has {vocabulary} tokens"
            )
            return torch.zeros(count, dtype=torch.int64)
        if ids.unique().numel() != count:
            reader.reject("d2t maps several tokens to the same one")
        if reader.has("t2d"):
            known = reader.part("t2d", ((vocabulary,),), (torch.bool, torch.uint8, torch.int64))
            if known is not None and not bool((known != 0)[ids].all()):
                reader.reject("t2d lacks tokens that d2t maps to")
        return ids.to(self.device)

    @property
    def parts(self) -> Sequence[Part]:
        return self._attention, self._mlp

    @property
    def outputs(self) -> int:
        return self._described.outputs

    @property
    def feature_width(self) -> int:
        return TAPS * self._described.target_width

    @property
    def logits_dtype(self) -> torch.dtype:
        return self.dtype if self._head is not None else self._target.logits_dtype

    @torch.inference_mode()
    def project(self, features: Tensor) -> Tensor:
        return self._join(features)

    @torch.inference_mode()
    def forward(self, batch: Batch, memory: Memory, tapped: list[Tensor] | None = None) -> Tensor:  # noqa: ARG002
        epsilon = self.config.norm_epsilon
        embed = self._target.embed if self._embedding is None else self._embedding
        embedded = kernels.rms_norm(embed(batch.tokens), self._embedding_norm, epsilon)
        residual = self.given[: batch.tokens.shape[0]]
        normed = kernels.rms_norm(residual, self._hidden_norm, epsilon)
        if self._described.norm_before_residual:
            residual = normed
        change = self._attention(torch.cat((embedded, normed), dim=-1), batch, memory)
        x, residual = kernels.rms_norm_residual(change, residual, self._between, epsilon)
        return residual + self._mlp(x, batch, memory)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        normed = kernels.rms_norm(hidden, self._after, self.config.norm_epsilon)
        if self._head is None:
            return self._target.logits(normed, out)
        found = self._head(normed)
        if self._ids is None:
            return found if out is None else out.copy_(found)
        if out is None:
            out = found.new_empty(found.shape[0], self.config.vocabulary)
        return out.fill_(NEVER).index_copy_(1, self._ids, found)


def load_eagle3(
    described: Eagle3Description, target: Model, placement: Placement, *, dummy: bool = False
) -> Eagle3Head:
    """A head of a model, which from now on is read after the layers that the head needs."""
    source: Source | None = None if dummy else SafetensorsSource(described.path)
    described.check(target.config)
    reader = WeightReader(source, placement, None, described.quantisation)
    head = Eagle3Head(described, target, reader)
    reader.finish()
    target.tap(described.taps_of(len(target.config.layers)))
    return head
