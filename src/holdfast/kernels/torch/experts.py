"""Mixture of experts, in torch: each expert runs once, over the tokens that were routed to it.

Called through `holdfast.kernels`.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from holdfast.kernels.torch.activation import PLAIN_EXPERTS, ExpertForm, activate


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    form: ExpertForm = PLAIN_EXPERTS,
) -> torch.Tensor:
    activation, clamp, bias13, bias2 = form
    picks = ids.shape[1]
    order = torch.argsort(ids.flatten(), stable=True)
    tokens = torch.div(order, picks, rounding_mode="floor")
    counts = torch.bincount(ids.flatten(), minlength=w13.shape[0]).tolist()
    shares = weights.flatten()[order].float().unsqueeze(-1)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    begin = 0
    for expert, count in enumerate(counts):
        if count == 0:
            continue
        span = slice(begin, begin + count)
        begin += count
        chosen = tokens[span]
        inner = functional.linear(x[chosen], w13[expert], None if bias13 is None else bias13[expert])
        inner = activate(inner, activation, clamp)
        result = functional.linear(inner, w2[expert], None if bias2 is None else bias2[expert])
        out.index_add_(0, chosen, result.float() * shares[span])
    return out.to(x.dtype)
