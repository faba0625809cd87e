"""Plans that have not settled, and additions to the next plan for the executor: copies, tables to drop."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from holdfast.core.plan import StepPlan, UnitCopy
from holdfast.core.session import Session
from holdfast.core.turn import Turn

Plan = StepPlan[Turn, Session]


class PendingCopy(NamedTuple):
    """A copy that completes the memory of `owner`, and is not in a plan yet."""

    copy: UnitCopy
    owner: Session


class InFlight:
    """Plans in the order of their steps, and what waits for the next one.

    `uncopied` are sessions whose copies were lost with a failed step; it is empty except while that step is
    settled. `forgotten` are the numbers of closed sessions whose block tables the executor still has.
    """

    __slots__ = ("copies", "forgotten", "plans", "uncopied")

    def __init__(self) -> None:
        self.plans: deque[Plan] = deque()
        self.copies: list[PendingCopy] = []
        self.uncopied: dict[Session, None] = {}
        self.forgotten: list[int] = []

    def add_copies(self, copies: Iterable[UnitCopy], owner: Session) -> None:
        """Put copies into the next plan."""
        self.copies += [PendingCopy(copy, owner) for copy in copies]

    def has_copies_of(self, session: Session) -> bool:
        """Whether a copy that completes a session's memory is yet to be planned."""
        return any(pending.owner is session for pending in self.copies)

    def is_copying(self, session: Session) -> bool:
        """Whether a copy that completes a session's memory is to be planned, is in flight, or was lost."""
        if session in self.uncopied or self.has_copies_of(session):
            return True
        return any(owner is session for plan in self.plans for owner in plan.copied)

    def purge_copies(self, session: Session) -> None:
        """Forget copies that were to complete a session's memory and have not been planned."""
        self.copies = [pending for pending in self.copies if pending.owner is not session]

    def forget(self, session: Session) -> None:
        """Let the executor drop the block tables of a closed session, if a plan ever named it."""
        if session.sequence.fence:
            self.forgotten.append(session.number)

    def load(self, plan: Plan) -> None:
        """Move what waits for the next plan into it."""
        for copy, owner in self.copies:
            plan.copies.append(copy)
            plan.copied.append(owner)
            owner.sequence.fence = plan.step
        self.copies = []
        plan.forgotten, self.forgotten = self.forgotten, []
