# mypy: allow-untyped-defs, allow-incomplete-defs
"""Sampling of one token a row as a Triton kernel, without a sort.

One program a row. It draws the winner of `logit / temperature + noise` over all tokens above a bar; if fewer
than top_k tokens and less than top_p of the probability lie above the winner it is kept, otherwise it becomes
the bar and the draw is repeated with the same noise. What is left out this way is never a token that may be
kept, so the result is the winner among the kept ones, exactly as in `kernels/torch/sampling.py`. Mostly one
or two rounds are needed. Called through `holdfast.kernels`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from holdfast.kernels.triton.launch import power_of_two

BLOCK = 4096


@triton.jit
def _mix(value):
    """A bijection of 32-bit values, as in the reference."""
    value = value ^ (value >> 16)
    value = value * 0x7FEB352D
    value = value ^ (value >> 15)
    value = value * 0x846CA68B
    return value ^ (value >> 16)


@triton.jit
def _gumbel(stream, tokens):
    bits = _mix(_mix(tokens.to(tl.uint32) + stream) ^ stream)
    uniform = ((bits >> 8).to(tl.float32) + 0.5) * 5.9604644775390625e-08
    return -tl.log(-tl.log(uniform))


@triton.jit
def _stream(seed, position):
    """What distinguishes this (seed, position) from all others."""
    low = (seed & 0xFFFFFFFF).to(tl.uint32)
    high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    value = _mix(_mix(low ^ 0x9E3779B9) ^ high)
    return _mix(value + (position & 0xFFFFFFFF).to(tl.uint32))


@triton.jit
def _peak(logits, width, BLOCK: tl.constexpr):
    """The greatest logit, the first token that has it, and whether any logit is not a number."""
    columns = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    token = tl.zeros([BLOCK], tl.int32)
    broken = tl.zeros([BLOCK], tl.int32)
    for begin in tl.range(0, width, BLOCK):
        value = tl.load(logits + begin + columns, mask=begin + columns < width, other=float("-inf"))
        value = value.to(tl.float32)
        broken = broken | (value != value).to(tl.int32)  # noqa: PLR0124 - true for NaN alone
        better = value > best
        best = tl.where(better, value, best)
        token = tl.where(better, begin + columns, token)
    peak = tl.max(best, axis=0)
    first = tl.min(tl.where(best == peak, token, 2147483647), axis=0)
    return peak, first, tl.max(broken, axis=0)


@triton.jit
def _draw(logits, width, cold, bar, floor, stream, BLOCK: tl.constexpr):
    """The winner above the bar and its scaled logit."""
    columns = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    token = tl.zeros([BLOCK], tl.int32)
    chosen = tl.full([BLOCK], float("-inf"), tl.float32)
    for begin in tl.range(0, width, BLOCK):
        tokens = begin + columns
        value = tl.load(logits + tokens, mask=tokens < width, other=float("-inf")).to(tl.float32) / cold
        noisy = value + _gumbel(stream, tokens)
        better = (noisy > best) & (value > bar) & (value >= floor)
        best = tl.where(better, noisy, best)
        token = tl.where(better, tokens, token)
        chosen = tl.where(better, value, chosen)
    peak = tl.max(best, axis=0)
    winner = tl.min(tl.where(best == peak, token, 2147483647), axis=0)
    return winner, tl.max(tl.where((best == peak) & (token == winner), chosen, float("-inf")), axis=0)


@triton.jit
def _above(logits, width, cold, peak, value, BLOCK: tl.constexpr):
    """How many tokens are more likely than `value`, their weight, and the weight of all."""
    columns = tl.arange(0, BLOCK)
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for begin in tl.range(0, width, BLOCK):
        tokens = begin + columns
        other = tl.load(logits + tokens, mask=tokens < width, other=float("-inf")).to(tl.float32) / cold
        weight = tl.exp(other - peak)
        higher = other > value
        count += higher.to(tl.int32)
        mass += tl.where(higher, weight, 0.0)
        total += weight
    return tl.sum(count, axis=0), tl.sum(mass, axis=0), tl.sum(total, axis=0)


@triton.jit
def _sample(
    logits, temperature, top_k, top_p, min_p, seeds, positions, out, stride, width,
    GREEDY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    peak, winner, broken = _peak(logits, width, BLOCK)
    usable = (broken == 0) & (peak > float("-inf")) & (peak < float("inf"))
    if not GREEDY:
        heat = tl.load(temperature + row).to(tl.float32)
        if usable & (heat > 0.0):
            stream = _stream(tl.load(seeds + row), tl.load(positions + row))
            limit = tl.load(top_k + row).to(tl.int32)
            limit = tl.where(limit > 0, limit, 2147483647)
            share = tl.load(top_p + row).to(tl.float32)
            top = peak / heat
            floor = top + tl.log(tl.load(min_p + row).to(tl.float32))
            # The bar stays below the peak, so the most likely token is always drawn in the end.
            winner, bar = _draw(logits, width, heat, float("-inf"), floor, stream, BLOCK)
            rejected = (limit < width) | (share < 1.0)
            while rejected:
                count, mass, total = _above(logits, width, heat, top, bar, BLOCK)
                rejected = (count > 0) & ((count >= limit) | ((share < 1.0) & (mass >= share * total)))
                if rejected:
                    winner, bar = _draw(logits, width, heat, bar, floor, stream, BLOCK)
    tl.store(out + row, tl.where(usable, winner, -1).to(tl.int64))


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
) -> torch.Tensor:
    rows, width = logits.shape
    assert logits.stride(1) == 1
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        block = min(BLOCK, power_of_two(width, 16))
        _sample[(rows,)](
            logits, temperature, top_k, top_p, min_p, seeds, positions, out, logits.stride(0), width,
            GREEDY=greedy, BLOCK=block, num_warps=16 if block >= 4096 else 4,
        )  # fmt: skip
    return out
