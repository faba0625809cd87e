"""Query/key norms, rotary embedding and the KV write, in torch. Called through `holdfast.kernels`."""

from __future__ import annotations

import torch

from holdfast.kernels.parameters import Rotation
from holdfast.kernels.scaled import KvCache, ScaledCache, stored
from holdfast.kernels.torch.norm import rms_norm
from holdfast.kernels.torch.scaled import encode


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: KvCache,
    value_cache: KvCache,
    slots: torch.Tensor,
) -> None:
    page_size = stored(key_cache).shape[1]
    units = torch.div(slots, page_size, rounding_mode="floor")
    offsets = slots - units * page_size
    for given, cache in ((key, key_cache), (value, value_cache)):
        if isinstance(cache, ScaledCache):
            cache.codes[units, offsets], cache.scales[units, :, offsets] = encode(given)
        else:
            cache[units, offsets] = given.to(cache.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, dim] rotated by float32 cos and sin [tokens, 1, rotary_dim / 2]."""
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
    key_cache: KvCache,
    value_cache: KvCache,
    slots: torch.Tensor,
    positions: torch.Tensor,
    rotation: Rotation,
) -> torch.Tensor:
    if rotation.query_norm is not None:
        query = rms_norm(query, rotation.query_norm, rotation.eps, offset=rotation.norm_offset)
    if rotation.key_norm is not None:
        key = rms_norm(key, rotation.key_norm, rotation.eps, offset=rotation.norm_offset)
    if rotation.cos_sin is not None:
        cos, sin = rotation.cos_sin[positions].float().unsqueeze(1).chunk(2, dim=-1)
        query = rotate(query, cos, sin)
        key = rotate(key, cos, sin)
    write_kv(key, value, key_cache, value_cache, slots)
    return query.contiguous()
