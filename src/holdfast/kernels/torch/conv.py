"""Causal depthwise convolution with a carried state, in torch.

The state of a row is its last `kernel - 1` inputs, oldest first. It is read from the source slot and written
to the destination slot; source -1 is zeros. Called through `holdfast.kernels`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn import functional

from holdfast.kernels.batch import Batch


def read_states(states: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The initial state of every row, a fresh tensor; the zero state where the source is -1."""
    source = batch.state_source.long()
    picked = states.index_select(0, source.clamp(min=0))
    missing = (source < 0).view(-1, *[1] * (states.dim() - 1))
    return picked.masked_fill_(missing, 0.0)


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    batch: Batch,
    *,
    activation: Literal["silu"] | None = "silu",
) -> torch.Tensor:
    taps = weight.shape[1]
    state = read_states(conv_state, batch)
    destination = batch.state_destination.long()
    if batch.one_token_rows:
        columns = torch.cat((state.to(x.dtype), x.unsqueeze(-1)), dim=-1)
        out = (columns.float() * weight.float()).sum(dim=-1)
        conv_state.index_copy_(0, destination, columns[..., 1:].to(conv_state.dtype))
    else:
        rows = batch.token_rows()
        tokens = torch.arange(x.shape[0], device=x.device)
        extended = x.new_empty(x.shape[0] + batch.rows * (taps - 1), x.shape[1])
        row_start = batch.row_start.long()
        history = torch.arange(taps - 1, device=x.device)
        before = row_start[:-1] + torch.arange(batch.rows, device=x.device) * (taps - 1)
        extended[(before.unsqueeze(1) + history).flatten()] = state.transpose(1, 2).flatten(0, 1).to(x.dtype)
        extended[tokens + (rows + 1) * (taps - 1)] = x
        first = tokens + rows * (taps - 1)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for tap in range(taps):
            out.addcmul_(extended[first + tap].float(), weight[:, tap].float())
        after = row_start[1:] + torch.arange(batch.rows, device=x.device) * (taps - 1)
        tails = extended[(after.unsqueeze(1) + history).flatten()].view(batch.rows, taps - 1, x.shape[1])
        filled = (row_start[1:] > row_start[:-1]).nonzero().squeeze(1)
        conv_state[destination[filled]] = tails[filled].transpose(1, 2).to(conv_state.dtype)
    if bias is not None:
        out += bias.float()
    return (functional.silu(out) if activation == "silu" else out).to(x.dtype)
