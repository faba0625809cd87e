# mypy: allow-untyped-defs, allow-incomplete-defs
"""Linear projections of few tokens as Triton kernels, bound by reading the weights.

On Hopper the CUDA kernels come first: for packed 12-bit weights (`kernels/cuda/twelve.py`), then for bfloat16
(`kernels/cuda/products.py`). Otherwise, for one token, a program walks along some rows of the weight, which
reaches more of the memory bandwidth than cuBLAS. For a few tokens, one program multiplies by both halves of a
gated up-projection, so that the activation is fused as an epilogue. All else goes to cuBLAS. Weights do not
depend on the preceding kernel, so their first block is prefetched while that runs. Same functions and results
as `kernels/torch/linear.py`. Called through `holdfast.kernels`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from holdfast.kernels.cuda.products import product
from holdfast.kernels.cuda.twelve import TwelveBits
from holdfast.kernels.cuda.twelve import product as product_of_twelve
from holdfast.kernels.torch.activation import DEFAULT_CLAMP, Activation
from holdfast.kernels.triton.activation import activate, activation_value
from holdfast.kernels.triton.launch import ceiling, launch_next, overlap, power_of_two, wait_for_inputs

ROWS_MOST = 65_536  # outputs from which cuBLAS is faster
FEW_TOKENS = 16  # most tokens of the few-token kernel


class Blocks(NamedTuple):
    """Weight rows and elements along them per iteration of a program, warps, pipeline stages."""

    rows: int
    depth: int
    warps: int
    stages: int


# As measured on an H200.
NARROW = Blocks(8, 512, 4, 3)
WIDE = Blocks(4, 1024, 4, 5)
WIDE_FROM = 16_384
GATED_ONE = Blocks(4, 1024, 8, 4)
GATED_FEW = Blocks(32, 128, 4, 4)


@triton.jit(do_not_specialize=["rows_out"])
def _vector_product(
    x, weight, bias, out, rows_out, depth, weight_row, alpha, limit,
    GATED: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Some outputs of one token; gated: of the activation of both halves."""
    launch_next(OVERLAP)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows_out
    steps = tl.arange(0, DEPTH)
    lines = weight + row.to(tl.int64)[:, None] * weight_row + steps[None, :]
    up_lines = lines + rows_out.to(tl.int64) * weight_row
    total = tl.zeros([ROWS, DEPTH], tl.float32)
    up_total = tl.zeros([ROWS, DEPTH], tl.float32)
    taken = inside[:, None]
    deep = steps < depth
    if not EVEN:
        taken = taken & deep[None, :]
    part = tl.load(lines, mask=taken, other=0.0)
    up_part = part
    if GATED:
        up_part = tl.load(up_lines, mask=taken, other=0.0)
    wait_for_inputs(OVERLAP)
    value = tl.load(x + steps, mask=deep, other=0.0).to(tl.float32)[None, :]
    total += part.to(tl.float32) * value
    if GATED:
        up_total += up_part.to(tl.float32) * value
    for begin in tl.range(DEPTH, depth, DEPTH, num_stages=STAGES):
        if EVEN:
            value = tl.load(x + begin + steps).to(tl.float32)[None, :]
        else:
            deep = begin + steps < depth
            taken = inside[:, None] & deep[None, :]
            value = tl.load(x + begin + steps, mask=deep, other=0.0).to(tl.float32)[None, :]
        total += tl.load(lines + begin, mask=taken, other=0.0).to(tl.float32) * value
        if GATED:
            up_total += tl.load(up_lines + begin, mask=taken, other=0.0).to(tl.float32) * value
    result = tl.sum(total, axis=1)
    if HAS_BIAS:
        result += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION != "":
        up = result
        if GATED:
            up = tl.sum(up_total, axis=1)
            if HAS_BIAS:
                up += tl.load(bias + rows_out + row, mask=inside, other=0.0).to(tl.float32)
        # The halves are rounded as if they had been stored.
        gate = result.to(out.dtype.element_ty).to(tl.float32)
        result = activation_value(gate, up.to(out.dtype.element_ty).to(tl.float32), alpha, limit, ACTIVATION)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows_out"])
def _gated_product(
    x, weight, bias, out, tokens, rows_out, depth, x_stride, weight_row, alpha, limit,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Some outputs of the activation of both halves, for a few tokens."""
    launch_next(OVERLAP)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.arange(0, TOKENS)
    steps = tl.arange(0, DEPTH)
    inside = row < rows_out
    real = token < tokens
    lines = weight + row.to(tl.int64)[None, :] * weight_row + steps[:, None]
    up_lines = lines + rows_out.to(tl.int64) * weight_row
    values = x + token[:, None] * x_stride + steps[None, :]
    gate = tl.zeros([TOKENS, ROWS], tl.float32)
    up = tl.zeros([TOKENS, ROWS], tl.float32)
    wait_for_inputs(OVERLAP)
    for begin in tl.range(0, depth, DEPTH, num_stages=STAGES):
        deep = begin + steps < depth
        left = tl.load(values + begin, mask=real[:, None] & deep[None, :], other=0.0)
        taken = deep[:, None] & inside[None, :]
        gate = tl.dot(left, tl.load(lines + begin, mask=taken, other=0.0), gate)
        up = tl.dot(left, tl.load(up_lines + begin, mask=taken, other=0.0), up)
    element = out.dtype.element_ty
    if HAS_BIAS:
        gate += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias + rows_out + row, mask=inside, other=0.0).to(tl.float32)[None, :]
    gate = gate.to(element).to(tl.float32)
    result = activation_value(gate, up.to(element).to(tl.float32), alpha, limit, ACTIVATION)
    places = out + token[:, None] * rows_out + row[None, :]
    tl.store(places, result.to(element), mask=real[:, None] & inside[None, :])


def _fits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernels here support these tensors."""
    return (
        x.dim() == 2
        and x.dtype == weight.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.stride(1) == 1
        and weight.stride(1) == 1
    )


def _one(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    gated = activation is not None and activation != "relu_squared"
    rows_out = weight.shape[0] // 2 if gated else weight.shape[0]
    depth = weight.shape[1]
    blocks = GATED_ONE if gated else WIDE if rows_out >= WIDE_FROM else NARROW
    if out is None:
        out = torch.empty(1, rows_out, dtype=x.dtype, device=x.device)
    _vector_product[(ceiling(rows_out, blocks.rows),)](
        x, weight, x if bias is None else bias, out, rows_out, depth, weight.stride(0),
        *DEFAULT_CLAMP, GATED=gated, ACTIVATION=activation or "", HAS_BIAS=bias is not None,
        EVEN=depth % blocks.depth == 0, ROWS=blocks.rows, DEPTH=blocks.depth, STAGES=blocks.stages,
        num_warps=blocks.warps, **overlap(x),
    )  # fmt: skip
    return out


def _few(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation
) -> torch.Tensor:
    tokens, rows_out = x.shape[0], weight.shape[0] // 2
    blocks = GATED_FEW
    out = torch.empty(tokens, rows_out, dtype=x.dtype, device=x.device)
    _gated_product[(ceiling(rows_out, blocks.rows),)](
        x, weight, x if bias is None else bias, out, tokens, rows_out, weight.shape[1], x.stride(0),
        weight.stride(0), *DEFAULT_CLAMP, ACTIVATION=activation,
        HAS_BIAS=bias is not None, TOKENS=power_of_two(tokens, 16), ROWS=blocks.rows, DEPTH=blocks.depth,
        STAGES=blocks.stages, num_warps=blocks.warps, **overlap(x),
    )  # fmt: skip
    return out


def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation | None,
    twelve: TwelveBits | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """The product and its activation by one of our kernels; None where cuBLAS is faster."""
    tokens = x.shape[0]
    made = None if twelve is None else product_of_twelve(x, twelve, bias, activation, out)
    if made is None:
        made = product(x, weight, bias, activation, out)
    if made is not None:
        return made
    if not 0 < tokens <= FEW_TOKENS or weight.shape[0] >= ROWS_MOST or not _fits(x, weight):
        return None
    if tokens == 1:
        return _one(x, weight, bias, activation, out)
    # Without an epilogue to fuse cuBLAS is faster.
    return None if activation in (None, "relu_squared") else _few(x, weight, bias, activation)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    twelve: TwelveBits | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    made = _product(x, weight, bias, None, twelve, out)
    if made is not None:
        return made
    if out is None:
        return torch.nn.functional.linear(x, weight, bias)
    # What `linear` calls, with an output of our own.
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


def linear_gated(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation,
    twelve: TwelveBits | None = None,
) -> torch.Tensor:
    out = _product(x, weight, bias, activation, twelve)
    return activate(torch.nn.functional.linear(x, weight, bias), activation) if out is None else out
