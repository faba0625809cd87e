"""The reference: the expected text of every conversation, computed without memory management.

A client's view of one session: its committed tokens, the turn in flight, and the next tokens of the fake
model. It receives the same events as a client and reports unexpected ones.
"""

from __future__ import annotations

from typing import NamedTuple

from holdfast.core.retention import Retention
from holdfast.core.turn import KEEP_ALL, Turn
from holdfast.sim.constraint import Matcher
from holdfast.sim.content import EMPTY, extend, next_token, stops

NEVER = -1


class Mismatch(Exception):
    """A transcript differs from the reference."""


class Ask(NamedTuple):
    """How a client wants its turn to end: rolled back, or with so many generated tokens."""

    keep: int | None


class Conversation:
    """One session as its client sees it.

    `boundaries` are the lengths at which its turns end, `inputs` those at which their inputs do. `planned_at`
    has the retracts of its turn at its last row. `listening` is its open turn: nothing of that is said yet.
    """

    __slots__ = (
        "asked",
        "before",
        "began",
        "boundaries",
        "contents",
        "inputs",
        "last",
        "listening",
        "matcher",
        "planned_at",
        "rested_at",
        "retention",
        "said",
        "session_id",
        "tenant",
        "tokens",
        "turn_id",
        "vocabulary",
        "volatile",
    )

    def __init__(self, session_id: str, vocabulary: int, tenant: str = "", volatile: bool = False) -> None:
        self.session_id = session_id
        self.tenant = tenant
        self.volatile = volatile
        self.vocabulary = vocabulary
        self.tokens: list[int] = []
        self.contents: list[int] = [EMPTY]
        self.boundaries: list[int] = []
        self.inputs: list[int] = []
        self.turn_id: str | None = None
        self.listening: str | None = None
        self.matcher: Matcher | None = None
        self.said = 0
        self.last: tuple[int, int] | None = None
        self.before: tuple[tuple[int, int] | None, int] = (None, 0)
        self.asked: Ask | None = None
        self.planned_at = NEVER
        self.began = 0
        self.rested_at = 0.0
        self.retention = Retention()

    def _append(self, token: int) -> None:
        self.tokens.append(token)
        self.contents.append(extend(self.contents[-1], token))

    def _cut(self, length: int) -> None:
        del self.tokens[length:], self.contents[length + 1 :]

    def begin(self, turn_id: str, tokens: tuple[int, ...], matcher: Matcher | None = None) -> None:
        """A turn was accepted; its `matcher` constrains it."""
        self.turn_id = turn_id
        self.matcher = matcher
        self.before = (self.last, self.said)
        self.last = (len(self.tokens), len(self.tokens) + len(tokens))
        self.said = 0
        self.asked = None
        self.planned_at = NEVER
        for token in tokens:
            self._append(token)

    def ask_to_end(self, keep: int | None) -> None:
        """The client interrupts its turn; only its first word counts."""
        if self.asked is None:
            self.asked = Ask(keep)

    def planned(self, start: int, retracts: int) -> None:
        """A row of the turn is planned; the first since it was admitted tells from where it goes on."""
        if self.planned_at != retracts:
            self.planned_at = retracts
            self.began = start

    def hear(self, tokens: list[int]) -> None:
        """The model says something: it must be what it says without memory, under the turn's constraint."""
        for token in tokens:
            expected = next_token(self.contents[-1], self.vocabulary)
            if self.matcher is not None:
                expected = self.matcher.mask(expected)
                self.matcher.accept([expected])
            if token != expected:
                raise Mismatch(
                    f"token {len(self.tokens)} of {self.session_id} is {token}, must be {expected}"
                )
            self._append(token)
            self.said += 1

    def finish(self, reason: str) -> None:
        """The turn ended well."""
        if (reason == "stop") != (self.said > 0 and stops(self.contents[-1])):
            raise Mismatch(f"{self.session_id} finished with {reason!r}")
        self._end_here()
        self.turn_id = None

    def _end_here(self) -> None:
        """The turn stands, up to where the tokens end."""
        assert self.last is not None
        self.boundaries.append(len(self.tokens))
        self.inputs.append(self.last[1])

    def interrupted(self, event: str, reason: str, turn: Turn) -> None:
        """The turn was aborted or failed. What is left of it must be what its client asked for."""
        running = self.planned_at == turn.retracts
        has_run = self.planned_at != NEVER and bool(turn.request.tokens)
        if not (running or has_run or self.said):
            self._withdraw()
        elif event == "failed" or reason in {"closed", "expired"}:
            self.end(None)
        elif reason == "deadline":
            keep = turn.request.on_abort
            self.end(keep if keep is None else min(keep, self.said))
        elif self.asked is None:
            raise Mismatch(f"{turn.request.turn_id} was aborted, but its client had not asked for it")
        else:
            self.end(self.said if self.asked.keep == KEEP_ALL else self.asked.keep)

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
            self._end_here()
        self.turn_id = None

    def _withdraw(self) -> None:
        """The turn ended before it began: it is as if it had never been asked for."""
        self.end(None)
        self.last, self.said = self.before

    def cut_last(self, keep: int | None) -> None:
        """The last finished turn is cut after the fact."""
        self.boundaries.pop()
        self.inputs.pop()
        self.end(keep)

    def rewind(self, turns: int) -> None:
        """Only the first `turns` turns remain."""
        if turns == len(self.boundaries):
            return
        self._cut(self.boundaries[turns - 1] if turns else 0)
        del self.boundaries[turns:], self.inputs[turns:]
        self.last = None

    def compact(self, first: int, last: int, tokens: tuple[int, ...]) -> None:
        """Turns `first` to `last` give way to one that says `tokens` and gets no answer."""
        cut = self.boundaries[first - 2] if first > 1 else 0
        end = self.boundaries[last - 1]
        later = self.tokens[end:]
        self._cut(cut)
        for token in (*tokens, *later):
            self._append(token)
        moved = cut + len(tokens) - end
        for ends in (self.boundaries, self.inputs):
            ends[first - 1 :] = [cut + len(tokens), *(each + moved for each in ends[last:])]
        self.last = None

    def fork(self, session_id: str, turns: int) -> Conversation:
        """The same conversation up to an earlier turn, under another name."""
        other = Conversation(session_id, self.vocabulary, self.tenant, self.volatile)
        length = self.boundaries[turns - 1] if turns else 0
        other.tokens = self.tokens[:length]
        other.contents = self.contents[: length + 1]
        other.boundaries = self.boundaries[:turns]
        other.inputs = self.inputs[:turns]
        other.retention = self.retention
        return other

    def fork_at(self, session_id: str, length: int) -> Conversation:
        """The same conversation up to a token, under another name."""
        other = self.fork(session_id, len(self.boundaries))
        other.cut_to(length)
        return other

    def cut_to(self, length: int) -> None:
        """Only the first `length` tokens remain; a turn that reaches past them ends there."""
        if length == len(self.tokens):
            return
        self._cut(length)
        turns = sum(boundary <= length for boundary in self.boundaries)
        cut = self.inputs[turns : turns + 1]
        del self.boundaries[turns:], self.inputs[turns:]
        if length and self.boundaries[-1:] != [length]:
            self.boundaries.append(length)
            self.inputs.append(min(length, *cut))
        self.last = None

    @property
    def last_start(self) -> int:
        """The length at which the last turn begins."""
        return self.boundaries[-2] if len(self.boundaries) > 1 else 0

    def turns(self) -> list[tuple[list[int], list[int]]]:
        """The turns that stand: what was said to the model, and what it said."""
        starts = [0, *self.boundaries][: len(self.boundaries)]
        return [
            (self.tokens[start:middle], self.tokens[middle:end])
            for start, middle, end in zip(starts, self.inputs, self.boundaries, strict=True)
        ]

    def come_back(self) -> None:
        """The process was killed and restarted: the turn in flight is lost, finished turns stay."""
        self.listening = None
        self._cut(self.boundaries[-1] if self.boundaries else 0)
        self.turn_id = None
        turns = self.turns()
        self.last = None
        if turns:
            said_in, said_out = turns[-1]
            self.said = len(said_out)
            self.last = (self.inputs[-1] - len(said_in), self.inputs[-1])
