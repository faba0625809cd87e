# mypy: allow-untyped-defs, allow-incomplete-defs
"""The choice of experts as Triton kernels: parts of the logits, then their sum, the choice and the shares.

A few tokens take one product of parts of the depth, so that many programs read the weight; many tokens take
the library's product. Groups of experts are chosen by torch. Same function and results as
`kernels/torch/router.py`. Called through `holdfast.kernels`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional

from holdfast.kernels.parameters import RouterForm
from holdfast.kernels.torch.router import choose
from holdfast.kernels.triton.launch import (
    ceiling,
    launch_next,
    overlap,
    power_of_two,
    precision,
    wait_for_inputs,
)

FEW_TOKENS = 64
TOKENS, EXPERTS, DEPTH = 16, 16, 256  # of a program of the logits


@triton.jit(do_not_specialize=["tokens"])
def _add_logits(
    x, weight, parts, tokens, experts, width, x_stride,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """A part of the depth of the logits of some tokens and experts."""
    launch_next(OVERLAP)
    part = tl.program_id(2)
    columns = part * DEPTH + tl.arange(0, DEPTH)
    deep = columns < width
    names = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    taken = (names < experts)[:, None] & deep[None, :]
    right = tl.load(weight + names[:, None].to(tl.int64) * width + columns[None, :], mask=taken, other=0.0)
    rows = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    taken = (rows < tokens)[:, None] & deep[None, :]
    wait_for_inputs(OVERLAP)
    left = tl.load(x + rows[:, None].to(tl.int64) * x_stride + columns[None, :], mask=taken, other=0.0)
    sums = tl.dot(left.to(right.dtype), tl.trans(right), input_precision=PRECISION)
    places = parts + (part * tokens + rows)[:, None] * experts + names[None, :]
    tl.store(places, sums, mask=(rows < tokens)[:, None] & (names < experts)[None, :])


@triton.jit
def _ordered(scores, inside):
    """Integers in the order of the scores; those outside come last, not-a-number as torch orders it."""
    bits = scores.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(scores == scores, bits, 0x7FFFFFFF)  # noqa: PLR0124
    return tl.where(inside, bits, -0x80000000).to(tl.int64)


@triton.jit(do_not_specialize=["tokens"])
def _choose(
    parts, bias, ids, shares, tokens, experts, scale,
    PARTS: tl.constexpr, KIND: tl.constexpr, PICKS: tl.constexpr, NORMALISE: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK_PARTS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_PICKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """The picks and shares of one token from the parts of its logits."""
    launch_next(OVERLAP)
    token = tl.program_id(0)
    names = tl.arange(0, BLOCK)
    inside = names < experts
    steps = tl.arange(0, BLOCK_PARTS)
    taken = (steps < PARTS)[:, None] & inside[None, :]
    wait_for_inputs(OVERLAP)
    places = parts + (steps * tokens + token)[:, None].to(tl.int64) * experts + names[None, :]
    worth = tl.sum(tl.load(places, mask=taken, other=0.0), axis=0)
    choice = worth
    if KIND == "sigmoid_in_groups":
        worth = 1.0 / (1.0 + tl.exp(-worth))
        choice = worth
    if HAS_BIAS:
        choice += tl.load(bias + names, mask=inside, other=0.0)
    if KIND == "top_then_softmax":
        worth = choice
    # The order and the name of an expert in one number, so that one maximum finds both; of equals the first.
    keys = _ordered(choice, inside) * BLOCK + (BLOCK - 1 - names)
    slots = tl.arange(0, BLOCK_PICKS)
    chosen = tl.zeros([BLOCK_PICKS], tl.int32)
    kept = tl.zeros([BLOCK_PICKS], tl.float32)
    for pick in tl.static_range(PICKS):
        name = (BLOCK - 1 - (tl.max(keys, axis=0) & (BLOCK - 1))).to(tl.int32)
        mine = names == name
        chosen = tl.where(slots == pick, name, chosen)
        kept = tl.where(slots == pick, tl.sum(tl.where(mine, worth, 0.0), axis=0), kept)
        keys = tl.where(mine, -0x80000000 * BLOCK, keys)
    real = slots < PICKS
    if KIND == "softmax_then_top":
        most = tl.max(tl.where(inside, worth, float("-inf")), axis=0)
        total = tl.sum(tl.where(inside, tl.exp(worth - most), 0.0), axis=0)
        kept = tl.where(real, tl.exp(kept - most) / total, 0.0)
    elif KIND == "top_then_softmax":
        kept = tl.where(real, tl.exp(kept - tl.max(tl.where(real, kept, float("-inf")), axis=0)), 0.0)
        kept = kept / tl.sum(kept, axis=0)
    if NORMALISE:
        kept = kept / (tl.sum(tl.where(real, kept, 0.0), axis=0) + 1e-20)
    tl.store(ids + token * PICKS + slots, chosen.to(tl.int64), mask=real)
    tl.store(shares + token * PICKS + slots, kept * scale, mask=real)


def route(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, form: RouterForm
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, experts = x.shape[0], weight.shape[0]
    if form.groups > 1 or not tokens:
        return choose(_logits(x, weight), bias, form)
    if tokens <= FEW_TOKENS and x.stride(1) == 1:
        parts = _parts_of_logits(x, weight)
    else:
        parts = _logits(x, weight)[None]
    ids = torch.empty(tokens, form.picks, dtype=torch.int64, device=x.device)
    shares = torch.empty(tokens, form.picks, dtype=torch.float32, device=x.device)
    has_bias = bias is not None and form.kind != "softmax_then_top"
    _choose[(tokens,)](
        parts, bias if has_bias else parts, ids, shares, tokens, experts, form.scale, PARTS=parts.shape[0],
        KIND=form.kind, PICKS=form.picks, NORMALISE=form.normalise and form.kind != "top_then_softmax",
        HAS_BIAS=has_bias, BLOCK_PARTS=power_of_two(parts.shape[0]), BLOCK=power_of_two(experts),
        BLOCK_PICKS=power_of_two(form.picks), num_warps=1 if experts <= 128 else 4, **overlap(x),
    )  # fmt: skip
    return ids, shares


def _parts_of_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[parts of the depth, tokens, experts], to be added up."""
    (tokens, width), experts = x.shape, weight.shape[0]
    grid = (ceiling(tokens, TOKENS), ceiling(experts, EXPERTS), ceiling(width, DEPTH))
    parts = torch.empty(grid[2], tokens, experts, dtype=torch.float32, device=x.device)
    _add_logits[grid](
        x, weight, parts, tokens, experts, width, x.stride(0), TOKENS=TOKENS, EXPERTS=EXPERTS, DEPTH=DEPTH,
        PRECISION=precision(weight.dtype), num_warps=4, **overlap(x),
    )  # fmt: skip
    return parts


def _logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The library's product, added up in float32."""
    if x.is_cuda and x.dtype == weight.dtype != torch.float32:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return functional.linear(x.float(), weight.float())
