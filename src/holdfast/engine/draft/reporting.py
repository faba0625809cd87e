"""The draft model's cache in reports: `/v1/memory`, `/metrics` and the lines at start-up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.engine.reports.coarse import coarse

if TYPE_CHECKING:  # reports are named by API processes, which do without torch
    from holdfast.engine.draft.proposer import DraftProposer

__all__ = ["draft_gauges", "draft_lines", "draft_report"]


def draft_report(drafts: DraftProposer, tenant: str | None) -> dict[str, object]:
    """The cache's pages by holder; a tenant sees its own exactly, and those of all others as one figure."""
    cache = drafts.cache
    pool = next(iter(cache.ledger.pools.values()))
    free = len(pool.free)
    account = None if tenant is None else cache.ledger.accounts.get(tenant)
    own = pool.size - free if tenant is None else 0 if account is None else account.held[pool.index]
    holders = {"SESSION": own}
    if tenant is not None:
        holders["OTHERS"] = min(coarse(pool.size - free - own, pool.size), pool.size - own)
    return {
        "tier": "device",
        "unit": "page",
        "page_size": cache.ledger.layout.page_size,
        "units": pool.size,
        "bytes_per_unit": drafts.page_bytes,
        "holders": {"FREE": pool.size - sum(holders.values()), **holders},
    }


def draft_gauges(drafts: DraftProposer | None) -> dict[str, int]:
    """Pages and sessions of the draft model, by the name of their metric; empty without a draft model."""
    if drafts is None:
        return {}
    pool = next(iter(drafts.cache.ledger.pools.values()))
    return {
        "draft_pages_held": pool.size - len(pool.free),
        "draft_pages_free": len(pool.free),
        "draft_sessions": sum(1 for entry in drafts.cache.entries.values() if entry.pages),
        "draft_sessions_resting": drafts.resting,
    }


def draft_lines(drafts: DraftProposer | None) -> list[str]:
    """The cache as text, for the plan that is printed at start-up."""
    if drafts is None:
        return []
    pool = next(iter(drafts.cache.ledger.pools.values()))
    size, mebibytes = drafts.cache.ledger.layout.page_size, pool.size * drafts.page_bytes / 2**20
    return [f"draft model: {pool.size} pages of {size} tokens, {mebibytes:.0f} MiB"]
