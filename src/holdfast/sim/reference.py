"""The reference: what every conversation must say, worked out without any memory.

A client's view of one session: its committed tokens, the turn in flight, and what the fake model must say
next. It hears the same events as a client and complains when they are not what they must be.
"""

from __future__ import annotations

from holdfast.sim.content import EMPTY, extend, next_token, stops


class Mismatch(Exception):
    """A transcript is not what the model says without memory."""


class Conversation:
    """One session as its client sees it."""

    __slots__ = ("before", "boundaries", "contents", "last", "said", "session_id", "tokens", "turn_id", "vocabulary")

    def __init__(self, session_id: str, vocabulary: int) -> None:
        self.session_id = session_id
        self.vocabulary = vocabulary
        self.tokens: list[int] = []
        self.contents: list[int] = [EMPTY]
        self.boundaries: list[int] = []
        self.turn_id: str | None = None
        self.said = 0
        self.last: tuple[int, int] | None = None
        self.before: tuple[tuple[int, int] | None, int] = (None, 0)

    def _append(self, token: int) -> None:
        self.tokens.append(token)
        self.contents.append(extend(self.contents[-1], token))

    def _cut(self, length: int) -> None:
        del self.tokens[length:], self.contents[length + 1 :]

    def begin(self, turn_id: str, tokens: tuple[int, ...]) -> None:
        """A turn was accepted."""
        self.turn_id = turn_id
        self.before = (self.last, self.said)
        self.last = (len(self.tokens), len(self.tokens) + len(tokens))
        self.said = 0
        for token in tokens:
            self._append(token)

    def hear(self, tokens: list[int]) -> None:
        """The model says something: it must be what it says without memory."""
        for token in tokens:
            expected = next_token(self.contents[-1], self.vocabulary)
            if token != expected:
                raise Mismatch(f"token {len(self.tokens)} of {self.session_id} is {token}, must be {expected}")
            self._append(token)
            self.said += 1

    def finish(self, reason: str) -> None:
        """The turn ended well."""
        if (reason == "stop") != stops(self.contents[-1]):
            raise Mismatch(f"{self.session_id} finished with {reason!r}")
        self.boundaries.append(len(self.tokens))
        self.turn_id = None

    def end(self, keep: int | None) -> None:
        """The turn was aborted or failed: rolled back, or cut to `keep` generated tokens."""
        assert self.last is not None
        start, input_end = self.last
        if keep is None:
            self._cut(start)
            self.last = None
        else:
            self._cut(input_end + keep)
            self.said = keep
            self.boundaries.append(len(self.tokens))
        self.turn_id = None

    def withdraw(self) -> None:
        """The turn ended before it began: it is as if it had never been asked for."""
        self.end(None)
        self.last, self.said = self.before

    def cut_last(self, keep: int | None) -> None:
        """The last finished turn is cut after the fact."""
        self.boundaries.pop()
        self.end(keep)

    def rewind(self, turns: int) -> None:
        """Only the first `turns` turns remain."""
        self._cut(self.boundaries[turns - 1] if turns else 0)
        del self.boundaries[turns:]
        self.last = None

    def fork(self, session_id: str, turns: int) -> Conversation:
        """The same conversation up to an earlier turn, under another name."""
        other = Conversation(session_id, self.vocabulary)
        length = self.boundaries[turns - 1] if turns else 0
        other.tokens = self.tokens[:length]
        other.contents = self.contents[: length + 1]
        other.boundaries = self.boundaries[:turns]
        return other
