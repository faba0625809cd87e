"""Findings of the audit: the fault, its repair, and the holder."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from holdfast.core.slices import Owner


class FindingKind(StrEnum):
    """The kind of a fault."""

    DROPPED_HOLD = "dropped hold"
    DROPPED_LEASE = "dropped lease"
    BOOKS = "books"
    CLAIMED_TWICE = "claimed twice"
    CLAIMED_WHILE_FREE = "claimed while free"
    UNCLAIMED = "unclaimed"
    COUNTER = "counter"
    LOST = "lost"
    FOREIGN_UNIT = "foreign unit"
    LOCK_WITHOUT_LESSEE = "lock without a lessee"
    NOT_QUEUED = "not queued"


class Finding:
    """Something that must not be, how it was healed, and the owners whose memory cannot be trusted."""

    __slots__ = ("detail", "healed", "holder", "kind", "owners", "pool", "step", "trail", "units")

    def __init__(
        self,
        kind: FindingKind,
        detail: str,
        holder: str,
        healed: str,
        step: int,
        pool: str = "tree",
        units: Sequence[int] = (),
    ) -> None:
        self.kind = kind
        self.detail = detail
        self.holder = holder
        self.healed = healed
        self.step = step
        self.pool = pool
        self.units = list(units)
        self.trail: list[str] = []
        self.owners: list[Owner] = []

    def __str__(self) -> str:
        where = f" ({self.pool} {self.units[:8]})" if self.units else ""
        return f"step {self.step}: {self.kind}: {self.holder}: {self.detail}{where}; {self.healed}"
