# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="possibly-undefined"
"""One block of keys and values folded into a running softmax: the inner loop of all attention kernels.

Only `attention` and `pieces` of this package use it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from holdfast.kernels.triton.scaled import decode, factor_of


@triton.jit
def attend_block(
    accumulator, weight_sum, peak, query, query_factor, key, value, key_scales, value_scales, table,
    key_unit, key_token, value_unit, value_token, scale_unit,
    begin, lowest, end, places, scale, softcap, window,
    PAGE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, WHOLE: tl.constexpr, EIGHT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold one block of keys and values into the running softmax.

    EIGHT: keys and values are codes with scales, and `query_factor` belongs to the rows of `query`.
    """
    steps = begin + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_D)
    inside = (steps >= lowest) & (steps < end)
    if WHOLE:
        page = tl.load(table + begin // PAGE).to(tl.int64)
        offset = (begin % PAGE + tl.arange(0, BLOCK_N)).to(tl.int64)
        key_rows = key + page * key_unit + offset * key_token
        value_rows = value + page * value_unit + offset * value_token
        scale_at = page * scale_unit + offset
    else:
        if MASKED:
            units = tl.load(table + steps // PAGE, mask=inside, other=0).to(tl.int64)
        else:
            units = tl.load(table + steps // PAGE).to(tl.int64)
        offset = (steps % PAGE).to(tl.int64)
        key_rows = key + units * key_unit + offset * key_token
        value_rows = value + units * value_unit + offset * value_token
        scale_at = units * scale_unit + offset
    if EIGHT:
        if MASKED:
            key_factor = factor_of(tl.load(key_scales + scale_at, mask=inside, other=0))
            value_factor = factor_of(tl.load(value_scales + scale_at, mask=inside, other=0))
        else:
            key_factor = factor_of(tl.load(key_scales + scale_at))
            value_factor = factor_of(tl.load(value_scales + scale_at))
    if MASKED or DIM != BLOCK_D:
        loaded = inside[:, None] & (columns < DIM)[None, :]
        keys = tl.load(key_rows[:, None] + columns[None, :], mask=loaded, other=0)
    else:
        keys = tl.load(key_rows[:, None] + columns[None, :])
    if EIGHT:
        keys = decode(keys, query.dtype)
    scores = tl.dot(query, tl.trans(keys.to(query.dtype)), input_precision=PRECISION)
    if EIGHT:
        scores = scores * query_factor[:, None] * key_factor[None, :]
    # Scores times `unit` are in log2 units; the multiplication is folded into the exponent for free.
    unit = scale * 1.4426950408889634
    if CAPPED:
        # softcap * tanh(s / softcap)
        scores = 2.0 * tl.sigmoid(2.0 * scores * scale / softcap) - 1.0
        unit = softcap * 1.4426950408889634
    if MASKED:
        seen = inside[None, :] & (steps[None, :] <= places[:, None])
        if WINDOWED:
            seen = seen & (steps[None, :] > places[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, axis=1) * unit)
    # A query may have seen nothing yet; any finite maximum will do for it.
    anchor = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
    weights = tl.exp2(scores * unit - anchor[:, None])
    shrink = tl.exp2(peak - anchor)
    weight_sum = weight_sum * shrink + tl.sum(weights, axis=1)
    if MASKED or DIM != BLOCK_D:
        values = tl.load(value_rows[:, None] + columns[None, :], mask=loaded, other=0)
    else:
        values = tl.load(value_rows[:, None] + columns[None, :])
    if EIGHT:
        values = decode(values, query.dtype) * value_factor.to(query.dtype)[:, None]
    accumulator = accumulator * shrink[:, None]
    accumulator = tl.dot(
        weights.to(query.dtype), values.to(query.dtype), accumulator, input_precision=PRECISION
    )
    return accumulator, weight_sum, higher
