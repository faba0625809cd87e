"""Planted bugs of turns that compute their input and sample nothing, and of the size of steps.

Each function replaces one site by a version that differs in the effect of about one statement, and never
raises of itself: the audit, the device or the clients of a simulation must notice it. See planting.py.
"""

from __future__ import annotations

from holdfast.core import step_size
from holdfast.core.plan import Row, RowResult
from holdfast.core.planner import PlanBuilder
from holdfast.core.registry import Registry
from holdfast.core.session import Session
from holdfast.core.settler import Settler
from holdfast.core.turn import Turn
from holdfast.sim.planting import Mutant, Patcher


def first_chunk_of_an_input_ends_its_turn(patcher: Patcher) -> None:
    """A turn that samples nothing ends with its first chunk, though more of its input is to be computed."""
    original = Settler._advance

    def faulty(self: Settler, session: Session, turn: Turn, row: Row[Turn], out: RowResult) -> None:
        original(self, session, turn, row, out)
        if not turn.request.max_tokens and not turn.over and not session.unsettled:
            patcher.reach()
            self._finish_computing(session, turn)

    patcher.replace(Settler, "_advance", faulty)


def computed_input_does_not_end_its_turn(patcher: Patcher) -> None:
    """A turn that samples nothing waits for a token, as any other turn does."""

    def faulty(self: Settler, session: Session, turn: Turn) -> None:
        del self, session, turn
        patcher.reach()

    patcher.replace(Settler, "_finish_computing", faulty)


def computed_input_is_sampled_after(patcher: Patcher) -> None:
    """The row that ends an input samples a token, though its turn may have none."""
    original = PlanBuilder._row

    def faulty(self: PlanBuilder, session: Session, turn: Turn, budget: int, drafts: list[int]) -> int:
        taken = original(self, session, turn, budget, drafts)
        row = self.plan.rows[-1]
        if not turn.request.max_tokens and row.start + row.count == session.sequence.known:
            patcher.reach()
            row.sample = True
            turn.awaiting += 1
        return taken

    patcher.replace(PlanBuilder, "_row", faulty)


def last_token_of_an_input_waits_for_ever(patcher: Patcher) -> None:
    """The last token of an input is left to a seal, as that of an answer is; but no seal comes."""
    original = PlanBuilder._decode

    def faulty(self: PlanBuilder) -> list[Session]:
        left = []
        for session in original(self):
            turn, sequence = session.turn, session.sequence
            if turn is not None and not turn.request.max_tokens and sequence.known == sequence.planned + 1:
                patcher.reach()
            else:
                left.append(session)
        return left

    patcher.replace(PlanBuilder, "_decode", faulty)


def answers_wait_for_large_steps(patcher: Patcher) -> None:
    """A step beside answers takes as many tokens of an input as a step without any."""
    original = step_size.step_budget

    def faulty(registry: Registry, most: int, drafting: bool) -> int:
        if original(registry, most, drafting) < most:
            patcher.reach()
        return most

    patcher.replace(step_size, "step_budget", faulty)


COMPUTE_MUTANTS = (
    Mutant(
        "first-chunk-of-an-input-ends-its-turn",
        "A4",
        "scheduler",
        True,
        first_chunk_of_an_input_ends_its_turn,
    ),
    Mutant(
        "computed-input-does-not-end-its-turn", "A4", "scheduler", True, computed_input_does_not_end_its_turn
    ),
    Mutant("computed-input-is-sampled-after", "A4", "scheduler", True, computed_input_is_sampled_after),
    Mutant(
        "last-token-of-an-input-waits-for-ever",
        "A4",
        "scheduler",
        True,
        last_token_of_an_input_waits_for_ever,
    ),
    Mutant("answers-wait-for-large-steps", "B3", "scheduler", True, answers_wait_for_large_steps),
)
