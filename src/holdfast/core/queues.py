"""Which sessions run, rest or are to be sealed, and which turns wait: the lists that plans are made from.

A session is always in the lists that its state says it is in. Every list is ordered: the oldest running turn
first, the longest resting session first.
"""

from __future__ import annotations

from holdfast.core.session import Place, Session
from holdfast.core.turn import Turn
from holdfast.core.waiting import Waiting


class Queues:
    """The lists of sessions and turns.

    `listening` sessions have an open turn, waiting or running, or one that was committed and waits to be
    listed as running; `unheard` means that a plan may find input of theirs to compute.
    `resting` sessions have memory that may be spilled, `checkpointed` ones have resume points that may be
    dropped, wherever their memory is. The memory of `tainted` ones cannot be trusted and is dropped as soon
    as their rows have settled. A verb waits for the memory of `recalled` ones (`recalls`). A turn of
    `expected` ones is near (`prefetch`); `unfetched` means that a plan may find room for their memory.
    """

    __slots__ = (
        "checkpointed",
        "expected",
        "listening",
        "recalled",
        "resting",
        "running",
        "seals",
        "tainted",
        "unfetched",
        "unheard",
        "waiting",
    )

    def __init__(self) -> None:
        self.waiting = Waiting()
        self.running: list[Session] = []
        self.listening: dict[Session, None] = {}
        self.unheard = False
        self.resting: dict[Session, None] = {}
        self.checkpointed: dict[Session, None] = {}
        self.seals: dict[Session, None] = {}
        self.tainted: dict[Session, None] = {}
        self.recalled: dict[Session, None] = {}
        self.expected: dict[Session, None] = {}
        self.unfetched = False

    @property
    def held(self) -> list[Session]:
        """Recalled sessions whose memory is here: it stays until their verb has had a chance to act."""
        return [session for session in self.recalled if session.place is Place.HOME]

    def expect(self, session: Session) -> None:
        """List a session whose turn is near."""
        self.expected[session] = None
        self.unfetched = True

    def wait(self, session: Session, turn: Turn) -> None:
        """Queue a turn for admission; an open one waits apart, behind all others."""
        if turn.is_open:
            self.listening[session] = None
            self.unheard = True
        else:
            self.waiting.add(turn, session.tenant)

    def wait_no_more(self, session: Session, turn: Turn) -> None:
        """Take a turn off the queue: it is admitted, or over before it was."""
        if turn.is_open:
            del self.listening[session]
        else:
            self.waiting.remove(turn, session.tenant)

    def rest(self, session: Session) -> None:
        """List a session last among those at rest; one without memory is not listed."""
        self.resting.pop(session, None)
        if session.sequence.lease is not None:
            self.resting[session] = None
        self.checkpointed.pop(session, None)
        if session.sequence.points:
            self.checkpointed[session] = None

    def run(self, session: Session) -> None:
        """List a session as the youngest that runs; its turn has waited, so that it is not to be sealed."""
        self.resting.pop(session, None)
        self.running.append(session)

    def attend(self, session: Session) -> None:
        """List a session whose open turn runs: it stays among those that listen."""
        self.resting.pop(session, None)

    def stop(self, session: Session) -> None:
        """Strike off a session whose turn no longer runs."""
        if session in self.listening:
            del self.listening[session]
        else:
            self.running.remove(session)

    def empty(self, session: Session) -> None:
        """Strike off a session whose memory is gone."""
        self.seals.pop(session, None)
        self.checkpointed.pop(session, None)
        self.resting.pop(session, None)
        self.expected.pop(session, None)

    def leave(self, session: Session) -> None:
        """Strike a closed session off every list."""
        self.empty(session)
        self.tainted.pop(session, None)
        self.recalled.pop(session, None)
