"""The gated delta rule, in torch.

    state <- exp(g) * state;  state <- state + beta * (v - state k) k^T;  y = state q

One-token rows take a single step together. Longer rows are computed in chunks: the corrections inside a
chunk are one unit-triangular system, between chunks the state is carried. The state is float32
`[slots, value_heads, value_dim, key_dim]`, read from the source slot and written to the destination slot.
Called through `holdfast.kernels`.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from holdfast.kernels.batch import Batch
from holdfast.kernels.torch.conv import read_states

NORM_EPS = 1e-6
CHUNK = 64


def gated_delta(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    delta_state: torch.Tensor,
    batch: Batch,
    *,
    scale: float | None = None,
    normalise: bool = False,
) -> torch.Tensor:
    query, key = query.float(), key.float()
    if normalise:
        query = query * torch.rsqrt(query.square().sum(dim=-1, keepdim=True) + NORM_EPS)
        key = key * torch.rsqrt(key.square().sum(dim=-1, keepdim=True) + NORM_EPS)
    query = query * (key.shape[-1] ** -0.5 if scale is None else scale)
    repeat = value.shape[1] // key.shape[1]
    if repeat > 1:
        query = query.repeat_interleave(repeat, dim=1)
        key = key.repeat_interleave(repeat, dim=1)
    state = read_states(delta_state, batch).float()
    decay, rate, wanted = g.float(), beta.float(), value.float()
    if batch.one_token_rows:
        out = _step(query, key, wanted, decay, rate, state)
        delta_state.index_copy_(0, batch.state_destination.long(), state.to(delta_state.dtype))
        return out.to(value.dtype)
    out = torch.empty(value.shape, dtype=torch.float32, device=value.device)
    starts = batch.row_start.tolist()
    destinations = batch.state_destination.tolist()
    for row in range(batch.rows):
        span = slice(starts[row], starts[row + 1])
        if span.start == span.stop:
            continue
        chunk = min(CHUNK, span.stop - span.start)
        out[span], final = _scan(
            query[span], key[span], wanted[span], decay[span], rate[span], state[row], chunk
        )
        delta_state[destinations[row]] = final.to(delta_state.dtype)
    return out.to(value.dtype)


def _step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    rate: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """One token a row; `state` [rows, heads, value_dim, key_dim] is advanced in place."""
    state *= decay.exp()[..., None, None]
    told = torch.matmul(state, key.unsqueeze(-1)).squeeze(-1)
    correction = (value - told) * rate.unsqueeze(-1)
    state += correction.unsqueeze(-1) * key.unsqueeze(-2)
    return torch.matmul(state, query.unsqueeze(-1)).squeeze(-1)


def _scan(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    rate: torch.Tensor,
    state: torch.Tensor,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One row of many tokens; returns y [tokens, heads, value_dim] and the final state."""
    count = query.shape[0]
    chunks = -(-count // chunk)
    padding = chunks * chunk - count

    def split(tensor: torch.Tensor) -> torch.Tensor:
        padded = functional.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, padding))
        return padded.reshape(chunks, chunk, *tensor.shape[1:]).transpose(1, 2)

    # Padding tokens have decay 0, rate 0 and key 0: they change nothing.
    reads, keys, values = split(query), split(key), split(value)  # [chunks, heads, chunk, dim]
    # Cumulative decays reach hundreds and their differences are exponents: float32 would lose digits.
    total = split(decay).double().cumsum(dim=-1)  # [chunks, heads, chunk]
    passed = total.float()
    rates = split(rate).unsqueeze(-1)
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=query.device).triu(1)
    gaps = (total.unsqueeze(-1) - total.unsqueeze(-2)).float().masked_fill_(later, -torch.inf).exp_()
    system = torch.matmul(keys * rates, keys.transpose(-1, -2)) * gaps
    # The solver takes the diagonal as one, whatever it holds.
    right = torch.cat((values * rates, keys * rates * passed.exp().unsqueeze(-1)), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    wanted, told = solved.split((value.shape[-1], key.shape[-1]), dim=-1)
    inside = torch.matmul(reads, keys.transpose(-1, -2)) * gaps
    reads = reads * passed.exp().unsqueeze(-1)
    remaining = keys * (total[..., -1:] - total).float().exp().unsqueeze(-1)
    whole = passed[..., -1].exp()
    out = torch.empty_like(values)
    for index in range(chunks):
        columns = state.transpose(-1, -2)
        corrections = wanted[index] - torch.matmul(told[index], columns)
        out[index] = torch.matmul(reads[index], columns) + torch.matmul(inside[index], corrections)
        added = torch.matmul(corrections.transpose(-1, -2), remaining[index])
        state = torch.addcmul(added, state, whole[index, :, None, None])
    return out.transpose(1, 2).flatten(0, 1)[:count], state
