"""The numeric work of a model step, as functions of tensors; the device of the tensors chooses the code.

CPU tensors run in `kernels/torch`, CUDA tensors in `kernels/triton`; both give the same results up to
rounding. No function synchronises with the device: grid sizes come from host-side integers (shapes and the
counts in `Batch`), so a step can be captured in a CUDA graph. Inputs may be strided views unless a function
says otherwise. Models and the executor call these functions; the rest of the public interface is `Batch`,
`Pages`, `Pieces`, `PieceQueue` and their builders, the parameter types, and `configure`.

Conventions, for all functions:

- The T tokens of all rows are concatenated; `batch` says which row each belongs to.
- Paged KV of one layer is two views `[units, page_size, kv_heads, dim]` into unit-major storage, in the
  model's dtype or another; or two `ScaledCache`s, in eight bits.
- A recurrent state of one layer is a view `[slots, ...]`; a row reads slot `state_source` (-1: zeros) and
  writes slot `state_destination`; a source that is not also the destination is unchanged.
- Arithmetic is float32, results have the dtype of the first input.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from holdfast.kernels.batch import (
    PIECE_FIELDS,
    Batch,
    Least,
    Pages,
    PieceQueue,
    Pieces,
    build_batch,
    build_pages,
    tile_count,
)
from holdfast.kernels.cuda.attention import build_queue, takes_queue
from holdfast.kernels.cuda.codes import pack as pack_codes
from holdfast.kernels.cuda.packing import PackedCodes
from holdfast.kernels.cuda.products import takes_products
from holdfast.kernels.cuda.scaled_attention import takes_scaled_queue
from holdfast.kernels.cuda.twelve import TwelveBits, pack_weight, packed_size
from holdfast.kernels.dispatch import configure, implementation
from holdfast.kernels.parameters import (
    Mamba2Weights,
    Rotation,
    RouterForm,
    RouterKind,
    StepTables,
    TokenMasks,
)
from holdfast.kernels.quantised import QuantisedWeight
from holdfast.kernels.scaled import KvCache, ScaledCache
from holdfast.kernels.settings import KernelSettings
from holdfast.kernels.torch.activation import PLAIN_EXPERTS, Activation, Clamp, ExpertForm
from holdfast.kernels.torch.router import choose

__all__ = [
    "PIECE_FIELDS",
    "Activation",
    "Batch",
    "Clamp",
    "ExpertForm",
    "ExpertWeight",
    "KernelSettings",
    "KvCache",
    "Least",
    "Mamba2Weights",
    "PackedCodes",
    "Pages",
    "PieceQueue",
    "Pieces",
    "QuantisedWeight",
    "Rotation",
    "RouterForm",
    "RouterKind",
    "ScaledCache",
    "StepTables",
    "TokenMasks",
    "TwelveBits",
    "attend",
    "build_batch",
    "build_pages",
    "build_queue",
    "carry",
    "causal_conv",
    "change_tables",
    "choose_experts",
    "configure",
    "copy_units",
    "experts",
    "gated_delta",
    "geglu",
    "linear",
    "linear_codes",
    "linear_fp8",
    "linear_gated",
    "linear_quantised",
    "list_pieces",
    "mamba2_scan",
    "move_units",
    "note_sampled",
    "pack_codes",
    "pack_weight",
    "packed_size",
    "prepare_step",
    "relu_squared",
    "rest_states",
    "rms_norm",
    "rms_norm_gated",
    "rms_norm_residual",
    "rotate_and_write",
    "route",
    "sample_tokens",
    "swiglu",
    "swiglu_clamped",
    "takes_products",
    "takes_queue",
    "takes_scaled_queue",
    "tile_count",
    "wake_states",
    "write_kv",
]

ExpertWeight: TypeAlias = Tensor | QuantisedWeight | PackedCodes
"""One weight of all experts: dense, quantised, or packed for the CUDA kernels."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: float = 0.0) -> torch.Tensor:
    """`x / rms(x) * (weight + offset)` over the last dimension, for any leading shape."""
    out: torch.Tensor = implementation(x).rms_norm(x, weight, eps, offset=offset)
    return out


def rms_norm_residual(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    multiplier: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`total = residual + multiplier * x`; returns (norm of total, total). The inputs are unchanged."""
    normed, total = implementation(x).rms_norm_residual(
        x, residual, weight, eps, offset=offset, multiplier=multiplier
    )
    return normed, total


def rms_norm_gated(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    group_size: int | None = None,
    norm_before_gate: bool = False,
) -> torch.Tensor:
    """The norm of `x * silu(gate)` (Mamba2), or `norm(x) * silu(gate)` when `norm_before_gate` (gated delta).

    The last dimension is normed in groups of `group_size` (default: the whole); `weight` spans all of it.
    """
    out: torch.Tensor = implementation(x).rms_norm_gated(
        x, gate, weight, eps, group_size=group_size, norm_before_gate=norm_before_gate
    )
    return out


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`; gate is the first half of the last dimension, up the second."""
    out: torch.Tensor = implementation(gate_up).swiglu(gate_up)
    return out


def geglu(gate_up: torch.Tensor) -> torch.Tensor:
    """`gelu(gate) * up` with the tanh form of gelu."""
    out: torch.Tensor = implementation(gate_up).geglu(gate_up)
    return out


def swiglu_clamped(gate_up: torch.Tensor, *, alpha: float = 1.702, limit: float = 7.0) -> torch.Tensor:
    """`gate * sigmoid(alpha * gate) * (up + 1)` with gate at most `limit` and up within it (gpt-oss).

    Gate and up are halves here as everywhere; interleaved weights are reordered when loaded.
    """
    out: torch.Tensor = implementation(gate_up).swiglu_clamped(gate_up, alpha=alpha, limit=limit)
    return out


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """`max(x, 0) ** 2` (Nemotron-H)."""
    out: torch.Tensor = implementation(x).relu_squared(x)
    return out


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    twelve: TwelveBits | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`x @ weight.T + bias` for x [T, in] and weight [out, in]; `twelve` is that weight packed to 12 bits.

    The result is written to `out` if given: contiguous, in x's dtype.
    """
    made: torch.Tensor = implementation(x).linear(x, weight, bias, twelve, out)
    return made


def linear_gated(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation,
    twelve: TwelveBits | None = None,
) -> torch.Tensor:
    """The activation of `linear`, whose outputs are gate, then up (`relu_squared`: not gated)."""
    out: torch.Tensor = implementation(x).linear_gated(x, weight, bias, activation, twelve)
    return out


def linear_fp8(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    block: tuple[int, int],
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """`linear` with an fp8 weight [out, in] and a float32 scale for each `block` of it.

    Activations of more than one token may be quantised to fp8 too, where the device multiplies fp8.
    """
    out: torch.Tensor = implementation(x).linear_fp8(x, codes, scales, block, bias)
    return out


def linear_quantised(
    x: torch.Tensor, weight: QuantisedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`linear` with a quantised weight [out, in]; activations are not rounded."""
    out: torch.Tensor = implementation(x).linear_quantised(x, weight, bias)
    return out


def linear_codes(
    x: torch.Tensor,
    weight: PackedCodes,
    bias: torch.Tensor | None = None,
    activation: Activation | None = None,
) -> torch.Tensor:
    """`linear_quantised` with a packed weight, and its activation: gated if the weight was packed so."""
    out: torch.Tensor = implementation(x).linear_codes(x, weight, bias, activation)
    return out


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: KvCache,
    value_cache: KvCache,
    slots: torch.Tensor,
) -> None:
    """Write key and value [T, kv_heads, dim] of each token to its slot (`Pages.slots`)."""
    implementation(key).write_kv(key, value, key_cache, value_cache, slots)


def rotate_and_write(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: KvCache,
    value_cache: KvCache,
    slots: torch.Tensor,
    positions: torch.Tensor,
    rotation: Rotation,
) -> torch.Tensor:
    """Norm and rotate query [T, heads, dim] and key [T, kv_heads, dim], then write key and value.

    Returns the query, contiguous; the inputs may be views into one fused projection and are unchanged.
    """
    out: torch.Tensor = implementation(query).rotate_and_write(
        query, key, value, key_cache, value_cache, slots, positions, rotation
    )
    return out


def attend(
    query: torch.Tensor,
    key_cache: KvCache,
    value_cache: KvCache,
    pages: Pages,
    batch: Batch,
    *,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Causal attention of query [T, heads, dim] over the pages of each row; returns [T, heads, dim].

    The batch's own keys and values must be written first. With `window` w a query at position p sees keys
    in (p - w, p]. `sinks` [heads] are logits that take part in the softmax and contribute nothing; `softcap`
    c turns a score s into `c * tanh(s / c)`. Query head h reads key head `h // (heads // kv_heads)`.
    """
    out: torch.Tensor = implementation(query).attend(
        query, key_cache, value_cache, pages, batch, scale=scale, window=window, sinks=sinks, softcap=softcap
    )
    return out


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    batch: Batch,
    *,
    activation: Literal["silu"] | None = "silu",
) -> torch.Tensor:
    """Depthwise causal convolution of x [T, channels] with weight [channels, kernel] along each row.

    `conv_state` [slots, channels, kernel - 1] holds the last inputs of a row, oldest first.
    """
    out: torch.Tensor = implementation(x).causal_conv(
        x, weight, bias, conv_state, batch, activation=activation
    )
    return out


def mamba2_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    weights: Mamba2Weights,
    ssm_state: torch.Tensor,
    batch: Batch,
) -> torch.Tensor:
    """The Mamba2 recurrence; returns y [T, heads, head_dim].

    x [T, heads, head_dim]; dt [T, heads] before bias, softplus and limits; B and C [T, groups, state];
    `ssm_state` float32 [slots, heads, head_dim, state].
    """
    out: torch.Tensor = implementation(x).mamba2_scan(x, dt, B, C, weights, ssm_state, batch)
    return out


def gated_delta(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    delta_state: torch.Tensor,
    batch: Batch,
    *,
    scale: float | None = None,
    normalise: bool = False,
) -> torch.Tensor:
    """The gated delta rule; returns y [T, value_heads, value_dim].

    query and key [T, key_heads, key_dim], value [T, value_heads, value_dim] (value head h reads key head
    `h // (value_heads // key_heads)`); g [T, value_heads] is the log of the decay (at most 0), beta the
    writing rate; `delta_state` float32 [slots, value_heads, value_dim, key_dim]. Queries are multiplied by
    `scale` (default `key_dim ** -0.5`); `normalise` scales queries and keys to unit length first.
    """
    out: torch.Tensor = implementation(query).gated_delta(
        query, key, value, g, beta, delta_state, batch, scale=scale, normalise=normalise
    )
    return out


def route(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, form: RouterForm
) -> tuple[Tensor, Tensor]:
    """A router's choice for x [T, hidden]: expert ids int64 and shares float32 [T, picks], the best first.

    weight [experts, hidden] is float32, or of x's dtype; bias [experts] is float32. Logits that are not
    numbers pick experts that exist, with shares that are not numbers.
    """
    ids, shares = implementation(x).route(x, weight, bias, form)
    return ids, shares


def choose_experts(
    logits: torch.Tensor, bias: torch.Tensor | None, form: RouterForm
) -> tuple[Tensor, Tensor]:
    """`route` where the caller has the logits [T, experts] in float32."""
    return choose(logits, bias, form)


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: ExpertWeight,
    w2: ExpertWeight,
    form: ExpertForm = PLAIN_EXPERTS,
) -> torch.Tensor:
    """Mixture of experts over x [T, hidden]; the router's choice is `ids` and `weights` [T, picks].

    w13 [experts, 2 * inner, hidden] holds gate then up (only `inner` rows for `relu_squared`), w2
    [experts, hidden, inner], both of one type; activations are not rounded for those in fewer bits. Biases
    are [experts, 2 * inner] and [experts, hidden]. Returns the weighted sum.
    """
    kernels = implementation(x)
    match w13:
        case QuantisedWeight():
            run = kernels.experts_quantised
        case PackedCodes():
            run = kernels.experts_codes
        case _:
            run = kernels.experts
    out: torch.Tensor = run(x, ids, weights, w13, w2, form)
    return out


def copy_units(storage: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
    """Copy unit `sources[i]` to `destinations[i]`, all layers at once. No destination is also a source.

    `storage` [units, ...] is contiguous, `sources` and `destinations` are int32 or int64 on its device.
    """
    implementation(storage).copy_units(storage, sources, destinations)


def move_units(
    source: torch.Tensor, sources: torch.Tensor, target: torch.Tensor, destinations: torch.Tensor
) -> None:
    """Copy unit `sources[i]` of one storage to `destinations[i]` of another, all layers at once.

    One of the storages may be pinned host memory; the indices are on the device of the other.
    """
    implementation(sources).move_units(source, sources, target, destinations)


def rest_states(
    running: torch.Tensor,
    slots: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    places: torch.Tensor,
) -> None:
    """Put states to rest in eight bits: `slots[i]` of `running` to `places[i]` of `codes` and `scales`.

    `running` float32 [slots, ..., state_dim] and `codes` int8 [places, ..., state_dim] are contiguous, all
    layers at once; `scales` float32 [places, ...] has one for each row. A row with NaN has a scale of NaN.
    """
    implementation(running).rest_states(running, slots, codes, scales, places)


def wake_states(
    codes: torch.Tensor,
    scales: torch.Tensor,
    places: torch.Tensor,
    running: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Wake states from where `rest_states` put them: `places[i]` to `slots[i]` of `running`."""
    implementation(running).wake_states(codes, scales, places, running, slots)


def carry(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a contiguous run of numbers; one side may be pinned host memory.

    For a few words a kernel has less latency than a copy engine. The caller keeps pinned memory alive until
    the copy has run.
    """
    assert source.dim() == target.dim() == 1 and source.shape == target.shape and source.dtype == target.dtype
    implementation(source if target.device.type == "cpu" else target).carry(source, target)


def sample_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    greedy: bool = False,
    masks: TokenMasks | None = None,
) -> torch.Tensor:
    """One token per row of logits [rows, vocabulary], int64; -1 for a row with NaN or no finite maximum.

    Per-row parameters: temperature (0: the most likely token), top_k int (0: off), top_p (1: off), min_p
    (0: off), seeds int64, positions int. A row's token is a pure function of its own logits, parameters, seed
    and position. A token is kept when fewer than top_k tokens are more likely, those more likely hold less
    than top_p of the probability, and it has at least min_p of the maximum, all after the temperature.
    `greedy` tells the host that no row has a temperature.

    A token that a row's mask does not allow counts as a logit of -inf, and so does one past the mask's end;
    a row whose mask allows nothing gives -1.
    """
    given = (temperature, top_k, top_p, min_p, seeds, positions)
    assert all(each.is_contiguous() and each.shape == logits.shape[:1] for each in given)
    if masks is None:
        out: torch.Tensor = implementation(logits).sample_tokens(logits, *given, greedy=greedy)
    else:
        assert masks.words.element_size() == masks.rows.element_size() == 4 and masks.words.stride(1) == 1
        assert masks.rows.is_contiguous() and masks.rows.shape == logits.shape[:1]
        out = implementation(logits).sample_tokens(logits, *given, greedy=greedy, masks=masks)
    return out


def prepare_step(tokens: torch.Tensor, row_table: torch.Tensor, tables: StepTables, batch: Batch) -> None:
    """Fill in a batch with `row_start` and `context` from the tables: tokens, positions, page tables, slots.

    `tokens` int32 [T] are the inputs, -1 for the sequence's last sampled token; `row_table` int32 [rows] is
    each row's index into the tables, -1 for a padding row. Padding tokens are token 0 at position 0 of the
    reserved unit.
    """
    implementation(tokens).prepare_step(tokens, row_table, tables, batch)


def list_pieces(batch: Batch) -> None:
    """List the split-K pieces of a batch that has `Pieces` or a `PieceQueue`, from `row_start` and `context`.

    Attention reads the list before the preceding kernel has ended (programmatic dependent launch), so at
    least one kernel without such overlap must run in between; a model's first kernel is one.
    """
    implementation(batch.tokens).list_pieces(batch)


def change_tables(changes: torch.Tensor, table: torch.Tensor) -> None:
    """Scatter: write `changes[1]` to the flat indices `changes[0]` of a contiguous table, all int32."""
    implementation(table).change_tables(changes, table)


def note_sampled(sampled: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> None:
    """Store sampled tokens (0 for -1) at `rows` int32 of `sampled`, for rows planned before sampling."""
    implementation(sampled).note_sampled(sampled, rows, tokens)
