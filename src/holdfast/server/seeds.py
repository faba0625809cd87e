"""Seeds for turns without one, derived from the server's seed (`--seed`), so that a run is reproducible.

Every session has its own sequence, identified by the client's name for it, or by its index among the sessions
that the tenant opened without a name; a tenant's one-shot requests share one sequence. The n-th turn of a
sequence always gets the same seed, independent of other sessions and tenants. Turns with a seed and greedy
turns draw nothing; the seed of a turn that fails to start is reused. Without `--seed` the engine draws random
seeds. Used by the service, on the event loop.
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
    """One sequence of seeds; `drawn` have been given out, some of them returned."""

    __slots__ = ("drawn", "name", "returned")

    def __init__(self, name: str, drawn: int = 0) -> None:
        self.name = name
        self.drawn = drawn
        self.returned: list[int] = []
        """A heap of indices whose turns did not start."""

    def take(self) -> int:
        """The first free index."""
        if self.returned:
            return heapq.heappop(self.returned)
        self.drawn += 1
        return self.drawn

    def give_back(self, place: int) -> None:
        """Return the index of a turn that did not start."""
        heapq.heappush(self.returned, place)


class Loan:
    """The sampling of a turn about to start; its seed is `kept` if it does."""

    __slots__ = ("kept", "sampling")

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self.kept = False


class Seeds:
    """The seed sequences of a server."""

    def __init__(self, seed: int | None) -> None:
        self._seed = seed
        self._requests: dict[str, SeedSequence] = {}
        self._unnamed: dict[str, int] = {}

    def of_requests(self, tenant: str) -> SeedSequence:
        """The sequence of a tenant's requests without a session."""
        return self._requests.setdefault(tenant, SeedSequence(f"{tenant}#requests"))

    def of_session(self, tenant: str, name: str | None, turns: int = 0) -> SeedSequence:
        """The sequence of a session; `name` is the client's.

        `turns` is how many it has already; a restored session has drawn that many seeds.
        """
        if name is not None:
            return SeedSequence(f"{tenant}/{name}", turns)
        number = self._unnamed[tenant] = self._unnamed.get(tenant, 0) + 1
        return SeedSequence(f"{tenant}#session {number}")

    @contextmanager
    def lend(self, sampling: Sampling, sequence: SeedSequence) -> Iterator[Loan]:
        """The sampling of a turn, with the next seed of its sequence if it needs one.

        The seed is returned at the end of the block unless `kept` was set.
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
        """The sampling of a turn that is certain to start."""
        with self.lend(sampling, sequence) as loan:
            loan.kept = True
        return loan.sampling
