"""Planted bugs of ownership: each breaks one rule of `holdfast.cluster`, or one step of a replica.

The simulation must find every one of them. The docstring of a function is its story; `reach` counts how often
the bug did something else than the right code would. See `sim/planting.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from types import FunctionType

from holdfast.cluster.lives import LEASE_SECONDS, Life, LifeState
from holdfast.cluster.owner import Owner
from holdfast.cluster.ownership import Claimed, Kind, Ownership, Row, Write
from holdfast.sim.cluster import replica as replica_module
from holdfast.sim.cluster.history import Answer, History, Op, recognised
from holdfast.sim.cluster.replica import Copy, Replica
from holdfast.sim.planting import Mutant, Patcher, planted_of

__all__ = ["CLUSTER_MUTANTS", "planted"]

STALE_CALLS = 5
"""How old the count of a tenant is that was not made in the statement, in statements."""


def fence_left_out(patcher: Patcher) -> None:
    """A replica that has lost a session does not know it, and overwrites the turns of the next owner."""
    original = Ownership._may_write

    def faulty(self: Ownership, number: int, write: Write) -> bool:
        right = original(self, number, write)
        if not right and write.kind is not Kind.CREATE and write.session in self.sessions:
            patcher.reach()
            return True
        return right

    patcher.replace(Ownership, "_may_write", faulty)


def dead_life_commits(patcher: Patcher) -> None:
    """A life that was declared dead commits: the sessions that nobody has claimed yet are still its own."""

    def faulty(life: Life, batch: int) -> bool:
        if life.state in (LifeState.ENDED, LifeState.DEAD):
            patcher.reach()
        return life.batch == batch - 1

    patcher.replace(Ownership, "_may_commit", staticmethod(faulty))


def acknowledge_before_commit(patcher: Patcher) -> None:
    """A client hears of its turn when it is computed; the replica crashes before the turn is stored."""
    original = Replica.note

    def faulty(self: Replica, writes: list[Write], op: Op, answer: Answer) -> None:
        patcher.reach()
        original(self, writes, op, answer)
        self._tell(op, answer)

    patcher.replace(Replica, "note", faulty)


def lost_answer_is_taken_for_done(patcher: Patcher) -> None:
    """The connection breaks during a commit, and the replica takes the batch for stored."""
    original = Replica._reply

    def faulty(self: Replica, run: int, reply: object, lost: bool, answer: object) -> None:
        flight = self._flight
        if lost and run == self.run and not self.paused and flight is not None and _commits(reply):
            patcher.reach()
            self.settle(flight, frozenset(write.session for write in flight.writes))
            return
        original(self, run, reply, lost, answer)  # type: ignore[arg-type]

    patcher.replace(Replica, "_reply", faulty)


def _commits(reply: object) -> bool:
    return isinstance(reply, FunctionType) and reply.__qualname__.startswith("Replica._commit.")


def refused_counts_as_accepted(patcher: Patcher) -> None:
    """The store refuses a session of a batch, and its client hears that the turn is done."""
    original = Owner.settle

    def faulty(self: Owner[Copy], batch: int, sent: Collection[str], accepted: Collection[str]) -> set[str]:
        if set(sent) - set(accepted):
            patcher.reach()
        return original(self, batch, sent, sent)

    patcher.replace(Owner, "settle", faulty)


def refused_repeat_counts_as_accepted(patcher: Patcher) -> None:
    """A session was refused, the answer was lost, and the repeat takes the whole batch for stored."""
    original = Ownership.stored

    def faulty(self: Ownership, number: int, writes: Iterable[Write]) -> frozenset[str]:
        right = original(self, number, writes)
        every = frozenset(write.session for write in writes)
        if every != right:
            patcher.reach()
        return every

    patcher.replace(Ownership, "stored", faulty)


def epoch_not_raised(patcher: Patcher) -> None:
    """A claim changes the owner and leaves the epoch: two owners write in one epoch."""

    def faulty(self: Ownership, row: Row, taker: int) -> None:  # noqa: ARG001
        patcher.reach()
        row.owner = taker

    patcher.replace(Ownership, "_take", faulty)


def hand_over_without_raising_the_epoch(patcher: Patcher) -> None:
    """A hand-over changes the owner and leaves the epoch: two owners write in one epoch."""

    def faulty(self: Ownership, row: Row, taker: int) -> None:  # noqa: ARG001
        patcher.reach()
        row.owner = taker

    patcher.replace(Ownership, "_give", faulty)


def turn_repeat_not_recognised(patcher: Patcher) -> None:
    """The answer to a turn is lost, the client sends it again with its id, and it is said twice."""
    original = recognised

    def faulty(history: History, key: int) -> Answer | None:
        if original(history, key) is not None:
            patcher.reach()
        return None

    patcher.replace(replica_module, "recognised", faulty)


def keys_stay_with_the_first_owner(patcher: Patcher) -> None:
    """The next owner of a session does not know which turns and requests the last one has answered."""
    original = Owner.adopt

    def faulty(self: Owner[Copy], name: str, known: Copy) -> None:
        if known.commits > 1 and known.content.keys:
            patcher.reach()
            known.content = known.content._replace(keys=())
        original(self, name, known)

    patcher.replace(Owner, "adopt", faulty)


def dead_life_revived(patcher: Patcher) -> None:
    """A renewal brings a life back that was declared dead."""
    original = Ownership.renew

    def faulty(self: Ownership, number: int, now: float) -> bool:
        life = self.lives.get(number)
        if life is not None and life.state is LifeState.DEAD:
            patcher.reach()
            life.state, life.lease = LifeState.LIVE, now + LEASE_SECONDS
        return original(self, number, now)

    patcher.replace(Ownership, "renew", faulty)


def drain_that_drops(patcher: Patcher) -> None:
    """A replica is drained: it answers what it has computed, and ends without storing it."""
    original = Replica._drain_on

    def faulty(self: Replica) -> None:
        if self._pending:
            patcher.reach()
            pending, self._pending = self._pending, []
            for _, op, answer in pending:
                self._tell(op, answer)
            self._end()
        else:
            original(self)

    patcher.replace(Replica, "_drain_on", faulty)


def claim_without_checking_the_life(patcher: Patcher) -> None:
    """A replica that drains, or is over, takes sessions."""

    def faulty(life: Life | None) -> bool:
        if life is not None and life.state is not LifeState.LIVE:
            patcher.reach()
        return life is not None

    patcher.replace(Ownership, "_takes_sessions", staticmethod(faulty))


def claim_from_a_living_owner(patcher: Patcher) -> None:
    """A claim takes a session whose owner is alive: two replicas take it from each other."""
    original = Ownership._is_free

    def faulty(self: Ownership, row: Row) -> bool:
        if not original(self, row):
            patcher.reach()
        return True

    patcher.replace(Ownership, "_is_free", faulty)


def dead_owner_keeps_its_sessions(patcher: Patcher) -> None:
    """The sessions of a life that was declared dead cannot be claimed, only those of one that ended."""
    original = Ownership._is_free

    def faulty(self: Ownership, row: Row) -> bool:
        if self.lives[row.owner].state is LifeState.DEAD:
            patcher.reach()
            return False
        return original(self, row)

    patcher.replace(Ownership, "_is_free", faulty)


def tenant_count_not_in_the_statement(patcher: Patcher) -> None:
    """Sessions are counted before the statement that opens them: two replicas open the last one."""
    read: dict[str, int] = {}
    calls = 0

    def faulty(self: Ownership, wanted: Iterable[Write], limit: int) -> list[Write]:
        nonlocal calls
        wanted = list(wanted)
        calls += 1
        if calls % STALE_CALLS == 0:
            read.update(self.tenants)
        granted = [write for write in wanted if read.get(write.tenant, 0) < limit]
        for write in granted:
            count = self.tenants[write.tenant] = self.tenants.get(write.tenant, 0) + 1
            if count > limit:
                patcher.reach()
        return granted

    patcher.replace(Ownership, "_grant", faulty)


def closed_sessions_stay_counted(patcher: Patcher) -> None:
    """A closed session still counts towards its tenant's limit, until nobody can open one."""
    original = Ownership._apply

    def faulty(self: Ownership, write: Write, accepted: Collection[str]) -> None:
        row = self.sessions[write.session]
        if write.kind is Kind.REMOVE and row.counted:
            patcher.reach()
            row.counted = False
        original(self, write, accepted)

    patcher.replace(Ownership, "_apply", faulty)


def fork_of_a_refused_parent(patcher: Patcher) -> None:
    """A fork is stored although its parent's write is refused: its history is that of a zombie."""

    def faulty(self: Ownership, write: Write, accepted: Collection[str]) -> bool:
        if write.needs is not None and write.needs not in accepted:
            patcher.reach()
        return write.session not in self.sessions

    patcher.replace(Ownership, "_may_create", faulty)


def refused_fork_counts_as_made(patcher: Patcher) -> None:
    """A fork is refused, its request is stored with the parent, and its repeat is answered as done."""
    original = Ownership._apply

    def faulty(self: Ownership, write: Write, accepted: Collection[str]) -> None:
        if write.makes is not None and write.makes not in accepted:
            patcher.reach()
        original(self, write._replace(makes=None), accepted)

    patcher.replace(Ownership, "_apply", faulty)
    patcher.replace(Replica, "_forget", staticmethod(_forget_nothing))


def _forget_nothing(owner: Owner[Copy], op: Op) -> None:
    """The parent keeps the request."""


def name_opened_twice(patcher: Patcher) -> None:
    """An open is repeated elsewhere and replaces the session that the first attempt made."""
    original = Ownership._may_create

    def faulty(self: Ownership, write: Write, accepted: Collection[str]) -> bool:
        right = original(self, write, accepted)
        if not right and write.session in self.sessions:
            patcher.reach()
            return True
        return right

    patcher.replace(Ownership, "_may_create", faulty)


def claim_reads_an_old_copy(patcher: Patcher) -> None:
    """A replica that gets a session back goes on with the copy that it had before."""
    kept: dict[tuple[int, str], History] = {}
    gave, won = Owner.gave, Owner.adopt

    def remember(self: Owner[Copy], offers: Collection[object], answer: Mapping[str, Claimed]) -> list[str]:
        before = {name: copy.content for name, copy in self.sessions.items()}
        left = gave(self, offers, answer)  # type: ignore[arg-type]
        kept.update({(self.life, name): before[name] for name in left})
        return left

    def faulty(self: Owner[Copy], name: str, known: Copy) -> None:
        old = kept.pop((self.life, name), None)
        if old is not None and old.version != known.content.version:
            patcher.reach()
            known.content = old
        won(self, name, known)

    patcher.replace(Owner, "gave", remember)
    patcher.replace(Owner, "adopt", faulty)


CLUSTER_MUTANTS = {
    plant.__name__.replace("_", "-"): Mutant(plant.__name__.replace("_", "-"), "cluster", level, True, plant)
    for level, plant in (
        ("store", fence_left_out),
        ("store", dead_life_commits),
        ("replica", acknowledge_before_commit),
        ("replica", lost_answer_is_taken_for_done),
        ("owner", refused_counts_as_accepted),
        ("store", refused_repeat_counts_as_accepted),
        ("store", epoch_not_raised),
        ("store", hand_over_without_raising_the_epoch),
        ("replica", turn_repeat_not_recognised),
        ("owner", keys_stay_with_the_first_owner),
        ("store", dead_life_revived),
        ("replica", drain_that_drops),
        ("store", claim_without_checking_the_life),
        ("store", claim_from_a_living_owner),
        ("store", dead_owner_keeps_its_sessions),
        ("store", tenant_count_not_in_the_statement),
        ("store", closed_sessions_stay_counted),
        ("store", fork_of_a_refused_parent),
        ("store", refused_fork_counts_as_made),
        ("store", name_opened_twice),
        ("owner", claim_reads_an_old_copy),
    )
}


def planted(name: str) -> AbstractContextManager[Patcher]:
    """Plant one mutant while the context lasts."""
    return planted_of(CLUSTER_MUTANTS, name)
