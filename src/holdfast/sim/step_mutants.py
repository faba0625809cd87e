"""Planted bugs of closing, of steps that fail, of copies, of tiers, of tenants' quotas and of coming back.

Each function replaces one site by a version that differs in the effect of about one statement, and never
raises of itself: the audit, the device or the clients of a simulation must notice it. See planting.py.
"""

from __future__ import annotations

from holdfast.core import tiers
from holdfast.core.cuts import Cuts
from holdfast.core.in_flight import Plan
from holdfast.core.layout import Tier
from holdfast.core.lease import Lease
from holdfast.core.ledger import Account, Holder, Pool
from holdfast.core.pressure import Pressure
from holdfast.core.retention import Retention
from holdfast.core.scheduler import Scheduler
from holdfast.core.sequence import Sequence
from holdfast.core.session import Life, Session
from holdfast.core.settler import Settler
from holdfast.core.tiers import Parcel
from holdfast.core.turn import TurnRequest
from holdfast.sim.planting import Mutant, Patcher
from holdfast.sim.turn_mutants import free_but_keep

History = list[tuple[TurnRequest, list[int]]]

# --- closing ------------------------------------------------------------------------------------------


def close_in_flight_frees_at_once(patcher: Patcher) -> None:
    """Closing does not wait for the rows of the session that are in flight."""
    original = Scheduler._close

    def faulty(self: Scheduler, session: Session, reason: str) -> None:
        if session.unsettled:
            patcher.reach()
            session.unsettled = 0
        original(self, session, reason)

    patcher.replace(Scheduler, "_close", faulty)


def deferred_close_is_forgotten(patcher: Patcher) -> None:
    """A session that was closed while its turn ran is never released."""
    original = Settler.close

    def faulty(self: Settler, session: Session, reason: str) -> None:
        if session.life is Life.CLOSING:
            patcher.reach()
            return
        original(self, session, reason)

    patcher.replace(Settler, "close", faulty)


def double_close_frees_twice(patcher: Patcher) -> None:
    """The second close of a session frees what the first is about to free."""
    original = Scheduler.close

    def faulty(self: Scheduler, session_id: str, now: float) -> None:
        session = self.registry.sessions.get(session_id)
        if session is not None and session.life is Life.CLOSING:
            free_but_keep(patcher, session.sequence)
        original(self, session_id, now)

    patcher.replace(Scheduler, "close", faulty)


def idle_clock_runs_during_a_turn(patcher: Patcher) -> None:
    """The idle time of a session counts from before its turn, not from the turn's end."""
    original = Settler._depart

    def faulty(self: Settler, session: Session) -> None:
        before = session.idle_since
        original(self, session)
        patcher.reach()
        session.idle_since = before

    patcher.replace(Settler, "_depart", faulty)


# --- steps that fail, copies, tiers --------------------------------------------------------------------


def lost_table_changes_are_not_resent(patcher: Patcher) -> None:
    """Block-table entries that a lost plan carried are taken as known to the device."""
    original = Settler._take_from_failed_step

    def faulty(self: Settler, session: Session, guilty: bool, error: str) -> None:
        seen = session.sequence.changed
        original(self, session, guilty, error)
        patcher.reach()
        session.sequence.changed = min(seen, session.sequence.pages)

    patcher.replace(Settler, "_take_from_failed_step", faulty)


def copies_of_a_failed_step_are_trusted(patcher: Patcher) -> None:
    """Pages that a failed step was to copy are taken as copied."""
    original = Settler._fail_step

    def faulty(self: Settler, plan: Plan, error: str) -> None:
        if plan.copied:
            patcher.reach()
            plan.copied = []
        original(self, plan, error)

    patcher.replace(Settler, "_fail_step", faulty)


def moves_of_a_failed_step_are_trusted(patcher: Patcher) -> None:
    """Memory that a failed step was to move is taken as moved."""

    def faulty(self: Settler, plan: Plan) -> None:
        if plan.moves:
            patcher.reach()
        self._settle_moves(plan, [True] * len(plan.moves))

    patcher.replace(Settler, "_lose_moves", faulty)


def fork_forgets_its_copies(patcher: Patcher) -> None:
    """The partly filled page of a fork is never copied: the child reads what lay there before."""
    original = Cuts.share

    def faulty(self: Cuts, parent: Session, child: Session, known: int) -> None:
        original(self, parent, child, known)
        if self.registry.in_flight.has_copies_of(child):
            patcher.reach()
            self.registry.in_flight.purge_copies(child)

    patcher.replace(Cuts, "share", faulty)


def freed_while_in_transit(patcher: Patcher) -> None:
    """The source of a spill is given back when the copy begins, not when it has settled."""
    original = Pressure.spill

    def faulty(
        self: Pressure, session: Session, tier: Tier | None = None, asker: Session | None = None
    ) -> bool:
        spilled = original(self, session, tier, asker)
        if spilled:
            free_but_keep(patcher, session.sequence)
        return spilled

    patcher.replace(Pressure, "spill", faulty)


def aborted_restore_keeps_its_parcel(patcher: Patcher) -> None:
    """A restore that is given up leaves its pages on the other tier, without an owner."""
    original = Parcel.discard

    def faulty(self: Parcel, fence: int) -> None:
        if self.home:
            patcher.reach()
            patcher.park(self.away)
            self.away = {}
        original(self, fence)

    patcher.replace(Parcel, "discard", faulty)


def seal_in_flight_counts_as_rest(patcher: Patcher) -> None:
    """A session is cut, forked or spilled while the row that seals its turn is in flight."""
    original = Cuts.require_idle

    def faulty(self: Cuts, session: Session) -> None:
        unsettled, session.unsettled = session.unsettled, 0
        if unsettled and session.life is Life.SEALING:
            patcher.reach()
        try:
            original(self, session)
        finally:
            session.unsettled = unsettled

    patcher.replace(Cuts, "require_idle", faulty)


# --- tenants ------------------------------------------------------------------------------------------


def account_is_not_lowered(patcher: Patcher) -> None:
    """What a tenant gives back stays on its account."""
    original = Pool.count

    def faulty(self: Pool, holder: Holder, count: int) -> None:
        original(self, holder, count)
        if count < 0:
            patcher.reach()
            holder.account.held[self.index] -= count

    patcher.replace(Pool, "count", faulty)


def quota_is_ignored(patcher: Patcher) -> None:
    """A tenant takes what is free, however much it holds."""
    original = Pool.require

    def faulty(self: Pool, count: int, account: Account) -> None:
        if count > self.room(account):
            patcher.reach()
            account = Account(account.name, [count + held for held in account.held])
        original(self, count, account)

    patcher.replace(Pool, "require", faulty)


# --- coming back after a death ------------------------------------------------------------------------


def revival_forgets_the_last_turn(patcher: Patcher) -> None:
    """A session comes back without the last turn that its client was told of."""
    original = Scheduler.recover

    def faulty(
        self: Scheduler, session_id: str, tenant: str, now: float, retention: Retention, history: History
    ) -> Session:
        if history:
            patcher.reach()
        return original(self, session_id, tenant, now, retention, history[:-1])

    patcher.replace(Scheduler, "recover", faulty)


def file_is_taken_for_longer_than_it_is(patcher: Patcher) -> None:
    """Of a file that ends inside a page, the rest of that page counts as computed."""
    original = tiers.adopt

    def faulty(sequence: Sequence, lease: Lease, length: int, transit: Holder, number: int) -> Parcel:
        page_size = sequence.ledger.layout.page_size
        longer = min(sequence.known, -(-length // page_size) * page_size)
        if longer > length:
            patcher.reach()
        return original(sequence, lease, longer, transit, number)

    patcher.replace(tiers, "adopt", faulty)


STEP_MUTANTS = tuple(
    Mutant(name, story, "scheduler", one, plant)
    for name, story, one, plant in (
        ("close-in-flight-frees-at-once", "A1", True, close_in_flight_frees_at_once),
        ("deferred-close-is-forgotten", "A1", True, deferred_close_is_forgotten),
        ("double-close-frees-twice", "A1", True, double_close_frees_twice),
        ("idle-clock-runs-during-a-turn", "C7", True, idle_clock_runs_during_a_turn),
        ("lost-table-changes-are-not-resent", "A4", True, lost_table_changes_are_not_resent),
        ("copies-of-a-failed-step-are-trusted", "B9", True, copies_of_a_failed_step_are_trusted),
        ("moves-of-a-failed-step-are-trusted", "B9", True, moves_of_a_failed_step_are_trusted),
        ("fork-forgets-its-copies", "B10", True, fork_forgets_its_copies),
        ("freed-while-in-transit", "B9", True, freed_while_in_transit),
        ("aborted-restore-keeps-its-parcel", "B9", True, aborted_restore_keeps_its_parcel),
        ("seal-in-flight-counts-as-rest", "B9", True, seal_in_flight_counts_as_rest),
        ("account-is-not-lowered", "B17", True, account_is_not_lowered),
        ("quota-is-ignored", "B16", True, quota_is_ignored),
        ("revival-forgets-the-last-turn", "B15", True, revival_forgets_the_last_turn),
        ("file-is-taken-for-longer-than-it-is", "B15", True, file_is_taken_for_longer_than_it_is),
    )
)
