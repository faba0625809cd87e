"""Constrained turns of the simulation: the allowed tokens depend on all earlier tokens of the turn.

A matcher's state is a checksum of its tokens: a lost or repeated token changes all later masks. After some
tokens a run is forced, as a grammar does where only one token is allowed. The
executor and the client of a turn have a matcher each, and must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random

from holdfast.sim.content import EMPTY, extend

RUN_EVERY = 3
RUN_MAX = 9
TAKE_RUNS = 0.8
"""How many of the constrained turns take forced tokens at once; the others sample them one at a time."""


class Matcher:
    """The constraint of one turn, and how far the turn has come in it."""

    __slots__ = ("_pending", "_state", "_vocabulary", "accepted", "takes_runs")

    def __init__(self, vocabulary: int, seed: int = 0, takes_runs: bool = True) -> None:
        self._vocabulary = vocabulary
        self._state = extend(EMPTY, seed)
        self._pending: list[int] = []
        self.accepted = 0
        self.takes_runs = takes_runs

    def mask(self, token: int) -> int:
        """The token that is sampled where the model alone would say `token`."""
        return self._pending[0] if self._pending else (token + self._state) % self._vocabulary

    def accept(self, tokens: Iterable[int]) -> None:
        """Take tokens of the turn, in order."""
        for token in tokens:
            self.accepted += 1
            self._state = state = extend(self._state, token)
            if self._pending:
                del self._pending[0]
            elif state % RUN_EVERY == 0:
                count = 1 + (state >> 8) % RUN_MAX
                self._pending = [(state >> 16 + 4 * place) % self._vocabulary for place in range(count)]

    def forced(self) -> list[int]:
        """The tokens that come next, whatever the model says."""
        return list(self._pending)

    def copy(self) -> Matcher:
        """Another matcher at the same place."""
        other = Matcher(self._vocabulary, takes_runs=self.takes_runs)
        other._state, other._pending, other.accepted = self._state, list(self._pending), self.accepted
        return other


MatcherOf = Callable[[str], Matcher | None]
"""A fresh matcher for the turn of this id; None if the turn is not constrained."""


def unconstrained(_turn_id: str) -> Matcher | None:
    """No turn is constrained."""
    return None


class Constraints:
    """Which turns of a world are constrained: none, half or all of them, as its seed says."""

    __slots__ = ("seed", "share", "vocabulary")

    def __init__(self, seed: int, vocabulary: int) -> None:
        self.seed = seed
        self.vocabulary = vocabulary
        self.share = Random(f"constraints {seed}").choice((0.0, 0.5, 1.0))

    def matcher(self, turn_id: str) -> Matcher | None:
        """A fresh matcher for a turn, the same whenever it is asked for."""
        rng = Random(f"constraint {self.seed} {turn_id}")
        if rng.random() >= self.share:
            return None
        return Matcher(self.vocabulary, rng.getrandbits(32), rng.random() < TAKE_RUNS)
