"""The choice of experts, in torch. Called through `holdfast.kernels`."""

from __future__ import annotations

import torch
from torch.nn import functional

from holdfast.kernels.parameters import RouterForm


def route(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, form: RouterForm
) -> tuple[torch.Tensor, torch.Tensor]:
    return choose(functional.linear(x.float(), weight.float()), bias, form)


def choose(
    logits: torch.Tensor, bias: torch.Tensor | None, form: RouterForm
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids and shares of the best experts by their logits [tokens, experts]."""
    if form.kind == "softmax_then_top":
        shares, ids = logits.softmax(dim=-1).topk(form.picks, dim=-1)
        if form.normalise:
            shares = shares / shares.sum(dim=-1, keepdim=True)
    elif form.kind == "top_then_softmax":
        best, ids = (logits if bias is None else logits + bias).topk(form.picks, dim=-1)
        shares = best.softmax(dim=-1)
    else:
        ids, shares = _choose_in_groups(logits.sigmoid(), bias, form)
    return ids, shares if form.scale == 1.0 else shares * form.scale


def _choose_in_groups(
    scores: torch.Tensor, bias: torch.Tensor | None, form: RouterForm
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best experts of the best groups; a group's score is the sum of its two best experts."""
    choice = scores if bias is None else scores + bias
    if form.groups > 1:
        grouped = choice.unflatten(-1, (form.groups, -1))
        worth = grouped.topk(2, dim=-1).values.sum(dim=-1)
        kept = worth.topk(form.groups_kept, dim=-1).indices
        closed = torch.ones_like(worth, dtype=torch.bool).scatter_(1, kept, False)
        choice = grouped.masked_fill(closed[..., None], -torch.inf).flatten(-2)
    ids = choice.topk(form.picks, dim=-1).indices
    shares = scores.gather(1, ids)
    if form.normalise:
        shares = shares / (shares.sum(dim=-1, keepdim=True) + 1e-20)
    return ids, shares
