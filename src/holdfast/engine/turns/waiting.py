"""Waiting for a session: when a verb or a turn may act on it, and the queue of those that cannot yet.

The core cuts, forks and moves a session at once, and drops memory that it cannot use at that moment: the last
token while its row is in flight, a copy that is not complete, memory on another tier. A client's verb has
time for a few steps. So it waits until rows and copies have settled and usable memory is back on the device
(`MemoryWait`, core/recalls.py). A turn may wait one step for the turn before it to be aborted (`TurnWait`).

What waits is queued by session (`SessionQueues`). Used by `verbs`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple

from holdfast.core.scheduler import Scheduler
from holdfast.core.session import Life, Session
from holdfast.core.turn import KEEP_ALL, Turn, TurnEvent

__all__ = [
    "ATTEMPTS_MAX",
    "Length",
    "MemoryWait",
    "SessionQueues",
    "TurnWait",
    "end_of_turn",
    "is_aborting",
    "kept_of_turn",
    "never_spent",
    "no_memory",
    "turn_before",
]

Length = Callable[[Session], int]
"""How much of a session's history a verb continues from; 0 if it needs no memory, or will be refused."""


def no_memory(_: Session) -> int:
    """The verb moves memory, or needs none."""
    return 0


def end_of_turn(turns: int | None) -> Length:
    """A rewind or a fork continues from the end of turn `turns`, or of the last."""

    def length(session: Session) -> int:
        count = len(session.boundaries) if turns is None else turns
        return session.boundaries[count - 1] if 0 < count <= len(session.boundaries) else 0

    return length


def kept_of_turn(keep: int | None, turn_id: str | None) -> Length:
    """An interruption of the last turn, which has ended, continues from what is kept of it."""

    def length(session: Session) -> int:
        last = session.last
        if last is None or keep == KEEP_ALL or turn_id not in (None, last.request.turn_id):
            return 0
        return last.known_before if keep is None else last.input_end + min(keep, last.generated)

    return length


class MemoryWait:
    """One verb on one session, until it can act without dropping memory that it could keep.

    The verb is meant for the session that has the name now. If that session is closed and another one gets
    the name, the wait is over, and the verb is refused.

    Where the device will never have room for the memory, or its file cannot be read, the verb acts without
    it, and the history is computed again.
    """

    __slots__ = ("_forks", "_length", "_scheduler", "session", "session_id")

    def __init__(
        self, scheduler: Scheduler, session_id: str, length: Length = no_memory, forks: bool = False
    ) -> None:
        self._scheduler = scheduler
        self.session_id = session_id
        self.session = scheduler.registry.sessions.get(session_id)
        self._length = length
        self._forks = forks

    def over(self, now: float) -> bool:
        """Whether the verb may act. Call it between steps until it returns True."""
        session = self._scheduler.registry.sessions.get(self.session_id)
        if session is None or session is not self.session:
            return True
        return self._scheduler.ready(self.session_id, self._length(session), self._forks, now)


def turn_before(scheduler: Scheduler, session_id: str) -> Turn | None:
    """The turn in flight on a session, unless the session is being closed.

    An open turn is not in flight: the next one goes on from it. One that is being taken back is.
    """
    session = scheduler.registry.sessions.get(session_id)
    turn = None if session is None or session.life is Life.CLOSING else session.turn
    return None if turn is not None and turn.is_open and not is_aborting(turn) else turn


class TurnWait:
    """One turn on one session, until the turn before it has ended or is known to go on.

    A client that aborts a turn and starts the next at once is heard in either order: the abort comes on one
    connection, the new turn on another. So a turn on a busy session waits for one step, and is refused only
    if no abort of the turn before has come by then. The step counts from when that turn is first seen: it
    may have begun while this one waited for something else.
    """

    __slots__ = ("_before", "_scheduler", "_settled", "session", "session_id")

    def __init__(self, scheduler: Scheduler, session_id: str) -> None:
        self._scheduler = scheduler
        self.session_id = session_id
        self.session = scheduler.registry.sessions.get(session_id)
        self._before = turn_before(scheduler, session_id)
        self._settled = scheduler.registry.ledger.settled

    def over(self) -> bool:
        """Whether the turn is to be submitted now, or refused."""
        settled = self._scheduler.registry.ledger.settled
        before = turn_before(self._scheduler, self.session_id)
        if before is not self._before:
            self._before, self._settled = before, settled
        return before is None or (settled != self._settled and not is_aborting(before))


def is_aborting(turn: Turn) -> bool:
    """Whether a turn was aborted and waits only for its rows in flight."""
    return turn.ending is not None and turn.ending.event is TurnEvent.ABORT


def never_spent() -> bool:
    """A budget without a limit."""
    return False


ATTEMPTS_MAX = 64
"""Maximum attempts of one `retry`."""

Attempt = Callable[[], bool]
"""Acts if it may; whether it did."""


class Entry(NamedTuple):
    """A verb or turn that waits; `number` is its place in the order of arrival."""

    number: int
    attempt: Attempt


class SessionQueue:
    """The verbs and turns that wait for one session."""

    __slots__ = ("turns", "verbs")

    def __init__(self) -> None:
        self.turns: deque[Entry] = deque()
        self.verbs: deque[Entry] = deque()

    def __bool__(self) -> bool:
        return bool(self.turns or self.verbs)


class SessionQueues:
    """All verbs and turns that wait, one queue a session, tried a bounded number at a time.

    A queue is in order of arrival. A turn waits for everything ahead of it. A verb waits for verbs ahead of
    it; it passes turns that wait while another turn is in flight, since the verb may be what ends that turn.
    So trying a queue costs one failed attempt of each kind and one attempt for each entry that leaves,
    however long it is, and a `retry` makes `ATTEMPTS_MAX` attempts at most. Queues are tried in rotation.

    `is_busy` says whether a session that stays open has a turn in flight.
    """

    __slots__ = ("_is_busy", "_number", "_queues")

    def __init__(self, is_busy: Callable[[str], bool]) -> None:
        self._is_busy = is_busy
        self._queues: OrderedDict[str, SessionQueue] = OrderedDict()
        self._number = 0

    def __bool__(self) -> bool:
        return bool(self._queues)

    def add_turn(self, session_id: str, attempt: Attempt) -> None:
        """Try a turn now; queue it if something is ahead of it, or it cannot act yet."""
        if session_id in self._queues or not attempt():
            self._queue(session_id).turns.append(self._entry(attempt))

    def add_verb(self, session_id: str, attempt: Attempt) -> None:
        """Try a verb now, or queue it; entries that wait already are not tried."""
        ahead = self._queues.get(session_id)
        behind = ahead is not None and (bool(ahead.verbs) or not self._is_busy(session_id))
        if behind or not attempt():
            self._queue(session_id).verbs.append(self._entry(attempt))

    def _queue(self, session_id: str) -> SessionQueue:
        queue = self._queues.get(session_id)
        if queue is None:
            queue = self._queues[session_id] = SessionQueue()
        return queue

    def _entry(self, attempt: Attempt) -> Entry:
        self._number += 1
        return Entry(self._number, attempt)

    def retry(self, spent: Callable[[], bool]) -> None:
        """Try each queue at most once, until `spent` or `ATTEMPTS_MAX`; one attempt at least."""
        left = ATTEMPTS_MAX
        for _ in range(min(left, len(self._queues))):
            session_id, queue = next(iter(self._queues.items()))
            self._queues.move_to_end(session_id)
            left = self._retry_queue(session_id, queue, left)
            if not queue:
                del self._queues[session_id]
            if left <= 0 or spent():
                return

    def _retry_queue(self, session_id: str, queue: SessionQueue, left: int) -> int:
        """Try a queue from its head; returns how many attempts are left."""
        turns, verbs = queue.turns, queue.verbs
        turn_waits = False
        while left > 0:
            if turns and not turn_waits and (not verbs or turns[0].number < verbs[0].number):
                left -= 1
                if turns[0].attempt():
                    turns.popleft()
                else:
                    turn_waits = True
            elif verbs and (not turn_waits or self._is_busy(session_id)):
                left -= 1
                if not verbs[0].attempt():
                    break
                verbs.popleft()
            else:
                break
        return left
