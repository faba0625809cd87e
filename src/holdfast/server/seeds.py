"""Seeds for turns that bring none, drawn from the server's own (`--seed`), so that a run can be repeated.

Every session has a sequence of its own, known by the name that its client gave it, or else by its place among
those that its tenant opened without one; a tenant's requests without a session share one more. The n-th turn
of a sequence always gets the same seed, whatever other sessions and tenants do meanwhile. Turns that bring a
seed, and greedy ones, draw nothing. Without a seed of the server's, the engine draws as chance has it. Used
by the service, on the event loop.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from holdfast.engine.sampling import SEED_MAX, Sampling

__all__ = ["SeedSequence", "Seeds"]


class SeedSequence:
    """One sequence of seeds; `drawn` of them have been given out."""

    __slots__ = ("drawn", "name")

    def __init__(self, name: str, drawn: int = 0) -> None:
        self.name = name
        self.drawn = drawn


class Seeds:
    """What a server of one seed gives its turns."""

    def __init__(self, seed: int | None) -> None:
        self._seed = seed
        self._requests: dict[str, SeedSequence] = {}
        self._unnamed: dict[str, int] = {}

    def of_requests(self, tenant: str) -> SeedSequence:
        """The sequence of a tenant's requests without a session."""
        return self._requests.setdefault(tenant, SeedSequence(f"{tenant}#requests"))

    def of_session(self, tenant: str, name: str | None, turns: int = 0) -> SeedSequence:
        """The sequence of a session: `name` is what its client called it, `turns` how many it has already."""
        if name is not None:
            return SeedSequence(f"{tenant}/{name}", turns)
        number = self._unnamed[tenant] = self._unnamed.get(tenant, 0) + 1
        return SeedSequence(f"{tenant}#session {number}")

    def seeded(self, sampling: Sampling, sequence: SeedSequence) -> Sampling:
        """The sampling of a turn, with the next seed of its sequence if it needs one."""
        if self._seed is None or sampling.seed is not None or sampling.temperature == 0:
            return sampling
        sequence.drawn += 1
        drawn = hashlib.blake2b(f"{self._seed} {sequence.name} {sequence.drawn}".encode(), digest_size=8)
        return replace(sampling, seed=int.from_bytes(drawn.digest()) & SEED_MAX)
