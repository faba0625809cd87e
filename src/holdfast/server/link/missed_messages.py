"""Realtime messages on their way from the API process that kept them to the one that its client came to.

    asking process --FetchMissed--> engine --GiveMissed--> all other API processes
    asking process <--Done--------- engine <--Missed------ each of them

API processes know engines and not each other, so the engine that has the session passes the question on. The
first answer with messages is the answer. Without any, once all have answered, are gone or have had their
time, it is what a process left here when it ended (`KeepMissed`), within bounds; or else `None`. Pure
bookkeeping, used by `peers` alone.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.server.link import wire

__all__ = ["KEPT_BYTES_MAX", "KEPT_TICKS", "TICKS_MAX", "MissedMessages"]

TICKS_MAX = 3
"""Ticks of the engine's clock after which nothing more is waited for."""

KEPT_TICKS = 300
"""Ticks for which messages of a process that has ended are kept."""

KEPT_BYTES_MAX = 64 << 20


class _Question:
    """A question that is not answered yet."""

    __slots__ = ("session", "ticks", "waits_for")

    def __init__(self, session: str, waits_for: set[int]) -> None:
        self.session = session
        self.waits_for = waits_for
        """The API processes that have not answered, by the prefix of their calls."""
        self.ticks = 0


class MissedMessages:
    """The questions of all API processes, by the number of their call."""

    __slots__ = ("_kept", "_kept_bytes", "_questions", "_ticks")

    def __init__(self) -> None:
        self._questions: dict[int, _Question] = {}
        self._kept: dict[str, tuple[int, wire.KeepMissed]] = {}
        """What processes that ended have left, the oldest first, with the tick at which it goes."""
        self._kept_bytes = 0
        self._ticks = 0

    def keep(self, left: wire.KeepMissed) -> None:
        """Keep the messages of a process that ends; the oldest go if there are too many."""
        self._take(left.session)
        self._kept[left.session] = (self._ticks + KEPT_TICKS, left)
        self._kept_bytes += _size(left)
        while self._kept_bytes > KEPT_BYTES_MAX:
            self._take(next(iter(self._kept)))

    def _take(self, session: str) -> wire.KeepMissed | None:
        _, left = self._kept.pop(session, (0, None))
        if left is not None:
            self._kept_bytes -= _size(left)
        return left

    def ask(self, asked: wire.FetchMissed, others: Iterable[int]) -> list[wire.Done]:
        """A question to other API processes; it is answered at once if there are none."""
        self._questions[asked.call] = _Question(asked.session, set(others))
        return self._settled(asked.call)

    def hear(self, prefix: int, missed: wire.Missed) -> list[wire.Done]:
        """An answer; one that is not waited for is ignored."""
        question = self._questions.get(missed.asked)
        if question is None or prefix not in question.waits_for:
            return []
        if missed.seq:
            del self._questions[missed.asked]
            self._take(question.session)
            return [wire.Done(missed.asked, answer=(missed.seq, missed.messages))]
        question.waits_for.discard(prefix)
        return self._settled(missed.asked)

    def gone(self, prefix: int) -> list[wire.Done]:
        """An API process is gone: nobody waits for it, and it waits for nobody."""
        for call in [call for call in self._questions if call >> wire.CALL_BITS == prefix]:
            del self._questions[call]
        for question in self._questions.values():
            question.waits_for.discard(prefix)
        return [done for call in list(self._questions) for done in self._settled(call)]

    def tick(self) -> list[wire.Done]:
        """Some time has passed."""
        self._ticks += 1
        for session in [name for name, (until, _) in self._kept.items() if until < self._ticks]:
            self._take(session)
        for question in self._questions.values():
            question.ticks += 1
            if question.ticks > TICKS_MAX:
                question.waits_for.clear()
        return [done for call in list(self._questions) for done in self._settled(call)]

    def _settled(self, call: int) -> list[wire.Done]:
        """The answer to a question that nobody is left to answer."""
        if self._questions[call].waits_for:
            return []
        left = self._take(self._questions.pop(call).session)
        return [wire.Done(call, answer=None if left is None else (left.seq, left.messages))]


def _size(left: wire.KeepMissed) -> int:
    return sum(len(text) for _, text in left.messages)
