"""Planted bugs of volatile sessions, of cuts and forks at a token, and of compaction.

Each function replaces one site by a version that differs in the effect of about one statement, and never
raises of itself: the audit, the device or the clients of a simulation must notice it. See planting.py.
"""

from __future__ import annotations

from holdfast.core import errors, requirements, sharing
from holdfast.core.cuts import Cuts
from holdfast.core.layout import Tier
from holdfast.core.moves import SPILL_TIERS, Moves
from holdfast.core.plan import UnitCopy
from holdfast.core.prefix import PrefixTree
from holdfast.core.registry import Registry
from holdfast.core.scheduler import Scheduler
from holdfast.core.sequence import Sequence
from holdfast.core.session import Session
from holdfast.core.settler import Settler
from holdfast.core.turn import Turn, TurnRequest
from holdfast.sim.planting import Mutant, Patcher

# --- volatile sessions --------------------------------------------------------------------------------


def volatile_session_gets_a_file(patcher: Patcher) -> None:
    """A session that is in no journal is spilled to disk."""
    original = Moves.spill_tier

    def faulty(self: Moves, session: Session, tiers: tuple[Tier, ...] = SPILL_TIERS) -> Tier | None:
        volatile, session.volatile = session.volatile, False
        tier = original(self, session, tiers)
        session.volatile = volatile
        if volatile and tier is Tier.DISK:
            patcher.reach()
        return tier

    patcher.replace(Moves, "spill_tier", faulty)


def volatile_session_is_refused_at_the_limit(patcher: Patcher) -> None:
    """Sessions that clients do not know of are refused when clients have opened as many as they may."""
    original = requirements.require_new_session

    def faulty(registry: Registry, session_id: str, tenant: str, volatile: bool = False) -> None:
        try:
            original(registry, session_id, tenant)
        except errors.TooManySessions:
            if volatile:
                patcher.reach()
            raise

    patcher.replace(requirements, "require_new_session", faulty)


def volatile_sessions_use_up_the_limit(patcher: Patcher) -> None:
    """Sessions that clients do not know of count towards how many they may open."""
    original = requirements.require_new_session

    def faulty(registry: Registry, session_id: str, tenant: str, volatile: bool = False) -> None:
        counted, registry.volatile = registry.volatile, 0
        try:
            original(registry, session_id, tenant, volatile)
        except errors.TooManySessions:
            patcher.reach()
            raise
        finally:
            registry.volatile = counted

    patcher.replace(requirements, "require_new_session", faulty)


def volatile_turn_waits_for_a_journal(patcher: Patcher) -> None:
    """The mark of a turn that no journal will ever report as durable stays pinned."""
    original = Settler._finish

    def faulty(self: Settler, session: Session, turn: Turn, reason: str) -> None:
        volatile = session.volatile
        if self.registry.policy.durable_turns and volatile and not session.one_shot:
            patcher.reach()
            session.durable = False
            session.volatile = False
        original(self, session, turn, reason)
        session.volatile = volatile

    patcher.replace(Settler, "_finish", faulty)


def history_is_not_shared_during_a_turn(patcher: Patcher) -> None:
    """The same conversation, sent twice at once, is computed twice."""

    def faulty(_self: Scheduler, _session: Session) -> None:
        patcher.reach()

    patcher.replace(Scheduler, "_share_history", faulty)


# --- cut and go on in one act ---------------------------------------------------------------------------


def submit_with_a_cut_keeps_old_boundaries(patcher: Patcher) -> None:
    """A turn that follows a part of the history leaves the ends of turns that are gone."""
    original = Session.boundaries_below

    def faulty(self: Session, known: int) -> list[int]:
        boundaries = original(self, known)
        if self.boundaries != boundaries and self.sequence.known == known:
            patcher.reach()
            return self.boundaries
        return boundaries

    patcher.replace(Session, "boundaries_below", faulty)


def refused_turn_has_cut_the_history(patcher: Patcher) -> None:
    """The history is cut before it is known whether the turn fits."""
    original = Scheduler.submit

    def faulty(
        self: Scheduler, session_id: str, request: TurnRequest, now: float, keep: int | None = None
    ) -> Turn:
        try:
            return original(self, session_id, request, now, keep)
        except errors.ContextExceeded:
            session = self.registry.find(session_id)
            if keep is not None and 0 <= keep < session.sequence.known:
                patcher.reach()
                self.cuts.cut(session, keep)
            raise

    patcher.replace(Scheduler, "submit", faulty)


def cut_turn_can_be_cut_again(patcher: Patcher) -> None:
    """After a turn was cut away and the next one withdrawn, a barge-in cuts where the first had been."""
    original = Scheduler.submit

    def faulty(
        self: Scheduler, session_id: str, request: TurnRequest, now: float, keep: int | None = None
    ) -> Turn:
        session = self.registry.sessions.get(session_id)
        last = session.last if session is not None else None
        turn = original(self, session_id, request, now, keep)
        if session is not None and session.last is not last:
            patcher.reach()
            session.last = last
        return turn

    patcher.replace(Scheduler, "submit", faulty)


# --- forks at a token -----------------------------------------------------------------------------------


def fork_at_a_token_keeps_later_turns(patcher: Patcher) -> None:
    """A fork at a token has the ends of turns that lie past it."""
    original = Scheduler.fork

    def faulty(
        self: Scheduler,
        session_id: str,
        new_id: str,
        now: float,
        turns: int | None = None,
        known: int | None = None,
    ) -> Session:
        child = original(self, session_id, new_id, now, turns, known)
        boundaries = self.registry.sessions[session_id].boundaries
        if known is not None and boundaries != child.boundaries:
            patcher.reach()
            child.boundaries = list(boundaries)
        return child

    patcher.replace(Scheduler, "fork", faulty)


def fork_at_a_token_has_all_memory(patcher: Patcher) -> None:
    """A fork at a token begins with as much memory as its parent has."""
    original = sharing.fork

    def faulty(tree: PrefixTree, parent: Sequence, child: Sequence, limit: int) -> list[UnitCopy]:
        if limit < parent.computed:
            patcher.reach()
        return original(tree, parent, child, parent.known)

    patcher.replace(sharing, "fork", faulty)


# --- compaction -----------------------------------------------------------------------------------------


def compaction_keeps_stale_memory(patcher: Patcher) -> None:
    """A compaction replaces tokens and keeps the memory of those that were there."""
    compact, cut = Scheduler.compact, Cuts.cut
    compacting: list[str] = []

    def faulty(
        self: Scheduler, session_id: str, first: int, last: int, tokens: tuple[int, ...], now: float
    ) -> int:
        compacting.append(session_id)
        try:
            return compact(self, session_id, first, last, tokens, now)
        finally:
            compacting.clear()

    def faulty_cut(self: Cuts, session: Session, known: int) -> None:
        if not compacting or session.sequence.computed <= known:
            cut(self, session, known)
            return
        patcher.reach()
        session.sequence.tokens.cut(known)

    patcher.replace(Scheduler, "compact", faulty)
    patcher.replace(Cuts, "cut", faulty_cut)


def compaction_leaves_later_boundaries(patcher: Patcher) -> None:
    """Turns after a compacted range end where they ended before."""
    original = Scheduler.compact

    def faulty(
        self: Scheduler, session_id: str, first: int, last: int, tokens: tuple[int, ...], now: float
    ) -> int:
        before = list(self.registry.find(session_id).boundaries)
        left = original(self, session_id, first, last, tokens, now)
        boundaries = self.registry.find(session_id).boundaries
        if boundaries[first:] != before[last:]:
            patcher.reach()
            boundaries[first:] = before[last:]
        return left

    patcher.replace(Scheduler, "compact", faulty)


def compacted_turn_can_be_cut(patcher: Patcher) -> None:
    """After a compaction, a barge-in cuts the last turn where it had been before."""
    original = Scheduler.compact

    def faulty(
        self: Scheduler, session_id: str, first: int, last: int, tokens: tuple[int, ...], now: float
    ) -> int:
        session = self.registry.find(session_id)
        turn = session.last
        left = original(self, session_id, first, last, tokens, now)
        if turn is not None:
            patcher.reach()
            session.last = turn
        return left

    patcher.replace(Scheduler, "compact", faulty)


CHAT_MUTANTS = tuple(
    Mutant(name, story, "scheduler", one, plant)
    for name, story, one, plant in (
        ("volatile-session-gets-a-file", "B15", True, volatile_session_gets_a_file),
        ("volatile-session-is-refused-at-the-limit", "C7", True, volatile_session_is_refused_at_the_limit),
        ("volatile-sessions-use-up-the-limit", "C7", True, volatile_sessions_use_up_the_limit),
        ("volatile-turn-waits-for-a-journal", "B15", True, volatile_turn_waits_for_a_journal),
        ("history-is-not-shared-during-a-turn", "B10", True, history_is_not_shared_during_a_turn),
        ("submit-with-a-cut-keeps-old-boundaries", "A1", True, submit_with_a_cut_keeps_old_boundaries),
        ("refused-turn-has-cut-the-history", "A1", True, refused_turn_has_cut_the_history),
        ("cut-turn-can-be-cut-again", "A1", True, cut_turn_can_be_cut_again),
        ("fork-at-a-token-keeps-later-turns", "B10", True, fork_at_a_token_keeps_later_turns),
        ("fork-at-a-token-has-all-memory", "B10", True, fork_at_a_token_has_all_memory),
        ("compaction-keeps-stale-memory", "A1", True, compaction_keeps_stale_memory),
        ("compaction-leaves-later-boundaries", "A1", True, compaction_leaves_later_boundaries),
        ("compacted-turn-can-be-cut", "A1", True, compacted_turn_can_be_cut),
    )
)
