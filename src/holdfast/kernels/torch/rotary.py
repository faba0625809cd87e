"""Query/key norms, rotary embedding and the KV write, in torch.

The rotary table is `[positions, rotary_dim]`: cosines in the first half of a row, sines in the second.
Dimension i of the first half of the rotary part turns with dimension i of its second half; dimensions past
`rotary_dim` pass through. Called through `holdfast.kernels`.
"""

from __future__ import annotations

import torch

from holdfast.kernels.torch.norm import rms_norm


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    page_size = key_cache.shape[1]
    units = torch.div(slots, page_size, rounding_mode="floor")
    offsets = slots - units * page_size
    key_cache[units, offsets] = key.to(key_cache.dtype)
    value_cache[units, offsets] = value.to(value_cache.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, dim] turned by float32 cos and sin [tokens, 1, rotary_dim / 2]."""
    half = cos.shape[-1]
    first = x[..., :half].float()
    second = x[..., half : 2 * half].float()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out[..., :half] = first * cos - second * sin
    out[..., half : 2 * half] = second * cos + first * sin
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out


def rotate_and_write(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos_sin: torch.Tensor | None,
    positions: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    query_norm: torch.Tensor | None = None,
    key_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    norm_offset: float = 0.0,
) -> torch.Tensor:
    if query_norm is not None:
        query = rms_norm(query, query_norm, eps, offset=norm_offset)
    if key_norm is not None:
        key = rms_norm(key, key_norm, eps, offset=norm_offset)
    if cos_sin is not None:
        cos, sin = cos_sin[positions].float().unsqueeze(1).chunk(2, dim=-1)
        query = rotate(query, cos, sin)
        key = rotate(key, cos, sin)
    write_kv(key, value, key_cache, value_cache, slots)
    return query.contiguous()
