"""Planted bugs of open turns: in sampling, revision, rollback and planning before the commit.

Each function replaces one site by a version that differs in the effect of about one statement, and never
raises of itself: the audit, the device or the clients of a simulation must notice it. See planting.py.
"""

from __future__ import annotations

from holdfast.core import listening
from holdfast.core.planner import PlanBuilder
from holdfast.core.queues import Queues
from holdfast.core.registry import Registry
from holdfast.core.scheduler import Scheduler
from holdfast.core.sequence import Sequence
from holdfast.core.session import Life, Session
from holdfast.core.turn import Turn
from holdfast.sim.planting import Mutant, Patcher


def open_turn_samples(patcher: Patcher) -> None:
    """A row that reaches the end of an open input samples the first token of an answer."""
    original = PlanBuilder._row

    def faulty(self: PlanBuilder, session: Session, turn: Turn, budget: int, drafts: list[int]) -> int:
        if not turn.is_open:
            return original(self, session, turn, budget, drafts)
        turn.is_open = False
        try:
            return original(self, session, turn, budget, drafts)
        finally:
            patcher.reach()
            turn.is_open = True

    patcher.replace(PlanBuilder, "_row", faulty)


def revision_keeps_what_was_computed(patcher: Patcher) -> None:
    """A revision changes the log, and memory does not fall back to it."""

    original = listening.carry_out_revision

    def faulty(registry: Registry, session: Session, turn: Turn) -> None:
        sequence = session.sequence
        if session.unsettled or turn.input_end <= sequence.computed or turn.revised >= sequence.computed:
            original(registry, session, turn)
        else:
            patcher.reach()
            listening.revise_log(sequence, turn)

    patcher.replace(listening, "carry_out_revision", faulty)


def revision_is_not_noted_while_rows_are_in_flight(patcher: Patcher) -> None:
    """The log is revised at once, though rows in flight are computing what it was."""
    original = listening.carry_out_revision

    def faulty(registry: Registry, session: Session, turn: Turn) -> None:
        if session.unsettled:
            patcher.reach()
            listening.revise_log(session.sequence, turn)
        else:
            original(registry, session, turn)

    patcher.replace(listening, "carry_out_revision", faulty)


def abandoned_input_is_kept(patcher: Patcher) -> None:
    """An open turn that is abandoned keeps its input, as an interrupted one does."""
    original = Scheduler._abort

    def faulty(self: Scheduler, session: Session, turn: Turn, keep: int | None, reason: str) -> None:
        is_open = turn.is_open
        if is_open and session.life is Life.RUNNING:
            patcher.reach()
            turn.is_open, keep = False, 0
        original(self, session, turn, keep, reason)
        turn.is_open = is_open

    patcher.replace(Scheduler, "_abort", faulty)


def listening_takes_the_budget_first(patcher: Patcher) -> None:
    """Inputs are computed ahead before turns that answer get their rows."""
    original = PlanBuilder.build

    def faulty(self: PlanBuilder) -> None:
        self._listen()
        taken = sum(row.count for row in self.plan.rows)
        if taken:
            patcher.reach()
        self.budget -= taken
        original(self)

    patcher.replace(PlanBuilder, "build", faulty)


def point_ahead_is_left_too_far(patcher: Patcher) -> None:
    """A resume point of an open turn claims a token more than its state has seen."""
    original = listening.leave_point_ahead

    def faulty(sequence: Sequence) -> None:
        count = len(sequence.points)
        original(sequence)
        if len(sequence.points) > count and sequence.points[-1].length < sequence.known:
            patcher.reach()
            sequence.points[-1].length += 1

    patcher.replace(listening, "leave_point_ahead", faulty)


def listener_that_ended_stays_listed(patcher: Patcher) -> None:
    """A session whose open turn is over is still listed as listening."""
    original = Queues.stop

    def faulty(self: Queues, session: Session) -> None:
        if session in self.listening:
            patcher.reach()
            return
        original(self, session)

    patcher.replace(Queues, "stop", faulty)


LISTENING_MUTANTS = (
    Mutant("open-turn-samples", "A4", "scheduler", True, open_turn_samples),
    Mutant("revision-keeps-what-was-computed", "A4", "scheduler", True, revision_keeps_what_was_computed),
    Mutant(
        "revision-does-not-wait-for-rows",
        "A4",
        "scheduler",
        True,
        revision_is_not_noted_while_rows_are_in_flight,
    ),
    Mutant("abandoned-input-is-kept", "A4", "scheduler", True, abandoned_input_is_kept),
    Mutant("listening-takes-the-budget-first", "A4", "scheduler", True, listening_takes_the_budget_first),
    Mutant("point-ahead-is-left-too-far", "A4", "scheduler", True, point_ahead_is_left_too_far),
    Mutant("listener-that-ended-stays-listed", "A4", "scheduler", True, listener_that_ended_stays_listed),
)
