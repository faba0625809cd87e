"""What the kernels compute, written as plainly as possible in float64, a row or a token at a time."""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from holdfast.kernels import RouterForm

Tensor = torch.Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (weight.double() + offset)


def rms_norm_gated(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, group: int, norm_before_gate: bool
) -> Tensor:
    x, gate = x.double(), functional.silu(gate.double())
    if not norm_before_gate:
        x = x * gate
    parts = [
        rms_norm(x[..., i : i + group], weight[i : i + group], eps) for i in range(0, x.shape[-1], group)
    ]
    out = torch.cat(parts, -1)
    return out * gate if norm_before_gate else out


def rotate(x: Tensor, cos_sin: Tensor, positions: Tensor) -> Tensor:
    """x [tokens, heads, dim], as complex numbers."""
    half = cos_sin.shape[1] // 2
    table = torch.complex(cos_sin[positions, :half].double(), cos_sin[positions, half:].double())
    x = x.double().clone()
    turned = torch.complex(x[..., :half].clone(), x[..., half : 2 * half].clone()) * table[:, None]
    x[..., :half], x[..., half : 2 * half] = turned.real, turned.imag
    return x


def attend_row(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The last `count` tokens [count, heads, dim] of a row over all its keys [context, kv_heads, dim]."""
    count, heads, _ = query.shape
    context, kv_heads, _ = key.shape
    key = key.double().repeat_interleave(heads // kv_heads, 1)
    value = value.double().repeat_interleave(heads // kv_heads, 1)
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    places = torch.arange(context - count, context, device=query.device)[:, None]
    steps = torch.arange(context, device=query.device)[None]
    hidden = steps > places
    if window is not None:
        hidden |= steps <= places - window
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        sink = sinks.double()[:, None, None].expand(heads, count, 1)
        weights = torch.softmax(torch.cat((scores, sink), -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1)
    return torch.einsum("hqk,khd->qhd", weights, value)


def conv_row(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, silu: bool
) -> tuple[Tensor, Tensor]:
    """x [count, channels], state [channels, kernel - 1]; answers the output and the new state."""
    line = torch.cat((state.double().t(), x.double()))
    taps = weight.shape[1]
    out = torch.stack([(line[i : i + taps].t() * weight.double()).sum(1) for i in range(x.shape[0])])
    if bias is not None:
        out = out + bias.double()
    return (functional.silu(out) if silu else out), line[line.shape[0] - (taps - 1) :].t()


def mamba2_row(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor,
    limit: tuple[float, float] = (0.0, math.inf),
) -> tuple[Tensor, Tensor]:
    repeat = x.shape[1] // B.shape[1]
    x, B, C = x.double(), B.double().repeat_interleave(repeat, 1), C.double().repeat_interleave(repeat, 1)
    step = dt.double() if dt_bias is None else dt.double() + dt_bias.double()
    step = functional.softplus(step).clamp(*limit)
    state = state.double()
    out = []
    for t in range(x.shape[0]):
        state = state * (step[t] * A.double()).exp()[:, None, None]
        state = state + (step[t][:, None] * x[t])[..., None] * B[t][:, None]
        y = (state * C[t][:, None]).sum(-1)
        out.append(y if D is None else y + D.double()[:, None] * x[t])
    return torch.stack(out), state


def gated_delta_row(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor, normalise: bool
) -> tuple[Tensor, Tensor]:
    query, key, value = query.double(), key.double(), value.double()
    if normalise:
        query = query / (query.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()
        key = key / (key.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()
    repeat = value.shape[1] // key.shape[1]
    query = query.repeat_interleave(repeat, 1) * key.shape[-1] ** -0.5
    key = key.repeat_interleave(repeat, 1)
    state, out = state.double(), []
    for t in range(query.shape[0]):
        state = state * g[t].double().exp()[:, None, None]
        told = (state * key[t][:, None]).sum(-1)
        state = state + ((value[t] - told) * beta[t].double()[:, None])[..., None] * key[t][:, None]
        out.append((state * query[t][:, None]).sum(-1))
    return torch.stack(out), state


def activate(x: Tensor, activation: str) -> Tensor:
    x = x.double()
    if activation == "relu_squared":
        return functional.relu(x).square()
    gate, up = x.chunk(2, -1)
    if activation == "swiglu":
        return gate * torch.sigmoid(gate) * up
    if activation == "geglu":
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        return 0.5 * gate * (1 + torch.tanh(inner)) * up
    assert activation == "swiglu_clamped"
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    activation: str,
    bias13: Tensor | None = None,
    bias2: Tensor | None = None,
) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token in range(x.shape[0]):
        for pick in range(ids.shape[1]):
            expert = int(ids[token, pick])
            inner = w13[expert].double() @ x[token].double()
            if bias13 is not None:
                inner = inner + bias13[expert].double()
            result = w2[expert].double() @ activate(inner, activation)
            if bias2 is not None:
                result = result + bias2[expert].double()
            out[token] += weights[token, pick].double() * result
    return out


def route(x: Tensor, weight: Tensor, bias: Tensor | None, form: RouterForm) -> tuple[list[list[int]], Tensor]:
    """The picks of each token, the best first, and their shares."""
    logits = x.double() @ weight.double().T
    chosen: list[list[int]] = []
    shares = torch.zeros(x.shape[0], form.picks, dtype=torch.float64)
    for token, of_token in enumerate(logits):
        scores = of_token if bias is None else of_token + bias.double()
        worth = scores
        if form.kind == "softmax_then_top":
            scores = worth = torch.softmax(of_token, 0)
        elif form.kind == "sigmoid_in_groups":
            worth = 1 / (1 + torch.exp(-of_token))
            scores = worth if bias is None else worth + bias.double()
        size = scores.shape[0] // form.groups
        best = [sum(sorted(scores[at : at + size].tolist())[-2:]) for at in range(0, scores.shape[0], size)]
        kept = sorted(range(form.groups), key=lambda group: -best[group])[: form.groups_kept]
        allowed = [name for name in range(scores.shape[0]) if name // size in kept]
        picks = sorted(allowed, key=lambda name: -float(scores[name]))[: form.picks]
        mine = worth[picks]
        if form.kind == "top_then_softmax":
            mine = torch.softmax(mine, 0)
        elif form.normalise:
            mine = mine / mine.sum()
        chosen.append(picks)
        shares[token] = mine * form.scale
    return chosen, shares


def kept_tokens(scaled: Tensor, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The tokens of one row that sampling may choose, by the definition."""
    probabilities = torch.softmax(scaled.double(), 0)
    kept = set()
    for token, probability in enumerate(probabilities.tolist()):
        likelier = probabilities[probabilities > probability]
        if top_k > 0 and likelier.numel() >= top_k:
            continue
        if top_p < 1.0 and likelier.numel() and float(likelier.sum()) >= top_p:
            continue
        if probability >= min_p * float(probabilities.max()):
            kept.add(token)
    return kept


def sampled_token(
    logits: Tensor, allowed: Tensor, heat: float, top_k: int, top_p: float, min_p: float, times: Tensor
) -> int:
    """The token of one row among the allowed ones (bool), given the waiting time of every token; or -1."""
    values = torch.where(allowed, logits.double(), -math.inf)
    if not bool(values.max().isfinite()):
        return -1
    if heat == 0.0:
        return int(values.argmax())
    tokens = allowed.nonzero().squeeze(1)
    scaled = values[tokens] / heat
    speeds = torch.softmax(scaled, 0) / times[tokens].double()
    kept = kept_tokens(scaled, top_k, top_p, min_p)
    return int(tokens[max(kept, key=lambda place: float(speeds[place]))])


def packed_mask(allowed: Tensor) -> Tensor:
    """Rows of booleans as words of 32 bits, the first token in the lowest bit."""
    rows, width = allowed.shape
    bits = functional.pad(allowed, (0, -width % 32)).long().view(rows, -1, 32)
    words = (bits << torch.arange(32)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()
