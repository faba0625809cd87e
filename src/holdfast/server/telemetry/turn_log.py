"""The log line of a turn that has ended: its figures, without its text."""

from __future__ import annotations

import logging

from holdfast.server.link.turn_feed import TurnFeed

__all__ = ["log_turn"]

log = logging.getLogger("holdfast.server")


def log_turn(feed: TurnFeed) -> None:
    """Log a turn that has had its end, or was lost."""
    end = feed.end
    fields: dict[str, object] = {"turn": feed.name, "session": feed.session or "-"}
    if end is None:
        log.warning("turn lost", extra={"fields": fields})
        return
    fields |= {
        "outcome": end.outcome,
        "reason": end.reason,
        "prompt_tokens": end.prompt_tokens,
        "cached_tokens": end.cached_tokens,
        "completion_tokens": len(end.tokens),
        "queue_ms": round(end.queue_seconds * 1000, 1),
        "total_ms": round(end.total_seconds * 1000, 1),
    }
    log.log(logging.ERROR if end.outcome == "failed" else logging.DEBUG, "turn", extra={"fields": fields})
