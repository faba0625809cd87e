"""What a verb waits for, so that it gives up no memory that it could keep.

The core cuts, forks and moves a session at once, as it finds it, and drops what it cannot use in that moment:
the last token while its row is in flight, what a copy has yet to complete, memory on another tier. A client's
verb has time for a few steps. So whoever carries one out first lets rows and copies settle, and has memory
that the verb can use brought back. Used by the engine's sessions and by the server's desk.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.core.errors import Refused
from holdfast.core.scheduler import Scheduler
from holdfast.core.session import Life, Place, Session
from holdfast.core.turn import KEEP_ALL

Length = Callable[[Session], int]
"""How much of a session's history a verb goes on from; 0 where it needs no memory, or will be refused."""


def no_memory(_: Session) -> int:
    """The verb goes on from nothing: it moves memory, or needs none."""
    return 0


def end_of_turn(turns: int | None) -> Length:
    """A rewind or a fork goes on from the end of so many turns, or of all."""

    def length(session: Session) -> int:
        count = len(session.boundaries) if turns is None else turns
        return session.boundaries[count - 1] if 0 < count <= len(session.boundaries) else 0

    return length


def kept_of_turn(keep: int | None, turn_id: str | None) -> Length:
    """An interruption of the last turn, which has ended, goes on from what is kept of it."""

    def length(session: Session) -> int:
        last = session.last
        if last is None or keep == KEEP_ALL or turn_id not in (None, last.request.turn_id):
            return 0
        return last.known_before if keep is None else last.input_end + min(keep, last.generated)

    return length


class Wait:
    """One verb on one session, until it is time to carry it out.

    It is meant for the session that has the name now. If that one is closed and another has the name by
    then, there is nothing left to wait for: whoever carries verbs out refuses this one.

    Memory is asked for once. Where it has no room on the device now, or its file cannot be read, the verb is
    carried out without it, and what it held is computed again.
    """

    __slots__ = ("_asked", "_forks", "_length", "_scheduler", "session", "session_id")

    def __init__(
        self, scheduler: Scheduler, session_id: str, length: Length = no_memory, forks: bool = False
    ) -> None:
        self._scheduler = scheduler
        self.session_id = session_id
        self.session = scheduler.registry.sessions.get(session_id)
        self._length = length
        self._forks = forks
        self._asked = False

    def over(self, now: float) -> bool:
        """Whether there is nothing left to wait for. To be asked between steps, until it is so."""
        registry = self._scheduler.registry
        session = registry.sessions.get(self.session_id)
        if session is None or session is not self.session or session.turn is not None:
            return True
        if session.unsettled or any(owner is session for _, owner in registry.copies):
            return False
        if session.life is not Life.IDLE or session.place is Place.HOME or not self._wants_memory(session):
            return True
        if session.place is Place.LEAVING:
            return not self._forks  # A cut calls it back by itself.
        if session.place is Place.RETURNING:
            return False
        if self._asked:
            return True
        self._asked = True
        try:
            return not self._scheduler.restore(self.session_id, now)
        except Refused:
            return True  # Its time is over, for example: the verb will be told.

    def _wants_memory(self, session: Session) -> bool:
        """Whether the verb could use what is away, and would lose it otherwise."""
        sequence, length = session.sequence, self._length(session)
        if length >= sequence.computed:
            return self._forks and sequence.computed > 0
        leased = 0 if sequence.lease is None else sequence.lease.length
        return length > leased and sequence.ledger.layout.cuts_anywhere
