"""Sampling of one token per row, in torch.

A token is kept when fewer than `top_k` tokens are more likely, those more likely hold less than `top_p` of
the probability, and its own probability is at least `min_p` of the maximum; all three apply after the
temperature. Kept tokens run a race of exponential waiting times (the Gumbel-max trick): the first to arrive
wins, with its share of the probability. The times are a pure function of (seed, position, token), so a row's
token does not depend on the rest of the batch, and all devices draw the same. The C kernels, where available,
do the same in one pass. Called through `holdfast.kernels`.
"""

from __future__ import annotations

import torch

from holdfast.kernels.cpu import sampling as compiled
from holdfast.kernels.parameters import TokenMasks

CANDIDATES = (128, 2048)  # most likely tokens to look at before a full sort is needed
NO_TOKEN = -1


def _signed(value: int) -> int:
    """The int32 with the same bits."""
    return value - (1 << 32) if value >= 1 << 31 else value


def _mix(value: torch.Tensor) -> torch.Tensor:
    """A bijective hash of int32 values, in place: every input bit reaches every output bit."""
    value ^= (value >> 16) & 0xFFFF
    value *= 0x7FEB352D
    value ^= (value >> 15) & 0x1FFFF
    value *= _signed(0x846CA68B)
    value ^= (value >> 16) & 0xFFFF
    return value


def waiting_times(seeds: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Exponential waiting times, float32 [rows, n], of tokens [rows or 1, n] by each row's seed and position.

    23 bits make a uniform number strictly between 0 and 1, so every time is positive and finite.
    """
    halves = seeds.contiguous().view(torch.int32).view(-1, 2)  # low bits, high bits
    stream = _mix(halves[:, 0] ^ _signed(0x9E3779B9))
    stream = _mix(stream ^ halves[:, 1])
    stream = _mix(stream + positions.to(torch.int32)).unsqueeze(1)
    bits = _mix(_mix(tokens.to(torch.int32) + stream) ^ stream)
    bits >>= 9
    bits &= 0x7FFFFF
    return bits.float().add_(0.5).mul_(2.0**-23).neg_().log1p_().neg_()


def sample_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    greedy: bool = False,
    masks: TokenMasks | None = None,
) -> torch.Tensor:
    values = logits.float()
    if masks is not None:
        heat = torch.zeros_like(temperature) if greedy else temperature
        tokens = compiled.sample(values, heat, top_k, top_p, min_p, seeds, positions, masks)
        if tokens is not None:
            return tokens
        values = values.masked_fill(~allowed_tokens(masks, values.shape[1]), -torch.inf)
    elif not greedy:
        tokens = compiled.sample(values, temperature, top_k, top_p, min_p, seeds, positions)
        if tokens is not None:
            return tokens
    found = compiled.argmax(values)
    peak, best = values.max(dim=-1) if found is None else found
    if not greedy:
        rows = (temperature > 0).nonzero().squeeze(1)
        if rows.numel():
            best = best.clone()
            best[rows] = _draw(
                values[rows] * temperature[rows].float().reciprocal().unsqueeze(1),
                top_k[rows], top_p[rows], min_p[rows], seeds[rows], positions[rows],
            )  # fmt: skip
    # The maximum is not finite exactly where a row has NaN or +inf, or only -inf.
    return torch.where(peak.isfinite(), best, NO_TOKEN)


def allowed_tokens(masks: TokenMasks, width: int) -> torch.Tensor:
    """Which tokens the rows may take, bool [rows, width]; in a masked row none beyond its mask."""
    rows, device = masks.rows.long(), masks.words.device
    words = masks.words[rows.clamp(min=0)]
    bits = (words.unsqueeze(2) >> torch.arange(32, dtype=torch.int32, device=device)) & 1
    allowed = torch.zeros(len(rows), width, dtype=torch.bool, device=device)
    reached = min(width, 32 * words.shape[1])
    allowed[:, :reached] = bits.flatten(1)[:, :reached].bool()
    return allowed.logical_or_((rows < 0).unsqueeze(1))


def _draw(
    scaled: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """The tokens of rows with a temperature; `scaled` is logits / temperature."""
    width = scaled.shape[1]
    peak = scaled.amax(dim=-1, keepdim=True)
    floor = peak + torch.log(min_p.float()).unsqueeze(1)
    limited = (top_k > 0) & (top_k < width)
    narrowed = top_p < 1.0
    if not bool((limited | narrowed).any()):
        times = waiting_times(seeds, positions, torch.arange(width, device=scaled.device).unsqueeze(0))
        return (torch.exp(scaled - peak) / times).masked_fill_(scaled < floor, -1.0).argmax(dim=-1)
    total = torch.logsumexp(scaled, dim=-1, keepdim=True)
    limit = torch.where(limited, top_k, width).unsqueeze(1)
    share = top_p.float().unsqueeze(1)
    sizes = [size for size in CANDIDATES if size < width]
    while True:
        ordered, tokens = scaled.topk(sizes.pop(0) if sizes else width, dim=-1)
        mass = (ordered - total).exp().cumsum(dim=-1)
        inside = (limit <= ordered.shape[1]) | ((share < 1.0) & (mass[:, -1:] >= share))
        if ordered.shape[1] == width or bool(inside.all()):
            break
    before = torch.cat((torch.zeros_like(mass[:, :1]), mass[:, :-1]), dim=-1)
    ranks = torch.arange(ordered.shape[1], device=scaled.device).unsqueeze(0)
    kept = (ranks < limit) & ((before < share) | (share >= 1.0))
    kept[:, 0] = True
    # Ties with the last kept token are kept too, so that the set does not depend on the order of a sort.
    least = ordered.masked_fill(~kept, torch.inf).amin(dim=-1, keepdim=True)
    kept = (ordered >= torch.maximum(least, floor)) | (ranks == 0)
    speeds = torch.exp(ordered - peak) / waiting_times(seeds, positions, tokens)
    return tokens.gather(1, speeds.masked_fill_(~kept, -1.0).argmax(dim=-1, keepdim=True)).squeeze(1)
