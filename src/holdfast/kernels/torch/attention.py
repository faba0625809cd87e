"""Causal attention over paged KV for ragged, mixed batches, in torch.

Float32 tensors on a CPU go to the C kernel where it is available. Otherwise one-token rows are computed
together: their pages are gathered into one padded tensor, and keys outside a row's view are zeroed (a page
may hold garbage past its last token) and masked. Rows of several tokens are computed one by one over exactly
the keys that they see. Scores and sums are float32. Caches of another type are
converted as they are gathered. Called through `holdfast.kernels`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from holdfast.kernels.batch import Batch, Pages
from holdfast.kernels.cpu.attention import attend_pages
from holdfast.kernels.scaled import KvCache, stored
from holdfast.kernels.torch.scaled import units_of

QUERY_BLOCK = 256  # queries of a long row that the explicit path scores at once


class _Rule(NamedTuple):
    """How scores are scaled, masked and normalised."""

    scale: float
    window: int | None
    sinks: torch.Tensor | None
    softcap: float | None

    def cap(self, scores: torch.Tensor) -> torch.Tensor:
        return scores if self.softcap is None else torch.tanh(scores / self.softcap) * self.softcap

    def softmax(self, scores: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Over the last dimension; a sink takes part in the softmax and contributes no value."""
        if self.sinks is None:
            return torch.softmax(scores, dim=-1)
        sink = self.sinks.float().view(*shape, 1).expand(*scores.shape[:-1], 1)
        return torch.softmax(torch.cat((scores, sink), dim=-1), dim=-1)[..., :-1]


class _Singles(NamedTuple):
    """The one-token rows of a batch."""

    table: torch.Tensor
    context: torch.Tensor
    context_max: int


def attend(
    query: torch.Tensor,
    key_cache: KvCache,
    value_cache: KvCache,
    pages: Pages,
    batch: Batch,
    *,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    rule = _Rule(scale, window, sinks, softcap)
    found = attend_pages(query, key_cache, value_cache, pages, batch, rule)
    if found is not None:
        return found
    if batch.one_token_rows:
        everything = _Singles(pages.table, batch.context, batch.context_max)
        return _attend_single(query, key_cache, value_cache, everything, rule)
    out = torch.empty(
        *query.shape[:-1], stored(value_cache).shape[-1], dtype=query.dtype, device=query.device
    )
    starts = batch.row_start.tolist()
    contexts = batch.context.tolist()
    rows = [row for row in range(batch.rows) if starts[row + 1] - starts[row] == 1]
    if rows:
        tokens = torch.tensor([starts[row] for row in rows], device=query.device)
        picked = torch.tensor(rows, device=query.device)
        singles = _Singles(pages.table[picked], batch.context[picked], max(contexts[row] for row in rows))
        out[tokens] = _attend_single(query[tokens], key_cache, value_cache, singles, rule)
    for row in range(batch.rows):
        begin, end, context = starts[row], starts[row + 1], contexts[row]
        if end - begin <= 1:
            continue
        position = context - (end - begin)
        lowest = 0 if window is None else max(0, position - window + 1)
        key = _row_view(key_cache, pages.table[row], lowest, context, query.dtype)
        value = _row_view(value_cache, pages.table[row], lowest, context, query.dtype)
        out[begin:end] = _attend_row(query[begin:end], key, value, position - lowest, rule)
    return out


def _row_view(cache: KvCache, table: torch.Tensor, begin: int, end: int, dtype: torch.dtype) -> torch.Tensor:
    """Tokens [begin, end) of one row as [kv_heads, tokens, dim]."""
    page_size = stored(cache).shape[1]
    first = begin // page_size
    units = table[first : -(-end // page_size)]
    gathered = units_of(cache, units, dtype).flatten(0, 1)
    return gathered[begin - first * page_size : end - first * page_size].transpose(0, 1)


def _attend_row(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    position: int,
    rule: _Rule,
) -> torch.Tensor:
    """Queries [count, heads, dim], the first at key index `position`, over keys [kv_heads, n, dim]."""
    count, length = query.shape[0], key.shape[1]
    groups = query.shape[1] // key.shape[0]
    window, scale = rule.window, rule.scale
    plain = rule.sinks is None and rule.softcap is None
    if plain and position == 0 and (window is None or window >= count):
        out = functional.scaled_dot_product_attention(
            query.transpose(0, 1).unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0),
            is_causal=True, scale=scale, enable_gqa=groups > 1,
        )  # fmt: skip
        return out.squeeze(0).transpose(0, 1)
    steps = torch.arange(length, device=query.device)
    pieces = []
    for begin in range(0, count, QUERY_BLOCK):
        block = query[begin : begin + QUERY_BLOCK]
        places = torch.arange(position + begin, position + begin + block.shape[0], device=query.device)
        first = 0 if window is None else max(0, position + begin - window + 1)
        last = position + begin + block.shape[0]
        seen = steps[None, first:last] <= places[:, None]
        if window is not None:
            seen &= steps[None, first:last] > places[:, None] - window
        if plain:
            piece = functional.scaled_dot_product_attention(
                block.transpose(0, 1).unsqueeze(0),
                key[:, first:last].unsqueeze(0),
                value[:, first:last].unsqueeze(0),
                attn_mask=seen, scale=scale, enable_gqa=groups > 1,
            )  # fmt: skip
            pieces.append(piece.squeeze(0).transpose(0, 1))
            continue
        grouped = block.float().unflatten(1, (key.shape[0], groups)).permute(1, 2, 0, 3)
        scores = torch.matmul(grouped, key[:, None, first:last].float().transpose(-1, -2))
        scores = rule.cap(scores * scale).masked_fill(~seen, -torch.inf)
        weights = rule.softmax(scores, (key.shape[0], groups, 1))
        mixed = torch.matmul(weights, value[:, None, first:last].float())
        pieces.append(mixed.permute(2, 0, 1, 3).flatten(1, 2).to(query.dtype))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _attend_single(
    query: torch.Tensor,
    key_cache: KvCache,
    value_cache: KvCache,
    singles: _Singles,
    rule: _Rule,
) -> torch.Tensor:
    """One query a row, [rows, heads, dim]."""
    page_size, kv_heads = stored(key_cache).shape[1:3]
    groups = query.shape[1] // kv_heads
    window = rule.window
    context = singles.context.long().unsqueeze(1)
    pages = -(-singles.context_max // page_size)
    lowest = torch.zeros_like(context)
    if window is not None:
        pages = min(pages, (window + page_size - 2) // page_size + 1)
        lowest = (context - window).clamp_(min=0)
    page = torch.div(lowest, page_size, rounding_mode="floor") + torch.arange(pages, device=query.device)
    last = torch.div(context - 1, page_size, rounding_mode="floor").clamp_(min=0)
    units = singles.table.gather(1, torch.minimum(page, last)).flatten()
    places = (page.unsqueeze(-1) * page_size + torch.arange(page_size, device=query.device)).flatten(1)
    seen = (places < context) & (places >= lowest)
    hidden = (~seen).flatten().nonzero().squeeze(1)

    def gather(cache: KvCache) -> torch.Tensor:
        """The pages of each row as [rows, kv_heads, tokens, dim], zero outside the row's view."""
        dim = stored(cache).shape[-1]
        picked = units_of(cache, units, query.dtype).view(-1, kv_heads * dim)
        picked.index_fill_(0, hidden, 0.0)
        return picked.view(query.shape[0], -1, kv_heads, dim).transpose(1, 2)

    key, value = gather(key_cache), gather(value_cache)
    grouped = query.reshape(query.shape[0], kv_heads, groups, query.shape[-1])
    if rule.sinks is None and rule.softcap is None:
        # The query heads of one key head become queries of one sequence.
        mask = seen[:, None, None]
        out = functional.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=rule.scale)
        return out.flatten(1, 2)
    scores = torch.matmul(grouped.float(), key.float().contiguous().transpose(-1, -2))
    scores = rule.cap(scores * rule.scale).masked_fill(~seen[:, None, None], -torch.inf)
    weights = rule.softmax(scores, (1, kv_heads, groups))
    return torch.matmul(weights, value.float()).flatten(1, 2).to(query.dtype)
