"""The rules of ownership as they stand in the store: who may write which session, over tables in memory.

    FREE -claim-> OWNED(life, epoch) -hand over (epoch + 1)-> OWNED(other life)

A session is free if the life that owns it is over, so a death is one row, whatever the number of sessions;
claims come later, by session, from whoever needs it next. Each method is one statement: it checks and
changes at one moment. PostgreSQL decides the same with `engine.durable.postgres`; a differential test
compares every answer and the tables. The simulation runs this class as its linearizable store.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from holdfast.cluster.lives import ALIVE, LEASE_SECONDS, Life, LifeState, is_lapsed

__all__ = ["Claimed", "Kind", "Offer", "Ownership", "Row", "Standing", "Write"]


class Kind(StrEnum):
    """What a write does to the row of a session."""

    CREATE = "create"
    CHANGE = "change"
    REMOVE = "remove"


class Write(NamedTuple):
    """One session's part of a commit; its condition is the owner, the epoch and the number of the commit.

    `commits` is the number after the write. `needs` is the session that a fork was made of: it is refused
    with it. `content` is what the session holds afterwards; the rules do not look at it. `makes` is the fork
    that a parent's write makes: where that is refused (its name is taken, its tenant at its limit), the
    parent holds `otherwise`, so that the request for the fork is not taken for done when it is repeated.
    """

    session: str
    kind: Kind
    epoch: int
    commits: int
    content: Hashable = None
    tenant: str = ""
    needs: str | None = None
    makes: str | None = None
    otherwise: Hashable = None


@dataclass(slots=True)
class Row:
    """The row of a session. `counted` says whether it counts towards its tenant's limit."""

    tenant: str
    owner: int
    epoch: int
    commits: int
    counted: bool
    content: Hashable = None


class Claimed(NamedTuple):
    """Where a session is after a claim."""

    owner: int
    epoch: int
    commits: int
    content: Hashable = None


class Offer(NamedTuple):
    """A session at rest that its owner hands over."""

    session: str
    epoch: int
    commits: int
    target: int


class Standing(NamedTuple):
    """The state of a life and the number of its last commit."""

    state: LifeState
    batch: int


@dataclass(slots=True)
class Ownership:
    """The tables. Lives and tenants are never forgotten here."""

    lives: dict[int, Life] = field(default_factory=dict)
    sessions: dict[str, Row] = field(default_factory=dict)
    tenants: dict[str, int] = field(default_factory=dict)

    # --- lives ------------------------------------------------------------------------------------

    def begin(self, name: str, now: float) -> int | None:
        """Begin a life; None while another life of that name is alive."""
        if any(life.name == name and life.state in ALIVE for life in self.lives.values()):
            return None
        number = len(self.lives) + 1
        self.lives[number] = Life(name, now + LEASE_SECONDS)
        return number

    def renew(self, number: int, now: float) -> bool:
        """Renew a lease; False if the life is over."""
        life = self.lives.get(number)
        if life is None or life.state not in ALIVE:
            return False
        life.lease = now + LEASE_SECONDS
        return True

    def bury(self, number: int, connected: bool, heard: bool, now: float) -> bool:
        """Declare a life dead, if its lease and its connections allow that; whether it is over now."""
        life = self.lives.get(number)
        if life is not None and life.state in ALIVE and is_lapsed(life.lease, connected, heard, now):
            life.state = LifeState.DEAD
        return life is None or life.state not in ALIVE

    def drain(self, number: int) -> bool:
        """Let a life take no more sessions; False if it is over."""
        life = self.lives.get(number)
        if life is None or life.state not in ALIVE:
            return False
        life.state = LifeState.DRAINING
        return True

    def end(self, number: int) -> bool:
        """End a life: its sessions are free; False if it was over."""
        life = self.lives.get(number)
        if life is None or life.state not in ALIVE:
            return False
        life.state = LifeState.ENDED
        return True

    # --- writes -----------------------------------------------------------------------------------

    def commit(
        self, number: int, batch: int, writes: Sequence[Write], limit: int | None, now: float
    ) -> frozenset[str] | None:
        """Commit batch `batch` of a life: the accepted sessions.

        None if the life is over or is not at the batch before this one. `limit` is how many sessions a
        tenant may have; None counts none.
        """
        life = self.lives.get(number)
        if life is None or not self._may_commit(life, batch):
            return None
        life.batch, life.lease = batch, now + LEASE_SECONDS
        accepted = {write.session for write in writes if self._may_write(number, write)}
        wanted = [
            write for write in writes if write.kind is Kind.CREATE and self._may_create(write, accepted)
        ]
        granted = self._grant(wanted, limit) if limit is not None else wanted
        accepted.update(write.session for write in granted)
        for write in writes:
            if write.session in accepted and write.kind is not Kind.CREATE:
                self._apply(write, accepted)
        for write in granted:
            row = Row(write.tenant, number, write.epoch, write.commits, limit is not None, write.content)
            self.sessions[write.session] = row
        return frozenset(accepted)

    @staticmethod
    def _may_commit(life: Life, batch: int) -> bool:
        """The fence of the life."""
        return life.state in ALIVE and life.batch == batch - 1

    def _may_write(self, number: int, write: Write) -> bool:
        """The fence: the owner, the epoch and the number of the commit."""
        row = self.sessions.get(write.session)
        return (
            row is not None
            and write.kind is not Kind.CREATE
            and row.owner == number
            and row.epoch == write.epoch
            and row.commits == write.commits - 1
        )

    def _may_create(self, write: Write, accepted: Collection[str]) -> bool:
        """Whether a name is free, and the parent of a fork is accepted."""
        return write.session not in self.sessions and (write.needs is None or write.needs in accepted)

    def _grant(self, wanted: Iterable[Write], limit: int) -> list[Write]:
        """Count new sessions; those that fit their tenant's limit. Removals of the same commit come later."""
        granted: list[Write] = []
        for write in wanted:
            count = self.tenants.setdefault(write.tenant, 0)
            if count < limit:
                self.tenants[write.tenant] = count + 1
                granted.append(write)
        return granted

    def _apply(self, write: Write, accepted: Collection[str]) -> None:
        row = self.sessions[write.session]
        if write.kind is Kind.REMOVE:
            del self.sessions[write.session]
            if row.counted:
                self.tenants[row.tenant] -= 1
        else:
            made = write.makes is None or write.makes in accepted
            row.commits, row.content = write.commits, write.content if made else write.otherwise

    def standing(self, number: int, now: float) -> Standing:
        """What became of a life whose commit was refused; renews its lease."""
        life = self.lives.get(number)
        if life is None:
            return Standing(LifeState.DEAD, 0)
        life.lease = now + LEASE_SECONDS
        return Standing(life.state, life.batch)

    def stored(self, number: int, writes: Iterable[Write]) -> frozenset[str]:
        """The sessions of a batch that was stored earlier and whose answer was lost: a repeat is accepted.

        A write is recognised by its epoch and number. A session that another life has by now counts as
        refused: nobody is told of the turn, and it is found by its id when it is asked for again.
        """
        return frozenset(write.session for write in writes if self._is_stored(number, write))

    def _is_stored(self, number: int, write: Write) -> bool:
        row = self.sessions.get(write.session)
        if row is None or write.kind is Kind.REMOVE:
            return row is None and write.kind is Kind.REMOVE
        return (row.owner, row.epoch, row.commits) == (number, write.epoch, write.commits)

    # --- owners -----------------------------------------------------------------------------------

    def claim(self, number: int, names: Iterable[str]) -> Mapping[str, Claimed]:
        """Claim free sessions for a life that is LIVE: where each session is now, but for unknown ones.

        A claim whose answer was lost is made again: the session is the life's own by then.
        """
        life = self.lives.get(number)
        found: dict[str, Claimed] = {}
        for name in names:
            row = self.sessions.get(name)
            if row is None:
                continue
            if self._takes_sessions(life) and self._is_free(row):
                self._take(row, number)
            found[name] = Claimed(row.owner, row.epoch, row.commits, row.content)
        return found

    def _take(self, row: Row, taker: int) -> None:
        row.owner = taker
        row.epoch += 1

    @staticmethod
    def _takes_sessions(life: Life | None) -> bool:
        return life is not None and life.state is LifeState.LIVE

    def _is_free(self, row: Row) -> bool:
        return self.lives[row.owner].state not in ALIVE

    def hand_over(self, number: int, offers: Iterable[Offer]) -> Mapping[str, Claimed]:
        """Make lives that are LIVE the owners of sessions at rest: where each is now, but for unknown ones.

        One whose answer was lost is made again: the session is the taker's by then.
        """
        giver = self.lives.get(number)
        found: dict[str, Claimed] = {}
        for offer in offers:
            row, taker = self.sessions.get(offer.session), self.lives.get(offer.target)
            if row is None:
                continue
            if (
                giver is not None
                and giver.state in ALIVE
                and self._takes_sessions(taker)
                and offer.target != number
                and (row.owner, row.epoch, row.commits) == (number, offer.epoch, offer.commits)
            ):
                self._give(row, offer.target)
            found[offer.session] = Claimed(row.owner, row.epoch, row.commits, row.content)
        return found

    def _give(self, row: Row, taker: int) -> None:
        row.owner = taker
        row.epoch += 1
