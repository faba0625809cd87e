"""A matcher in plain Python with state that depends on every token, for tests and simulation.

The allowed tokens are a function of all tokens so far: a matcher that missed a token or saw one twice allows
other tokens, so that tests notice. About two thirds of the vocabulary are allowed, every fifth
position forces one token, and the turn may end at every fourth.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.engine.constraints.masks import MaskRows

__all__ = ["ToyCompiled", "ToyMatcher"]

_FACTOR, _MODULUS = 1_103_515_245, (1 << 31) - 1
_FORCED_EVERY, _ACCEPTING_EVERY = 5, 4


class ToyMatcher:
    """Allows tokens by a running checksum of those before."""

    __slots__ = ("_end", "_ended", "_states", "_vocabulary", "_why")

    def __init__(self, vocabulary: int, end: int, seed: int = 0) -> None:
        self._vocabulary = vocabulary
        self._end = end
        self._states = [seed % _MODULUS]
        self._ended = False
        self._why = ""

    @property
    def accepting(self) -> bool:
        return not self.failed and (self._ended or (len(self._states) - 1) % _ACCEPTING_EVERY == 0)

    @property
    def complete(self) -> bool:
        return self._ended

    @property
    def failed(self) -> bool:
        return bool(self._why)

    @property
    def why(self) -> str:
        return self._why

    def accept(self, tokens: Sequence[int]) -> bool:
        for token in tokens:
            if self.failed:
                return False
            if not self._allows(token):
                self._why = f"token {token} is refused after {len(self._states) - 1} tokens"
                return False
            if token == self._end:
                self._ended = True
            else:
                self._states.append((self._states[-1] * _FACTOR + token + 1) % _MODULUS)
        return not self.failed

    def validate(self, tokens: Sequence[int]) -> int:
        kept, ended = len(self._states), self._ended
        count = 0
        while count < len(tokens) and not self.failed and self._allows(tokens[count]):
            self.accept(tokens[count : count + 1])
            count += 1
        del self._states[kept:]
        self._ended = ended
        return count

    def rollback(self, count: int) -> None:
        assert not self.failed and count <= len(self._states) - 1 + self._ended
        if count and self._ended:
            self._ended = False
            count -= 1
        if count:
            del self._states[-count:]

    def forced(self) -> list[int]:
        only = self._only()
        return [] if only is None else [only]

    def fill(self, rows: MaskRows, row: int) -> None:
        rows.clear(row)
        rows.allow(row, (token for token in range(self._vocabulary) if self._allows(token)))

    def _only(self) -> int | None:
        """The token that is forced here."""
        if self._ended or self.failed or self.accepting or self._states[-1] % _FORCED_EVERY:
            return None
        token = self._states[-1] // _FORCED_EVERY % self._vocabulary
        return token if token != self._end else (token + 1) % self._vocabulary

    def _allows(self, token: int) -> bool:
        if self._ended or self.failed or not 0 <= token < self._vocabulary:
            return False
        if token == self._end:
            return self.accepting
        only = self._only()
        if only is not None:
            return token == only
        return (self._states[-1] + token * 7) % 3 != 0


class ToyCompiled:
    """Makes toy matchers of one vocabulary."""

    def __init__(self, vocabulary: int, end: int, seed: int = 0) -> None:
        self._vocabulary = vocabulary
        self._end = end
        self._seed = seed

    @property
    def size_bytes(self) -> int:
        return 64

    def matcher(self, tokens: Sequence[int] = ()) -> ToyMatcher:
        made = ToyMatcher(self._vocabulary, self._end, self._seed)
        made.accept(tokens)
        return made
