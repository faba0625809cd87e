"""Which sessions run, rest or are to be sealed, and which turns wait: the lists that plans are made from.

A session is always in the lists that its state says it is in. Every list is ordered: the oldest running turn
first, the longest resting session first.
"""

from __future__ import annotations

from holdfast.core.session import Session
from holdfast.core.turn import Turn
from holdfast.core.waiting import Waiting


class Queues:
    """The lists of sessions and turns.

    `resting` sessions have memory that may be spilled, `checkpointed` ones have resume points that may be
    dropped. The memory of `tainted` ones cannot be trusted and is dropped as soon as their rows have settled.
    """

    __slots__ = ("checkpointed", "resting", "running", "seals", "tainted", "waiting")

    def __init__(self) -> None:
        self.waiting = Waiting()
        self.running: list[Session] = []
        self.resting: dict[Session, None] = {}
        self.checkpointed: dict[Session, None] = {}
        self.seals: dict[Session, None] = {}
        self.tainted: dict[Session, None] = {}

    def wait(self, session: Session, turn: Turn) -> None:
        """Queue a turn for admission."""
        self.waiting.add(turn, session.tenant)

    def wait_no_more(self, session: Session, turn: Turn) -> None:
        """Take a turn off the queue: it is admitted, or over before it was."""
        self.waiting.remove(turn, session.tenant)

    def rest(self, session: Session) -> None:
        """List a session last among those at rest; one without memory is not listed."""
        self.resting.pop(session, None)
        if session.sequence.lease is not None:
            self.resting[session] = None
        if session.sequence.points:
            self.checkpointed[session] = None

    def run(self, session: Session) -> None:
        """List a session as the youngest that runs; its turn has waited, so that it is not to be sealed."""
        self.resting.pop(session, None)
        self.running.append(session)

    def empty(self, session: Session) -> None:
        """Strike off a session whose memory is gone."""
        self.seals.pop(session, None)
        self.checkpointed.pop(session, None)
        self.resting.pop(session, None)

    def leave(self, session: Session) -> None:
        """Strike a closed session off every list."""
        self.empty(session)
        self.tainted.pop(session, None)
