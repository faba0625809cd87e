"""The store of the simulation: the real rules of ownership, with a check of every decision.

Linearizable: a statement happens at one moment, or is lost before it, or its answer is lost after it. The
check keeps its own account of versions, epochs, lives and tenants, and reports violations. Used
by replicas and API processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, NoReturn

from holdfast.cluster.lives import ALIVE, LifeState
from holdfast.cluster.ownership import Claimed, Kind, Offer, Ownership, Row, Write
from holdfast.sim.cluster.events import Events
from holdfast.sim.cluster.history import History

__all__ = ["Finding", "Found", "Located", "Store"]


class Finding(NamedTuple):
    """Something that must never happen."""

    kind: str
    detail: str
    time: float
    event: int


class Found(Exception):
    """The first finding ends a run."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.detail)
        self.finding = finding


class Located(NamedTuple):
    """Who owns a session, and whether that life is over."""

    life: int
    over: bool


class Store:
    """The tables and the watch."""

    def __init__(self, events: Events, limit: int) -> None:
        self.events = events
        self.limit = limit
        self.rules = Ownership()
        self.skew = 0.0
        """How far its clock is ahead; a failover changes it."""
        self.down = False
        self.counts = {"commits": 0, "refused": 0, "claims": 0, "handed over": 0, "deaths": 0}
        self._writers: dict[str, tuple[int, int]] = {}
        self._tenants: dict[str, int] = {}
        self._over: set[int] = set()

    @property
    def now(self) -> float:
        """The time of its clock."""
        return self.events.now + self.skew

    def find(self, kind: str, detail: str) -> NoReturn:
        """Report a finding."""
        raise Found(Finding(kind, detail, self.events.now, self.events.count))

    # --- lives ------------------------------------------------------------------------------------

    def begin(self, name: str) -> int | None:
        """Begin a life."""
        return self.rules.begin(name, self.now)

    def renew(self, life: int) -> bool:
        """Renew a lease."""
        renewed = self.rules.renew(life, self.now)
        if renewed:
            self._require_not_over(life, "was renewed")
        return renewed

    def bury(self, life: int, connected: bool, heard: bool) -> bool:
        """Declare a life dead, if its lease and its connections allow that."""
        known = self.rules.lives[life].state in ALIVE
        over = self.rules.bury(life, connected, heard, self.now)
        if over:
            self.counts["deaths"] += known
            self._over.add(life)
        return over

    def drain(self, life: int) -> bool:
        """Let a life take no more sessions."""
        return self.rules.drain(life)

    def end(self, life: int) -> bool:
        """End a life."""
        ended = self.rules.end(life)
        self._over.add(life)
        return ended

    def _require_not_over(self, life: int, what: str) -> None:
        if life in self._over:
            self.find("life", f"life {life} {what} after it was over")

    # --- writes -----------------------------------------------------------------------------------

    def commit(self, life: int, batch: int, writes: Sequence[Write]) -> frozenset[str] | None:
        """Commit a batch, and examine what was accepted."""
        before = {write.session: self._version(write.session) for write in writes}
        tenants = {write.session: self._tenant(write.session) for write in writes}
        accepted = self.rules.commit(life, batch, writes, self.limit, self.now)
        if accepted is None:
            return None
        self._require_not_over(life, "committed")
        self.counts["commits"] += len(accepted)
        self.counts["refused"] += len(writes) - len(accepted)
        for write in writes:
            if write.session in accepted:
                self._examine(life, write, before, tenants[write.session])
        return accepted

    def _version(self, session: str) -> int | None:
        row = self.rules.sessions.get(session)
        return row.content.version if row is not None and isinstance(row.content, History) else None

    def _tenant(self, session: str) -> str:
        row = self.rules.sessions.get(session)
        return "" if row is None else row.tenant

    def _examine(self, life: int, write: Write, before: Mapping[str, int | None], tenant: str) -> None:
        session, was = write.session, before[write.session]
        content = write.content
        if write.kind is Kind.CREATE:
            parent = write.needs
            assert isinstance(content, History)
            if parent is not None and content.base != before.get(parent):
                self.find("fork", f"{session} was forked of a version of {parent} that the store never had")
            if was is not None:
                self.find("lost turn", f"{session} was opened again by life {life} while it is open")
            self._count(write.tenant, 1)
            self._writers[session] = (write.epoch, life)
            return
        epoch, writer = self._writers[session]
        if write.epoch < epoch or (write.epoch == epoch and writer != life):
            detail = f"{session}: lives {writer} and {life} both commit in epoch {write.epoch}"
            self.find("two owners", detail)
        self._writers[session] = (write.epoch, life)
        if write.kind is Kind.REMOVE:
            del self._writers[session]
            self._count(tenant, -1)
            return
        assert isinstance(content, History)
        if content.base != was:
            detail = f"{session}: life {life} commits on top of version {content.base}, the store has {was}"
            self.find("lost turn", detail)

    def _count(self, tenant: str, by: int) -> None:
        count = self._tenants[tenant] = self._tenants.get(tenant, 0) + by
        if count > self.limit:
            self.find("tenant limit", f"tenant {tenant} has {count} sessions, its limit is {self.limit}")

    def expire(self, name: str) -> None:
        """An owner closes a session at the end of its time to live."""
        row = self.rules.sessions.pop(name)
        if row.counted:
            self.rules.tenants[row.tenant] -= 1
        del self._writers[name]
        self._count(row.tenant, -1)

    # --- owners -----------------------------------------------------------------------------------

    def claim(self, life: int, names: Iterable[str]) -> Mapping[str, Claimed]:
        """Claim sessions, and examine from whom they were taken."""
        names = list(names)
        before = {name: self._owner(name) for name in names}
        answer = self.rules.claim(life, names)
        for name, at in answer.items():
            owner, epoch = before[name]
            if owner != at.owner:
                self._examine_change(name, owner, at, epoch)
                self.counts["claims"] += 1
                if self.rules.lives[owner].state in ALIVE:
                    self.find("two owners", f"{name} was claimed from life {owner}, which is alive")
        return answer

    def _owner(self, name: str) -> tuple[int, int]:
        row: Row | None = self.rules.sessions.get(name)
        return (0, 0) if row is None else (row.owner, row.epoch)

    def _examine_change(self, name: str, owner: int, at: Claimed, epoch: int) -> None:
        if at.epoch <= epoch:
            self.find("two owners", f"{name} went from life {owner} to {at.owner} in one epoch, {epoch}")
        if self.rules.lives[at.owner].state is not LifeState.LIVE:
            self.find("life", f"life {at.owner} took {name} over and takes no sessions")

    def hand_over(self, life: int, offers: Sequence[Offer]) -> Mapping[str, Claimed]:
        """Hand sessions over, and examine to whom."""
        before = {offer.session: self._owner(offer.session) for offer in offers}
        answer = self.rules.hand_over(life, offers)
        for name, at in answer.items():
            owner, epoch = before[name]
            if owner != at.owner:
                self.counts["handed over"] += 1
                self._examine_change(name, owner, at, epoch)
        return answer

    def locate(self, session: str) -> Located | None:
        """The owner of a session; None if there is no such session."""
        row = self.rules.sessions.get(session)
        if row is None:
            return None
        return Located(row.owner, self.rules.lives[row.owner].state not in ALIVE)

    def content(self, session: str) -> History | None:
        """What the store has of a session, for checks."""
        row = self.rules.sessions.get(session)
        return row.content if row is not None and isinstance(row.content, History) else None
