"""The text of a hidden session as the API process keeps it: digests of stretches, and where each ends.

`server/text/trails.py` compares a rendered conversation with it. Used by `found_sessions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from holdfast.server.text import jobs

__all__ = ["NO_TRAIL", "STRETCHES_MAX", "Trail"]

STRETCHES_MAX = 128
"""Half of a longer trail is merged into one stretch when it is found."""


class Trail(NamedTuple):
    """The stretches of a session's text, the token at which each ends, and where its last turn begins.

    `answered`: the last stretch is an answer.
    """

    stretches: tuple[jobs.Stretch, ...] = ()
    ends: tuple[int, ...] = ()
    last: int = 0
    answered: bool = False

    @property
    def known(self) -> int:
        """How many tokens it covers."""
        return self.ends[-1] if self.ends else 0

    def first(self, count: int) -> Trail:
        """Its first `count` stretches."""
        answered = self.answered and count >= len(self.stretches)
        return Trail(self.stretches[:count], self.ends[:count], min(count, self.last), answered)

    def with_turn(self, stretches: Sequence[jobs.Stretch], ends: Sequence[int]) -> Trail:
        """With the input of one more turn; stretches without text are left out."""
        added = [(each, end) for each, end in zip(stretches, ends, strict=True) if each.characters]
        return Trail(
            (*self.stretches, *(each for each, _ in added)),
            (*self.ends, *(end for _, end in added)),
            len(self.stretches),
        )

    def with_answer(self, tokens: list[int], before: int | None) -> Trail:
        """With the answer of its last turn."""
        answer = jobs.Stretch(tokens=tokens, before=before)
        return Trail((*self.stretches, answer), (*self.ends, self.known + len(tokens)), self.last, True)

    def within(self, known: int) -> Trail:
        """The part of it within the first `known` tokens."""
        return self.first(sum(end <= known for end in self.ends))

    @property
    def merge(self) -> tuple[int, int]:
        """The stretches to be merged into one: the messages of the last turn, or half of a long trail."""
        count = len(self.stretches)
        if count > STRETCHES_MAX:
            return 0, min(count // 2, self.last)
        first, last = self.last, count - self.answered - 1
        return (first, last) if self.answered and last - first > 1 else (0, 0)

    def settled(self, found: jobs.Found) -> Trail:
        """With what a text process has found out: the digest of the last answer, and merged stretches."""
        stretches, ends, last = list(self.stretches), list(self.ends), self.last
        if found.said is not None:
            stretches[-1] = found.said
        if found.merged is not None:
            first, end = self.merge
            stretches[first:end] = [found.merged]
            ends[first:end] = [ends[end - 1]]
            last = last if first >= last else last - (end - first) + 1
        return Trail(tuple(stretches), tuple(ends), last, self.answered)

    def fields(self) -> jobs.TrailFields:
        """As a text process takes it."""
        return jobs.TrailFields(list(self.stretches), self.merge)


NO_TRAIL = Trail()
