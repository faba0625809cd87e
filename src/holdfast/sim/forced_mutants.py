"""Planted bugs of forced tokens: samples in flight, counts of tokens, seals, matchers.

Each function replaces one site by a version that differs in the effect of about one statement, and never
raises of itself: the audit, the device or the clients of a simulation must notice it. See planting.py.
"""

from __future__ import annotations

from holdfast.core.plan import Row, RowResult
from holdfast.core.session import LifeEvent, Session
from holdfast.core.settler import Settler
from holdfast.core.turn import Turn
from holdfast.sim.device import SimDevice
from holdfast.sim.planting import Mutant, Patcher


def forced_position_is_sampled_again(patcher: Patcher) -> None:
    """A row in flight still samples at a position that a forced token has taken."""

    def faulty(self: Settler) -> None:
        patcher.reach()
        self.ahead.clear()

    patcher.replace(Settler, "_withdraw_samples", faulty)


def withdrawn_sample_is_awaited(patcher: Patcher) -> None:
    """A sample that was withdrawn counts as a token that is to come."""
    original = Settler._withdraw_samples

    def faulty(self: Settler) -> None:
        before = {turn: turn.awaiting for turn in self.ahead}
        original(self)
        for turn, awaiting in before.items():
            patcher.reach()
            turn.awaiting = awaiting

    patcher.replace(Settler, "_withdraw_samples", faulty)


def forced_token_is_lost(patcher: Patcher) -> None:
    """The last of a run of forced tokens is not taken."""
    original = Settler._advance

    def faulty(self: Settler, session: Session, turn: Turn, row: Row[Turn], out: RowResult) -> None:
        if out.forced:
            patcher.reach()
            out = RowResult(out.tokens[:-1], out.finish, out.error, out.forced - 1)
        original(self, session, turn, row, out)

    patcher.replace(Settler, "_advance", faulty)


def forced_tokens_are_not_counted(patcher: Patcher) -> None:
    """Forced tokens do not count as generated."""
    original = Settler._advance

    def faulty(self: Settler, session: Session, turn: Turn, row: Row[Turn], out: RowResult) -> None:
        if out.forced:
            patcher.reach()
            turn.generated -= out.forced
        original(self, session, turn, row, out)

    patcher.replace(Settler, "_advance", faulty)


def first_sealing_row_is_the_last(patcher: Patcher) -> None:
    """The first row after a turn's end counts as its seal, though forced tokens are left."""
    original = Settler._settle_row

    def faulty(self: Settler, row: Row[Turn], out: RowResult) -> None:
        over = row.turn.over
        original(self, row, out)
        session = self.registry.sessions.get(row.turn.session_id)
        if over and session in self.registry.queues.seals:
            patcher.reach()
            del self.registry.queues.seals[session]
            session.on(LifeEvent.END)

    patcher.replace(Settler, "_settle_row", faulty)


def matcher_takes_a_withdrawn_sample(patcher: Patcher) -> None:
    """The executor feeds a matcher what a row has sampled, though the sample was withdrawn."""
    original = SimDevice._run_row

    def faulty(self: SimDevice, row: Row[Turn]) -> RowResult:
        out = original(self, row)
        _, matcher = self._matchers.get(row.number, ("", None))
        if matcher is not None and not row.sample and not row.turn.over:
            patcher.reach()
            matcher.accept([0])
        return out

    patcher.replace(SimDevice, "_run_row", faulty)


FORCED_MUTANTS = (
    Mutant("forced-position-is-sampled-again", "A4", "scheduler", True, forced_position_is_sampled_again),
    Mutant("withdrawn-sample-is-awaited", "A4", "scheduler", True, withdrawn_sample_is_awaited),
    Mutant("forced-token-is-lost", "A4", "scheduler", True, forced_token_is_lost),
    Mutant("forced-tokens-are-not-counted", "A4", "scheduler", True, forced_tokens_are_not_counted),
    Mutant("first-sealing-row-is-the-last", "B14", "scheduler", True, first_sealing_row_is_the_last),
    Mutant("matcher-takes-a-withdrawn-sample", "A4", "executor", True, matcher_takes_a_withdrawn_sample),
)
