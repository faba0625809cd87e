"""The Mamba2 recurrence (selective state space with a scalar decay a head), in torch.

    state <- exp(dt * A) * state + dt * x B^T        y = state C + D x

One-token rows take a single step together. Longer rows are computed in chunks: within a chunk as a masked
matrix product, between chunks by carrying the state. The state is float32 `[slots, heads, head_dim, state]`,
read from the source slot and written to the destination slot. Called through `holdfast.kernels`.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from holdfast.kernels.batch import Batch
from holdfast.kernels.parameters import Mamba2Weights
from holdfast.kernels.torch.conv import read_states


def mamba2_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    weights: Mamba2Weights,
    ssm_state: torch.Tensor,
    batch: Batch,
) -> torch.Tensor:
    step = dt.float() if weights.dt_bias is None else dt.float() + weights.dt_bias.float()
    step = functional.softplus(step).clamp_(*weights.dt_limit)
    decay = step * weights.A.float()
    state = read_states(ssm_state, batch).float()
    if batch.one_token_rows:
        out = _step(x.float(), step, decay, B.float(), C.float(), state)
        ssm_state.index_copy_(0, batch.state_destination.long(), state.to(ssm_state.dtype))
    else:
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        starts = batch.row_start.tolist()
        destinations = batch.state_destination.tolist()
        for row in range(batch.rows):
            span = slice(starts[row], starts[row + 1])
            if span.start == span.stop:
                continue
            chunk = min(weights.chunk_size, span.stop - span.start)
            out[span], final = _scan(
                x[span].float(), step[span], decay[span], B[span].float(), C[span].float(), state[row], chunk
            )
            ssm_state[destinations[row]] = final.to(ssm_state.dtype)
    if weights.D is not None:
        out += weights.D.float().unsqueeze(-1) * x.float()
    return out.to(x.dtype)


def _step(
    x: torch.Tensor,
    step: torch.Tensor,
    decay: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """One token a row; `state` [rows, heads, dim, state] is advanced in place."""
    heads, groups = x.shape[1], B.shape[1]
    state *= decay.exp()[..., None, None]
    grouped = state.unflatten(1, (groups, heads // groups))
    inputs = (x * step.unsqueeze(-1)).unflatten(1, (groups, heads // groups))
    grouped += inputs.unsqueeze(-1) * B[:, :, None, None]
    return torch.matmul(grouped, C[:, :, None, :, None]).squeeze(-1).flatten(1, 2)


def _scan(
    x: torch.Tensor,
    step: torch.Tensor,
    decay: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    state: torch.Tensor,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One row of many tokens; returns y [tokens, heads, dim] and the final state."""
    count, heads, _ = x.shape
    groups = B.shape[1]
    chunks = -(-count // chunk)
    padding = chunks * chunk - count

    def split(tensor: torch.Tensor) -> torch.Tensor:
        padded = functional.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, padding))
        return padded.reshape(chunks, chunk, *tensor.shape[1:]).transpose(1, 2)

    # Padding tokens have step and decay 0: they change nothing.
    inputs = split(x * step.unsqueeze(-1))  # [chunks, heads, chunk, dim]
    # Cumulative decays reach hundreds and their differences are exponents: float32 would lose digits.
    total = split(decay).double().cumsum(dim=-1)  # [chunks, heads, chunk]
    passed = total.float()
    keys = split(B)  # [chunks, groups, chunk, state]
    reads = split(C)
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).triu(1)
    gaps = (total.unsqueeze(-1) - total.unsqueeze(-2)).float().masked_fill_(later, -torch.inf)
    scores = torch.matmul(reads, keys.transpose(-1, -2))
    repeat = heads // groups
    out = torch.matmul(scores.repeat_interleave(repeat, dim=1) * gaps.exp_(), inputs)
    # What each chunk adds to the state, then the initial state of each chunk.
    remaining = (total[..., -1:] - total).float().exp()
    weighted = (inputs * remaining.unsqueeze(-1)).transpose(-1, -2)
    added = torch.matmul(weighted, keys.repeat_interleave(repeat, dim=1))
    whole = passed[..., -1].exp()
    before = torch.empty_like(added)
    for index in range(chunks):
        before[index] = state
        state = torch.addcmul(added[index], state, whole[index, :, None, None])
    carried = torch.matmul(reads.repeat_interleave(repeat, dim=1), before.transpose(-1, -2))
    out += carried * passed.exp().unsqueeze(-1)
    return out.transpose(1, 2).flatten(0, 1)[:count], state
