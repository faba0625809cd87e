"""The history of a session in the simulation: a digest of its turns, and the repeatable answers.

A history names its version, so a commit on top of another history is noticed. Only the last
digests and answers are kept: the clients of the simulation rewind by one turn, and have one request at a
time. Used by clients, replicas and the checks of the store.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

__all__ = ["NEW", "Answer", "Answers", "History", "Op", "OpKind", "recognised"]

DIGESTS_KEPT = 4
KEYS_KEPT = 3
MASK = (1 << 61) - 1


class OpKind(Enum):
    """The kind of a client's request."""

    OPEN = "open"
    TURN = "turn"
    REWIND = "rewind"
    FORK = "fork"
    CLOSE = "close"


class Op(NamedTuple):
    """A request: `key` is its turn id or request id, `child` the session that a fork makes."""

    client: int
    key: int
    kind: OpKind
    session: str
    tenant: str
    child: str = ""


class Answer(NamedTuple):
    """The answer to a client: the number of turns and their digest."""

    turns: int
    digest: int


Answers = tuple[tuple[int, Answer], ...]


class History(NamedTuple):
    """A version of a session."""

    version: int
    base: int
    turns: int
    digests: tuple[int, ...]
    keys: Answers

    @property
    def answer(self) -> Answer:
        """What it is told as."""
        return Answer(self.turns, self.digests[-1])

    def after(self, op: Op, version: int) -> History:
        """The history after a turn or a rewind, or the parent's after a fork."""
        turns, digests = self.turns, self.digests
        if op.kind is OpKind.TURN:
            turns += 1
            digests = (*digests[-DIGESTS_KEPT + 1 :], ((digests[-1] * 1_000_003) ^ op.key) & MASK)
        elif op.kind is OpKind.REWIND:
            turns -= 1
            digests = digests[:-1]
        keys = (*self.keys[-KEYS_KEPT + 1 :], (op.key, Answer(turns, digests[-1])))
        return History(version, self.version, turns, digests, keys)

    def fork(self, op: Op, version: int) -> History:
        """The history of a fork."""
        return History(version, self.version, self.turns, self.digests, ((op.key, self.answer),))


NEW = History(0, 0, 0, (7,), ())
"""An empty session."""


def recognised(history: History, key: int) -> Answer | None:
    """The answer to a request that was carried out earlier, by any owner."""
    for known, answer in history.keys:
        if known == key:
            return answer
    return None
