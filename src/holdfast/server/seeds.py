"""Seeds for turns that bring none, drawn from the server's own (`--seed`), so that a run can be repeated.

Every session has a sequence of its own, known by the name that its client gave it, or else by its place among
those that its tenant opened without one; a tenant's requests without a session share one more. The n-th turn
of a sequence always gets the same seed, whatever other sessions and tenants do meanwhile. Turns that bring a
seed, and greedy ones, draw nothing; the seed of one that does not begin is the next one's. Without a seed of
the server's, the engine draws as chance has it. Used by the service, on the event loop.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from holdfast.engine.sampling import SEED_MAX, Sampling

__all__ = ["Loan", "SeedSequence", "Seeds"]


class SeedSequence:
    """One sequence of seeds; `drawn` of them have been given out, and some of those given back."""

    __slots__ = ("drawn", "name", "returned")

    def __init__(self, name: str, drawn: int = 0) -> None:
        self.name = name
        self.drawn = drawn
        self.returned: list[int] = []
        """A heap of places whose turns did not begin."""

    def take(self) -> int:
        """The first place that no turn has."""
        if self.returned:
            return heapq.heappop(self.returned)
        self.drawn += 1
        return self.drawn

    def give_back(self, place: int) -> None:
        """The turn that got this place did not begin."""
        heapq.heappush(self.returned, place)


class Loan:
    """The sampling of a turn that is about to begin; its seed is kept if it does."""

    __slots__ = ("kept", "sampling")

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self.kept = False


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
        """The sequence of a session: `name` is what its client called it.

        `turns` is how many it has already, which is taken for how many were drawn where nobody knows that.
        """
        if name is not None:
            return SeedSequence(f"{tenant}/{name}", turns)
        number = self._unnamed[tenant] = self._unnamed.get(tenant, 0) + 1
        return SeedSequence(f"{tenant}#session {number}")

    @contextmanager
    def lend(self, sampling: Sampling, sequence: SeedSequence) -> Iterator[Loan]:
        """The sampling of a turn, with the next seed of its sequence if it needs one.

        Whoever does not set `kept` gives the seed back at the end of the block.
        """
        if self._seed is None or sampling.seed is not None or sampling.temperature == 0:
            yield Loan(sampling)
            return
        place = sequence.take()
        drawn = hashlib.blake2b(f"{self._seed} {sequence.name} {place}".encode(), digest_size=8)
        loan = Loan(replace(sampling, seed=int.from_bytes(drawn.digest()) & SEED_MAX))
        try:
            yield loan
        finally:
            if not loan.kept:
                sequence.give_back(place)

    def seeded(self, sampling: Sampling, sequence: SeedSequence) -> Sampling:
        """The sampling of a turn that begins for certain."""
        with self.lend(sampling, sequence) as loan:
            loan.kept = True
        return loan.sampling
