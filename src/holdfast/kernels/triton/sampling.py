# mypy: allow-untyped-defs, allow-incomplete-defs
"""Sampling of one token per row as Triton kernels, without a sort.

Draw the winner of `weight / waiting time` over all tokens; if fewer than top_k tokens and less than top_p of
the probability lie above it, it is kept. Otherwise it becomes a lower bound: the draw is repeated with the
same noise among the tokens above it. This never excludes a token that may be kept, so the result is the
winner among the kept ones, exactly as in `kernels/torch/sampling.py`.

The maxima, the first draw and the weight above its winner are computed in sections of a row, so that a few
rows fill the device; further draws, which peaked rows rarely need, run in one program per row. A token that a
row's mask does not allow has a logit of -inf wherever logits are read; without masks the kernels are compiled
without these arguments. Called through `holdfast.kernels`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from holdfast.kernels.parameters import TokenMasks
from holdfast.kernels.triton.launch import ceiling, power_of_two

SECTION = 8192
NOWHERE = tl.constexpr(2147483647)  # above every token

PARAMETERS = ["temperature", "top_k", "top_p", "min_p", "seeds", "positions", "masks", "mask_rows"]
"""Arguments whose alignment within a step's words varies; Triton must not specialise on it."""

SCRATCH = ["peaks", "peak_tokens", "noisy", "values", "totals", "counts", "masses", "tokens"]
"""Parts of one allocation, whose alignment varies with the number of rows."""


@triton.jit
def _mix(value):
    """A bijective hash of 32-bit values, as in the reference."""
    value = value ^ (value >> 16)
    value = value * 0x7FEB352D
    value = value ^ (value >> 15)
    value = value * 0x846CA68B
    return value ^ (value >> 16)


@triton.jit
def _waits(stream, tokens):
    """Exponential waiting times, as in the reference: -log(1 - u), by its series where u is small."""
    bits = _mix(_mix(tokens.to(tl.uint32) + stream) ^ stream)
    uniform = ((bits >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    series = uniform * (1.0 + uniform * (0.5 + uniform * (0.33333333 + uniform * 0.25)))
    return tl.where(uniform < 0.0078125, series, -tl.log(1.0 - uniform))


@triton.jit
def _stream(seed, position):
    """The hash of (seed, position)."""
    low = (seed & 0xFFFFFFFF).to(tl.uint32)
    high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    value = _mix(_mix(low ^ 0x9E3779B9) ^ high)
    return _mix(value + position.to(tl.uint32))


@triton.jit
def _row_peak(peaks, sections, BLOCK_SECTIONS: tl.constexpr):
    """The maximum of a row, and whether the row can be sampled: no NaN, and a finite maximum."""
    parts = tl.arange(0, BLOCK_SECTIONS)
    peak = tl.load(peaks + parts, mask=parts < sections, other=float("-inf"))
    broken = peak != peak  # noqa: PLR0124 - true for NaN alone
    best = tl.max(tl.where(broken, float("-inf"), peak), axis=0)
    usable = (tl.max(broken.to(tl.int32), axis=0) == 0) & (best > float("-inf")) & (best < float("inf"))
    return best, usable


@triton.jit
def _best_part(scores, tokens, sections, BLOCK_SECTIONS: tl.constexpr):
    """The section with the greatest score (the first of equals) and its token."""
    parts = tl.arange(0, BLOCK_SECTIONS)
    score = tl.load(scores + parts, mask=parts < sections, other=float("-inf"))
    # With NaN scores no section is the greatest; any will do, since such a row is not sampled.
    first = tl.min(tl.where(score == tl.max(score, axis=0), parts, sections - 1), axis=0)
    return first, tl.load(tokens + first)


@triton.jit
def _read(logits, row, columns, stride, width, masks, mask_rows, mask_stride, mask_width):
    """Logits of a row, float32: -inf past the row's end and where its mask does not allow a token."""
    inside = columns < width
    if masks is not None:
        at = tl.load(mask_rows + row).to(tl.int64)
        reached = (columns < 32 * mask_width) & (at >= 0)
        words = tl.load(masks + at * mask_stride + columns // 32, mask=reached, other=0)
        inside = inside & ((((words >> (columns % 32)) & 1) != 0) | (at < 0))
    return tl.load(logits + row * stride + columns, mask=inside, other=float("-inf")).to(tl.float32)


@triton.jit(do_not_specialize_on_alignment=PARAMETERS + SCRATCH)
def _find_peaks(
    logits, masks, mask_rows, mask_stride, mask_width, peaks, tokens, stride, width, sections,
    SECTION: tl.constexpr,
):  # fmt: skip
    """The maximum of a section and its first token; NaN where the section has one."""
    row = tl.program_id(0).to(tl.int64)
    section = tl.program_id(1)
    columns = section * SECTION + tl.arange(0, SECTION)
    value = _read(logits, row, columns, stride, width, masks, mask_rows, mask_stride, mask_width)
    broken = value != value  # noqa: PLR0124 - true for NaN alone
    value = tl.where(broken, float("-inf"), value)
    peak = tl.max(value, axis=0)
    first = tl.min(tl.where(value == peak, columns, NOWHERE), axis=0)
    any_broken = tl.max(broken.to(tl.int32), axis=0) > 0
    tl.store(peaks + row * sections + section, tl.where(any_broken, float("nan"), peak))
    tl.store(tokens + row * sections + section, first)


@triton.jit(do_not_specialize_on_alignment=PARAMETERS + SCRATCH)
def _draw_sections(
    logits, masks, mask_rows, mask_stride, mask_width,
    temperature, min_p, seeds, positions, peaks, noisy, values, totals, tokens,
    stride, width, sections, SECTION: tl.constexpr, BLOCK_SECTIONS: tl.constexpr,
):  # fmt: skip
    """The winner of a section with its scaled logit, and the weight of the section."""
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row).to(tl.float32)
    if heat <= 0.0:
        return
    peak, _usable = _row_peak(peaks + row * sections, sections, BLOCK_SECTIONS)
    cold = tl.div_rn(1.0, heat)
    floor = peak * cold + tl.log(tl.load(min_p + row).to(tl.float32))
    stream = _stream(tl.load(seeds + row), tl.load(positions + row))
    columns = tl.program_id(1) * SECTION + tl.arange(0, SECTION)
    value = _read(logits, row, columns, stride, width, masks, mask_rows, mask_stride, mask_width) * cold
    weight = tl.exp(value - peak * cold)
    score = tl.where(value >= floor, weight / _waits(stream, columns), -1.0)
    best = tl.max(score, axis=0)
    winner = tl.min(tl.where(score == best, columns, NOWHERE), axis=0)
    at = row * sections + tl.program_id(1)
    tl.store(noisy + at, best)
    tl.store(values + at, tl.max(tl.where(columns == winner, value, float("-inf")), axis=0))
    tl.store(totals + at, tl.sum(weight, axis=0))
    tl.store(tokens + at, winner)


@triton.jit(do_not_specialize_on_alignment=PARAMETERS + SCRATCH)
def _weigh_sections(
    logits, masks, mask_rows, mask_stride, mask_width,
    temperature, top_k, top_p, peaks, noisy, values, counts, masses, tokens, stride, width, sections,
    SECTION: tl.constexpr, BLOCK_SECTIONS: tl.constexpr,
):  # fmt: skip
    """How many tokens of a section are more likely than the row's winner, and their weight."""
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row).to(tl.float32)
    limit = tl.load(top_k + row)
    if (heat <= 0.0) | (((limit <= 0) | (limit >= width)) & (tl.load(top_p + row) >= 1.0)):
        return
    cold = tl.div_rn(1.0, heat)
    peak, _usable = _row_peak(peaks + row * sections, sections, BLOCK_SECTIONS)
    part, _token = _best_part(noisy + row * sections, tokens + row * sections, sections, BLOCK_SECTIONS)
    bar = tl.load(values + row * sections + part)
    columns = tl.program_id(1) * SECTION + tl.arange(0, SECTION)
    value = _read(logits, row, columns, stride, width, masks, mask_rows, mask_stride, mask_width) * cold
    higher = value > bar
    at = row * sections + tl.program_id(1)
    tl.store(counts + at, tl.sum(higher.to(tl.float32), axis=0))
    tl.store(masses + at, tl.sum(tl.where(higher, tl.exp(value - peak * cold), 0.0), axis=0))


@triton.jit
def _draw_again(
    logits, row, stride, width, masks, mask_rows, mask_stride, mask_width,
    cold, top, bar, floor, stream, SECTION: tl.constexpr,
):  # fmt: skip
    """The winner above the bound and its scaled logit, over a whole row."""
    columns = tl.arange(0, SECTION)
    best = tl.full([SECTION], -1.0, tl.float32)
    token = tl.zeros([SECTION], tl.int32)
    chosen = tl.full([SECTION], float("-inf"), tl.float32)
    for begin in tl.range(0, width, SECTION):
        tokens = begin + columns
        value = _read(logits, row, tokens, stride, width, masks, mask_rows, mask_stride, mask_width) * cold
        score = tl.exp(value - top) / _waits(stream, tokens)
        better = (score > best) & (value > bar) & (value >= floor)
        best = tl.where(better, score, best)
        token = tl.where(better, tokens, token)
        chosen = tl.where(better, value, chosen)
    peak = tl.max(best, axis=0)
    winner = tl.min(tl.where(best == peak, token, NOWHERE), axis=0)
    return winner, tl.max(tl.where((best == peak) & (token == winner), chosen, float("-inf")), axis=0)


@triton.jit
def _weigh_again(
    logits, row, stride, width, masks, mask_rows, mask_stride, mask_width,
    cold, top, bar, SECTION: tl.constexpr,
):  # fmt: skip
    """How many tokens of a whole row are more likely than the bound, and their weight."""
    columns = tl.arange(0, SECTION)
    count = tl.zeros([SECTION], tl.float32)
    mass = tl.zeros([SECTION], tl.float32)
    for begin in tl.range(0, width, SECTION):
        tokens = begin + columns
        value = _read(logits, row, tokens, stride, width, masks, mask_rows, mask_stride, mask_width) * cold
        higher = value > bar
        count += higher.to(tl.float32)
        mass += tl.where(higher, tl.exp(value - top), 0.0)
    return tl.sum(count, axis=0), tl.sum(mass, axis=0)


@triton.jit(do_not_specialize_on_alignment=PARAMETERS + SCRATCH)
def _choose(
    logits, masks, mask_rows, mask_stride, mask_width, temperature, top_k, top_p, min_p, seeds, positions,
    peaks, peak_tokens, noisy, values, totals, counts, masses, tokens, out, stride, width, sections,
    GREEDY: tl.constexpr, SECTION: tl.constexpr, BLOCK_SECTIONS: tl.constexpr,
):  # fmt: skip
    """The token of a row."""
    row = tl.program_id(0).to(tl.int64)
    at = row * sections
    parts = tl.arange(0, BLOCK_SECTIONS)
    present = parts < sections
    peak, usable = _row_peak(peaks + at, sections, BLOCK_SECTIONS)
    _part, winner = _best_part(peaks + at, peak_tokens + at, sections, BLOCK_SECTIONS)
    if not GREEDY:
        heat = tl.load(temperature + row).to(tl.float32)
        if usable & (heat > 0.0):
            cold = tl.div_rn(1.0, heat)
            part, winner = _best_part(noisy + at, tokens + at, sections, BLOCK_SECTIONS)
            limit = tl.load(top_k + row).to(tl.int32)
            limit = tl.where((limit > 0) & (limit < width), limit, width).to(tl.float32)
            share = tl.load(top_p + row).to(tl.float32)
            rejected = (limit < width) | (share < 1.0)
            if rejected:
                top = peak * cold
                floor = top + tl.log(tl.load(min_p + row).to(tl.float32))
                stream = _stream(tl.load(seeds + row), tl.load(positions + row))
                bar = tl.load(values + at + part)
                allowed = share * tl.sum(tl.load(totals + at + parts, mask=present, other=0.0), axis=0)
                count = tl.sum(tl.load(counts + at + parts, mask=present, other=0.0), axis=0)
                mass = tl.sum(tl.load(masses + at + parts, mask=present, other=0.0), axis=0)
                # The most likely token has nothing above it: the search ends there at the latest. If logits
                # over the temperature are not finite there is no winner, which ends the search too.
                rejected = (count > 0.0) & ((count >= limit) | ((share < 1.0) & (mass >= allowed)))
                while rejected & (bar > float("-inf")):
                    winner, bar = _draw_again(
                        logits, row, stride, width, masks, mask_rows, mask_stride, mask_width,
                        cold, top, bar, floor, stream, SECTION,
                    )  # fmt: skip
                    count, mass = _weigh_again(
                        logits, row, stride, width, masks, mask_rows, mask_stride, mask_width,
                        cold, top, bar, SECTION,
                    )  # fmt: skip
                    rejected = (count > 0.0) & ((count >= limit) | ((share < 1.0) & (mass >= allowed)))
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
    masks: TokenMasks | None = None,
) -> torch.Tensor:
    rows, width = logits.shape
    assert logits.stride(1) == 1
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return out
    section = min(SECTION, power_of_two(width, 16))
    sections = ceiling(width, section)
    peaks, noisy, values, totals, counts, masses = torch.empty(
        6, rows, sections, dtype=torch.float32, device=logits.device
    )
    peak_tokens, tokens = torch.empty(2, rows, sections, dtype=torch.int32, device=logits.device)
    sizes = (logits.stride(0), width, sections)
    # None is a constant to Triton: without masks the kernels have no such arguments.
    constraint: tuple[torch.Tensor | int | None, ...] = (None,) * 4
    if masks is not None:
        words = masks.words
        constraint = (words, masks.rows, words.stride(0), words.shape[1])
    blocks: dict[str, int] = {"SECTION": section, "BLOCK_SECTIONS": power_of_two(sections)}
    warps = 8 if section >= 4096 else 4
    _find_peaks[(rows, sections)](
        logits, *constraint, peaks, peak_tokens, *sizes, SECTION=section, num_warps=warps
    )
    if not greedy:
        _draw_sections[(rows, sections)](
            logits, *constraint, temperature, min_p, seeds, positions, peaks, noisy, values, totals, tokens,
            *sizes, **blocks, num_warps=warps,
        )  # fmt: skip
        _weigh_sections[(rows, sections)](
            logits, *constraint, temperature, top_k, top_p, peaks, noisy, values, counts, masses, tokens,
            *sizes, **blocks, num_warps=warps,
        )  # fmt: skip
    _choose[(rows,)](
        logits, *constraint, temperature, top_k, top_p, min_p, seeds, positions,
        peaks, peak_tokens, noisy, values, totals, counts, masses, tokens, out, *sizes,
        GREEDY=greedy, **(blocks | {"SECTION": min(4096, section)}), num_warps=16 if section >= 4096 else 4,
    )  # fmt: skip
    return out
