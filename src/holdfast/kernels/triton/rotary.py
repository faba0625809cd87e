# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="possibly-undefined"
"""Query/key norms, rotary embedding and the KV write in one launch.

A program takes one token and a block of heads. A head has three parts: the two halves that are rotated
against each other, and the rest, which passes through. Heads that go into an eight-bit cache get their scale
here. Same functions and results as `kernels/torch/rotary.py`. Called through `holdfast.kernels`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from holdfast.kernels.parameters import Rotation
from holdfast.kernels.scaled import KvCache, stored
from holdfast.kernels.triton.launch import ceiling, launch_next, overlap, power_of_two, wait_for_inputs
from holdfast.kernels.triton.scaled import encode, launched, scale_of


@triton.jit
def _head_offsets(source, heads, stride, begin, width, columns, head_inside):
    """Load `[heads, columns]` of a part of each head, zero outside."""
    inside = head_inside[:, None] & (columns < width)[None, :]
    offsets = heads[:, None] * stride + (begin + columns)[None, :]
    return tl.load(source + offsets, mask=inside, other=0.0), inside


@triton.jit
def _turn_heads(
    source,
    source_stride,
    target,
    target_stride,
    norm,
    cos_sin,
    heads,
    head_inside,
    eps,
    offset,
    scales,
    scale_stride,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    EIGHT: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Norm and rotate a block of heads of one token from `source` to `target`.

    EIGHT: as codes, with the scale of each head in `scales`.
    """
    turning = tl.arange(0, BLOCK_HALF)
    resting = tl.arange(0, BLOCK_REST)
    square = tl.zeros([heads.shape[0]], tl.float32)
    if HALF > 0:
        first, half_inside = _head_offsets(source, heads, source_stride, 0, HALF, turning, head_inside)
        second, half_inside = _head_offsets(source, heads, source_stride, HALF, HALF, turning, head_inside)
        first = first.to(tl.float32)
        second = second.to(tl.float32)
        square += tl.sum(first * first + second * second, axis=1)
    if DIM > 2 * HALF:
        rest, rest_inside = _head_offsets(
            source, heads, source_stride, 2 * HALF, DIM - 2 * HALF, resting, head_inside
        )
        rest = rest.to(tl.float32)
        square += tl.sum(rest * rest, axis=1)
    scale = tl.rsqrt(square / DIM + eps)[:, None]
    places = target + heads[:, None] * target_stride
    element = target.dtype.element_ty
    peak = tl.zeros([heads.shape[0]], tl.float32)
    if HALF > 0:
        in_half = turning < HALF
        if HAS_NORM:
            gain = tl.load(norm + turning, mask=in_half, other=0.0).to(tl.float32) + offset
            first = first * scale * gain[None, :]
            gain = tl.load(norm + HALF + turning, mask=in_half, other=0.0).to(tl.float32) + offset
            second = second * scale * gain[None, :]
        cos = tl.load(cos_sin + turning, mask=in_half, other=0.0).to(tl.float32)[None, :]
        sin = tl.load(cos_sin + HALF + turning, mask=in_half, other=0.0).to(tl.float32)[None, :]
        turned = first * cos - second * sin
        second = second * cos + first * sin
        first = turned
        if EIGHT:
            peak = tl.maximum(tl.max(tl.abs(first), axis=1), tl.max(tl.abs(second), axis=1))
    if DIM > 2 * HALF:
        if HAS_NORM:
            in_rest = resting < DIM - 2 * HALF
            gain = tl.load(norm + 2 * HALF + resting, mask=in_rest, other=0.0).to(tl.float32) + offset
            rest = rest * scale * gain[None, :]
        if EIGHT:
            peak = tl.maximum(peak, tl.max(tl.abs(rest), axis=1))
    if EIGHT:
        exponent = scale_of(peak)
        tl.store(scales + heads * scale_stride, exponent.to(tl.uint8), mask=head_inside)
        if HALF > 0:
            first = encode(first, exponent)
            second = encode(second, exponent)
        if DIM > 2 * HALF:
            rest = encode(rest, exponent)
    if HALF > 0:
        tl.store(places + turning[None, :], first.to(element), mask=half_inside)
        tl.store(places + (HALF + turning)[None, :], second.to(element), mask=half_inside)
    if DIM > 2 * HALF:
        tl.store(places + (2 * HALF + resting)[None, :], rest.to(element), mask=rest_inside)


@triton.jit
def _rotate_and_write(
    query,
    key,
    value,
    out,
    key_cache,
    value_cache,
    key_scales,
    value_scales,
    slots,
    positions,
    cos_sin,
    query_norm,
    key_norm,
    query_token,
    query_head,
    key_token,
    key_head,
    value_token,
    value_head,
    cache_unit,
    cache_token,
    cache_head,
    value_cache_unit,
    value_cache_token,
    value_cache_head,
    scale_unit,
    scale_head,
    cos_sin_stride,
    eps,
    offset,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HALF: tl.constexpr,
    QUERY_NORM: tl.constexpr,
    KEY_NORM: tl.constexpr,
    EIGHT: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    launch_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    query_blocks: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    angles = cos_sin
    if HALF > 0:
        angles = cos_sin + tl.load(positions + token) * cos_sin_stride
    if block < query_blocks:
        heads = block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        _turn_heads(
            query + token * query_token, query_head, out + token * HEADS * DIM, DIM, query_norm, angles,
            heads, heads < HEADS, eps, offset, out, 0, DIM, HALF, QUERY_NORM, False, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    else:
        heads = (block - query_blocks) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        slot = tl.load(slots + token)
        unit = slot // PAGE
        place = slot % PAGE
        scale_at = unit * scale_unit + place
        if DIM > 0:
            _turn_heads(
                key + token * key_token, key_head, key_cache + unit * cache_unit + place * cache_token,
                cache_head, key_norm, angles, heads, heads < KV_HEADS, eps, offset, key_scales + scale_at,
                scale_head, DIM, HALF, KEY_NORM, EIGHT, BLOCK_HALF, BLOCK_REST,
            )  # fmt: skip
        columns = tl.arange(0, BLOCK_VALUE)
        moved, inside = _head_offsets(
            value + token * value_token, heads, value_head, 0, VALUE_DIM, columns, heads < KV_HEADS
        )
        if EIGHT:
            moved = moved.to(tl.float32)
            exponent = scale_of(tl.max(tl.abs(moved), axis=1))
            scales = value_scales + scale_at + heads * scale_head
            tl.store(scales, exponent.to(tl.uint8), mask=heads < KV_HEADS)
            moved = encode(moved, exponent)
        places = value_cache + unit * value_cache_unit + place * value_cache_token
        tl.store(
            places + heads[:, None] * value_cache_head + columns[None, :],
            moved.to(value_cache.dtype.element_ty),
            mask=inside,
        )


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
    tokens, heads, dim = query.shape
    kv_heads, value_dim = value.shape[1], value.shape[2]
    for tensor in (query, key, value, stored(key_cache), stored(value_cache)):
        assert tensor.stride(-1) == 1, "the elements of a head must be adjacent"
    given = launched(key_cache, value_cache)
    out = torch.empty(tokens, heads, dim, dtype=query.dtype, device=query.device)
    if not tokens:
        return out
    cos_sin = query if rotation.cos_sin is None else rotation.cos_sin
    half = 0 if rotation.cos_sin is None else rotation.cos_sin.shape[1] // 2
    block_heads = min(8, power_of_two(max(heads, kv_heads)))
    _rotate_and_write[(tokens, ceiling(heads, block_heads) + ceiling(kv_heads, block_heads))](
        query, key, value, out, *given[:4], slots, positions, cos_sin,
        query if rotation.query_norm is None else rotation.query_norm,
        query if rotation.key_norm is None else rotation.key_norm,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        *given.strides, cos_sin.stride(0),
        rotation.eps, rotation.norm_offset,
        HEADS=heads, KV_HEADS=kv_heads, PAGE=given.key.shape[1], DIM=dim, VALUE_DIM=value_dim, HALF=half,
        QUERY_NORM=rotation.query_norm is not None, KEY_NORM=rotation.key_norm is not None,
        EIGHT=given.scaled,
        BLOCK_HEADS=block_heads, BLOCK_HALF=power_of_two(half), BLOCK_REST=power_of_two(dim - 2 * half),
        BLOCK_VALUE=power_of_two(value_dim), num_warps=4 if block_heads * dim >= 512 else 1, **overlap(query),
    )  # fmt: skip
    return out


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: KvCache,
    value_cache: KvCache,
    slots: torch.Tensor,
) -> None:
    """The write alone: no query heads and no rotation."""
    rotate_and_write(key[:, :0], key, value, key_cache, value_cache, slots, slots, Rotation())
