"""Realtime messages on their way from the API process that kept them to the one that its client came to.

    asking process --FetchMissed--> engine --GiveMissed--> all other API processes
    asking process <--Done--------- engine <--Missed------ each of them

API processes know engines and not each other, so the engine that has the session passes the question on. The
first answer with messages is the answer; without any, `None` is, once all have answered, are gone, or have
had their time. Pure bookkeeping, used by `peers` alone.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.server.link import wire

__all__ = ["TICKS_MAX", "MissedMessages"]

TICKS_MAX = 3
"""Ticks of the engine's clock after which nothing more is waited for."""


class _Question:
    """A question that is not answered yet."""

    __slots__ = ("ticks", "waits_for")

    def __init__(self, waits_for: set[int]) -> None:
        self.waits_for = waits_for
        """The API processes that have not answered, by the prefix of their calls."""
        self.ticks = 0


class MissedMessages:
    """The questions of all API processes, by the number of their call."""

    __slots__ = ("_questions",)

    def __init__(self) -> None:
        self._questions: dict[int, _Question] = {}

    def ask(self, call: int, others: Iterable[int]) -> list[wire.Done]:
        """A question to other API processes; it is answered at once if there are none."""
        self._questions[call] = _Question(set(others))
        return self._settled(call)

    def hear(self, prefix: int, missed: wire.Missed) -> list[wire.Done]:
        """An answer; one that is not waited for is ignored."""
        question = self._questions.get(missed.asked)
        if question is None or prefix not in question.waits_for:
            return []
        if missed.seq:
            del self._questions[missed.asked]
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
        for question in self._questions.values():
            question.ticks += 1
            if question.ticks > TICKS_MAX:
                question.waits_for.clear()
        return [done for call in list(self._questions) for done in self._settled(call)]

    def _settled(self, call: int) -> list[wire.Done]:
        """The answer to a question that nobody is left to answer."""
        if self._questions[call].waits_for:
            return []
        del self._questions[call]
        return [wire.Done(call)]
