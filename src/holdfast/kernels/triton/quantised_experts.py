# mypy: allow-untyped-defs, allow-incomplete-defs
"""Mixture of experts with quantised weights as Triton kernels.

As `experts`: picks are sorted by expert, then two grouped products and a sum; codes become numbers in
registers, as in `quantised`. Same function as in `kernels/torch/quantised.py`. Called through
`holdfast.kernels`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from holdfast.kernels.quantised import QuantisedWeight
from holdfast.kernels.torch.activation import PLAIN_EXPERTS, ExpertForm
from holdfast.kernels.triton.experts import sort_picks, store_picks, sum_picks
from holdfast.kernels.triton.launch import ceiling, precision
from holdfast.kernels.triton.quantised import DEPTH, flags_of, scale_values, tile_values


@triton.jit(do_not_specialize=["rows_out"])
def _expert_product(
    x, permutation, codes, scales, zeros, factors, bias, shares, out, order, block_expert, x_stride, rows_out,
    depth, group, alpha, limit,
    DIVIDE: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr,
    SHARED: tl.constexpr, HAS_FACTORS: tl.constexpr, PERMUTED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, DEPTH: tl.constexpr, KIND: tl.constexpr, HALVES: tl.constexpr,
    EXPONENTS: tl.constexpr, HAS_ZEROS: tl.constexpr, SPREAD: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of picks of one expert by one block of output columns.

    A pick reads row `pick // DIVIDE` of x. The first product applies the activation to gate (row n of the
    weight) and up (row n + rows_out); the second multiplies by the pick's share.
    """
    block = tl.program_id(1)
    expert = tl.load(block_expert + block)
    if expert < 0:
        return
    picks = tl.load(order + block * BLOCK_M + tl.arange(0, BLOCK_M))
    real = picks >= 0
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < rows_out
    steps = tl.arange(0, DEPTH // HALVES)
    values = x + (tl.where(real, picks, 0) // DIVIDE).to(tl.int64)[:, None] * x_stride
    width = rows_out * 2 if GATED else rows_out
    row = expert.to(tl.int64) * width + columns
    gate_lines = codes + row[:, None] * (depth // HALVES) + steps[None, :]
    up_lines = gate_lines + rows_out.to(tl.int64) * (depth // HALVES)
    gate_line = row * (depth // group)
    up_line = gate_line + rows_out.to(tl.int64) * (depth // group)
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in tl.range(0, depth, DEPTH):
        deep = begin // HALVES + steps < depth // HALVES
        taken = inside[:, None] & deep[None, :]
        gate_codes = tl.load(gate_lines + begin // HALVES, mask=taken, other=0)
        gate_part = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up_codes = gate_codes
        up_part = gate_part
        if GATED:
            up_codes = tl.load(up_lines + begin // HALVES, mask=taken, other=0)
        for half in tl.static_range(HALVES):
            place = begin + steps * HALVES + half
            if PERMUTED:
                place = tl.load(permutation + expert * depth + place, mask=deep, other=0)
            left = tl.load(values + place[None, :], mask=real[:, None] & deep[None, :], other=0.0)
            right = tile_values(
                gate_codes, scales, zeros, gate_line, inside, begin, depth, group,
                half, KIND, HALVES, EXPONENTS, HAS_ZEROS, SPREAD, GROUP, BLOCK_N, DEPTH,
            )  # fmt: skip
            gate_part = tl.dot(left, tl.trans(right.to(left.dtype)), gate_part, input_precision=PRECISION)
            if GATED:
                right = tile_values(
                    up_codes, scales, zeros, up_line, inside, begin, depth, group,
                    half, KIND, HALVES, EXPONENTS, HAS_ZEROS, SPREAD, GROUP, BLOCK_N, DEPTH,
                )  # fmt: skip
                up_part = tl.dot(left, tl.trans(right.to(left.dtype)), up_part, input_precision=PRECISION)
        if SPREAD == "tile":
            gate_part *= scale_values(scales + gate_line + begin // group, inside, EXPONENTS)[None, :]
            if GATED:
                up_part *= scale_values(scales + up_line + begin // group, inside, EXPONENTS)[None, :]
        gate += gate_part
        up += up_part
    if HAS_FACTORS:
        gate *= tl.load(factors + row, mask=inside, other=0.0)[None, :]
        if GATED:
            up *= tl.load(factors + rows_out + row, mask=inside, other=0.0)[None, :]
    if HAS_BIAS:
        gate += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias + rows_out + row, mask=inside, other=0.0).to(tl.float32)[None, :]
    store_picks(gate, up, shares, out, picks, columns, rows_out, alpha, limit, SHARED, ACTIVATION)


def _arguments(
    weight: QuantisedWeight, bias: torch.Tensor | None, x: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The tensors of a weight; some tensor stands for those that are not read."""
    optional = (weight.zeros, weight.factors, bias)
    return weight.codes, weight.scales, *(x if tensor is None else tensor for tensor in optional)


def _compiled_for(weight: QuantisedWeight, bias: torch.Tensor | None) -> dict[str, object]:
    return {
        **flags_of(weight).named,
        "HAS_BIAS": bias is not None,
        "HAS_FACTORS": weight.factors is not None,
        "PERMUTED": weight.permutation is not None,
    }


def experts_quantised(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: QuantisedWeight,
    w2: QuantisedWeight,
    form: ExpertForm = PLAIN_EXPERTS,
) -> torch.Tensor:
    tokens, hidden = x.shape
    if not tokens:
        return torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    activation, clamp, bias13, bias2 = form
    count, inner, picks = w13.codes.shape[0], w2.inputs, ids.numel()
    weights = weights.contiguous()
    assert x.stride(1) == 1 and w13.codes.is_contiguous() and w2.codes.is_contiguous()
    block_m, order, block_expert = sort_picks(ids.contiguous(), count)
    gated = activation != "relu_squared"
    middle = torch.empty(picks, inner, dtype=x.dtype, device=x.device)
    parts = torch.empty(picks, hidden, dtype=torch.float32, device=x.device)
    block_n = 64 if x.dtype != torch.float32 else 32
    flags: dict[str, object] = {
        "BLOCK_M": block_m, "BLOCK_N": block_n, "DEPTH": DEPTH, "PRECISION": precision(x.dtype),
        "num_warps": 8 if block_m >= 128 else 4, "num_stages": 2 if x.dtype == torch.float32 else 3,
    }  # fmt: skip
    _expert_product[(ceiling(inner, block_n), block_expert.shape[0])](
        x, x if w13.permutation is None else w13.permutation, *_arguments(w13, bias13, x), weights, middle,
        order, block_expert, x.stride(0), inner, hidden, w13.group, *clamp,
        DIVIDE=ids.shape[1], GATED=gated, ACTIVATION=activation, SHARED=False,
        **_compiled_for(w13, bias13), **flags,
    )  # fmt: skip
    _expert_product[(ceiling(hidden, block_n), block_expert.shape[0])](
        middle, x if w2.permutation is None else w2.permutation, *_arguments(w2, bias2, x), weights, parts,
        order, block_expert, middle.stride(0), hidden, inner, w2.group, 0.0, 0.0,
        DIVIDE=1, GATED=False, ACTIVATION=activation, SHARED=True,
        **_compiled_for(w2, bias2), **flags,
    )  # fmt: skip
    return sum_picks(parts, ids.shape[1], x.dtype)
