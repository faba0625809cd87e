"""Products with packed weights of 4 and 8 bits: by the CUDA kernel, or dequantised for many tokens.

A few tokens, or picks of an expert, take the kernel of `kernels/cuda/codes.py`. For many the weight becomes
bfloat16, some rows or experts at a time, and is multiplied by cuBLAS or by the grouped products of `experts`.
Called through `holdfast.kernels`.
"""

from __future__ import annotations

import torch

from holdfast.kernels.cuda.codes import (
    COLUMNS,
    EXPANDED_AT_ONCE,
    FEW_TOKENS,
    SortedPicks,
    expanded,
    expanded_experts,
    expert_product,
    product,
)
from holdfast.kernels.cuda.packing import SIDE, PackedCodes
from holdfast.kernels.torch.activation import DEFAULT_CLAMP, PLAIN_EXPERTS, Activation, ExpertForm
from holdfast.kernels.triton.activation import geglu, relu_squared, swiglu
from holdfast.kernels.triton.experts import Picks, add_experts, sort_picks, sum_picks
from holdfast.kernels.triton.launch import ceiling, power_of_two

_ACTIVATIONS = {"swiglu": swiglu, "geglu": geglu, "relu_squared": relu_squared}


def linear_codes(
    x: torch.Tensor, weight: PackedCodes, bias: torch.Tensor | None, activation: Activation | None
) -> torch.Tensor:
    if x.shape[0] <= FEW_TOKENS:
        return product(x, weight, bias, activation)
    if weight.permutation is not None:
        x = x[:, weight.permutation[0]]
    of_tile = SIDE // 2 if weight.gated else SIDE
    step = max(1, EXPANDED_AT_ONCE // (SIDE * weight.depth))
    parts = []
    for first in range(0, ceiling(weight.outputs, of_tile), step):
        begin, end = first * of_tile, min((first + step) * of_tile, weight.outputs)
        dense = expanded(weight, first, ceiling(end - begin, of_tile))
        part = torch.nn.functional.linear(x, dense, _part(bias, begin, end, weight))
        parts.append(part if activation is None else _ACTIVATIONS[activation](part))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _part(bias: torch.Tensor | None, begin: int, end: int, weight: PackedCodes) -> torch.Tensor | None:
    """The bias of some outputs; with a gate of both halves."""
    if bias is None or (begin == 0 and end == weight.outputs):
        return bias
    if not weight.gated:
        return bias[begin:end]
    return torch.cat((bias[begin:end], bias[weight.outputs + begin : weight.outputs + end]))


def experts_codes(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: PackedCodes,
    w2: PackedCodes,
    form: ExpertForm = PLAIN_EXPERTS,
) -> torch.Tensor:
    assert w13.experts is not None
    assert form.activation != "swiglu_clamped" or form.clamp == DEFAULT_CLAMP, "the kernel's own"
    tokens, hidden, of_token = *x.shape, ids.shape[1]
    if not tokens:
        return torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    # Blocks twice as tall as an expert's average share, so that few experts need two.
    tall = power_of_two(ceiling(2 * ids.numel(), w13.experts), COLUMNS[0])
    block, order, block_expert = sort_picks(ids.contiguous(), w13.experts, min(tall, 128))
    shares = weights.contiguous()
    middle = torch.empty(ids.numel(), w2.depth, dtype=x.dtype, device=x.device)
    parts = torch.empty(ids.numel(), w2.outputs, dtype=torch.float32, device=x.device)
    if block <= FEW_TOKENS:
        given = SortedPicks(order, block_expert, shares, of_token)
        expert_product(x, w13, form.bias13, form.activation, middle, given)
        expert_product(middle, w2, form.bias2, None, parts, given._replace(divide=1))
        return sum_picks(parts, of_token, x.dtype)
    picks = Picks(block, order, block_expert, of_token, shares)
    step = max(1, EXPANDED_AT_ONCE // (w13.rows * w13.depth))
    for first in range(0, w13.experts, step):
        some = range(first, min(first + step, w13.experts))
        dense = (expanded_experts(w13, some), expanded_experts(w2, some))
        add_experts(x, picks, *dense, form, middle, parts, first)
    return sum_picks(parts, of_token, x.dtype)
