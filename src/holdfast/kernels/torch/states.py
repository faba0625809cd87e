"""Recurrent states at rest: int8 codes, and a float32 scale for each row of a state. In torch.

Called through `holdfast.kernels`.
"""

from __future__ import annotations

import torch

LARGEST = 127


def rest_states(
    running: torch.Tensor,
    slots: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    places: torch.Tensor,
) -> None:
    x = running[slots]
    scale = x.abs().amax(dim=-1) * (1.0 / LARGEST)
    inverse = torch.where(scale == 0.0, 0.0, 1.0 / scale)
    codes[places] = (
        (x * inverse.unsqueeze(-1)).round().nan_to_num(0.0).clamp(-LARGEST, LARGEST).to(torch.int8)
    )
    scales[places] = scale


def wake_states(
    codes: torch.Tensor,
    scales: torch.Tensor,
    places: torch.Tensor,
    running: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    running[slots] = codes[places].float() * scales[places].unsqueeze(-1)
