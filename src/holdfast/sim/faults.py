"""Faults: everything that may go wrong in the simulated world, by site, struck by a seeded rate.

There is one registry of sites, so that a run can show that each was struck.
"""

from __future__ import annotations

from random import Random
from typing import get_args

from holdfast.core.ledger import Ledger, Pool, Purpose

ALLOCATIONS = tuple(purpose for purpose in get_args(Purpose) if purpose)
"""What units are taken for: every such place can find none."""
EXECUTOR = (
    "step raises before writing",
    "step raises after writing",
    "rows missing",
    "token count wrong",
    "token out of vocabulary",
    "forced tokens miscounted",
    "row error",
)
# What is seldom asked for fails more often than the rate says.
RARE = {"cut copy": 10.0, "fork copy": 4.0, "tail copy": 2.0, "restore": 2.0}
OUTSIDE = ("move lost", "matchers lost", "client lost", "clock jump", "process killed")
SITES = (*(f"allocate: {purpose}" for purpose in ALLOCATIONS), *EXECUTOR, *OUTSIDE)


class Faults:
    """Draws faults and counts them."""

    __slots__ = ("counts", "rate", "rng")

    def __init__(self, rng: Random, rate: float) -> None:
        self.rng = rng
        self.rate = rate
        self.counts = dict.fromkeys(SITES, 0)

    def strike(self, site: str, weight: float = 1.0, rng: Random | None = None) -> bool:
        """Whether this site fails now; `rng` is for sites that have a chance of their own."""
        if self.rate and (rng or self.rng).random() < self.rate * weight:
            self.counts[site] += 1
            return True
        return False

    def guard(self, ledger: Ledger) -> None:
        """Let allocations fail, by what they are for."""

        def gate(_pool: Pool, _count: int) -> bool:
            purpose = ledger.purpose
            return not self.strike(f"allocate: {purpose}", RARE.get(purpose, 1.0))

        for pool in ledger.pools.values():
            pool.guard(gate)

    @property
    def total(self) -> int:
        """How many faults have struck."""
        return sum(self.counts.values())
