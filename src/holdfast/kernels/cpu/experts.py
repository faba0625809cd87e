"""Mixture of experts with the C kernels: each expert's products run once, over the tokens routed to it.

Same function as `kernels/torch/experts.py`, for weights that are packed matrices. Called by `models.experts`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from holdfast.kernels.cpu.matrix import PackedMatrix
from holdfast.kernels.torch.activation import PLAIN_EXPERTS, ExpertForm, activate


def experts_packed(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Sequence[PackedMatrix],
    w2: Sequence[PackedMatrix],
    form: ExpertForm = PLAIN_EXPERTS,
) -> Tensor:
    """The weighted sum of the experts' results; parameters as in `kernels.experts`."""
    activation, clamp, bias13, bias2 = form
    picks = ids.shape[1]
    order = torch.argsort(ids.flatten(), stable=True)
    tokens = torch.div(order, picks, rounding_mode="floor")
    counts = torch.bincount(ids.flatten(), minlength=len(w13)).tolist()
    shares = weights.flatten()[order].float().unsqueeze(-1)
    out = torch.zeros(x.shape, dtype=torch.float32)
    begin = 0
    for expert, count in enumerate(counts):
        if count == 0:
            continue
        span = slice(begin, begin + count)
        begin += count
        inner = w13[expert](x[tokens[span]])
        if bias13 is not None:
            inner += bias13[expert]
        result = w2[expert](activate(inner, activation, clamp)).float()
        if bias2 is not None:
            result += bias2[expert]
        out.index_add_(0, tokens[span], result * shares[span])
    return out.to(x.dtype)
