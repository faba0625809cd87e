"""How long sessions are kept: clients pin them and give them priorities, and who left the device is compared.

A session leaves the device only after every session at rest of its tenant that should have left before it: a
pinned one after all that are not, one of a higher priority after those of lower ones. Only plans are looked
at, in which nothing but the pressure moves memory at rest. Draws from a random source of its own. Called by
the world.
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from holdfast.core.retention import PRIORITY_MAX, Retention
from holdfast.core.scheduler import Scheduler
from holdfast.core.session import Life, Place, Session
from holdfast.sim.clients import Clients
from holdfast.sim.found import Check, Found

CHANGES = 0.3
"""How often a session is kept differently from a step on, in every second world."""


class Resting(NamedTuple):
    """An idle session on the device before a plan."""

    session: Session
    rank: tuple[bool, int]


class Keeping:
    """The retention of the sessions of one world."""

    def __init__(self, clients: Clients, rng: Random, pins_count: bool) -> None:
        """`pins_count`: tenants may pin all that they may hold, so that every pin counts."""
        self.clients = clients
        self.rng = rng
        self.pins_count = pins_count
        self.changes = rng.choice((0.0, CHANGES))

    def change(self) -> None:
        """A client keeps a session differently from now on."""
        clients, rng = self.clients, self.rng
        if rng.random() >= self.changes:
            return
        name = clients.sessions.choose(rng)
        if name is None:
            return
        ttl = rng.choice((None, None, 15.0, 600.0))
        priority = rng.choice((-PRIORITY_MAX, 0, 0, 0, 1, PRIORITY_MAX))
        retention = Retention(ttl, rng.random() < 0.5, priority)
        clients.scheduler.retain(name, retention, clients.now)
        conversation = clients.conversations[name]
        conversation.retention = retention
        if conversation.turn_id is None:
            conversation.rested_at = clients.scheduler.registry.now
        clients.hear(clients.scheduler.take_events())

    def resting(self, scheduler: Scheduler) -> list[Resting]:
        """The sessions that may have to leave in the plan that comes next, where their rank is certain.

        One whose memory the plan completes stays for it, whatever its rank.
        """
        copies = scheduler.registry.in_flight
        idle = (
            session
            for session in scheduler.registry.resting
            if session.life is Life.IDLE
            and session.place is Place.HOME
            and not session.unsettled
            and not copies.has_copies_of(session)
        )
        return [
            Resting(session, (session.retention.pinned, session.retention.priority))
            for session in idle
            if self.pins_count or not session.retention.pinned
        ]

    def check(self, resting: list[Resting]) -> None:
        """Raise `Found` if one has left while one that should have left before it is still there."""
        left = [each for each in resting if not _is_there(each.session)]
        there = [each for each in resting if _is_there(each.session) and _has_some(each.session)]
        for one in left:
            for other in there:
                if other.session.tenant == one.session.tenant and other.rank < one.rank:
                    what = f"it left the device before {other.session.id}, {other.rank} against {one.rank}"
                    raise Found(Check.RETENTION, what, one.session.id)

    def compare(self, scheduler: Scheduler) -> None:
        """Every session must be kept as its client said: after forks and restarts, too."""
        registry = scheduler.registry
        for name in self.clients.sessions:
            wanted = self.clients.conversations[name].retention.with_default(registry.policy.session_ttl)
            session = registry.sessions.get(name)
            if session is not None and session.retention != wanted:
                raise Found(Check.RETENTION, f"it is kept as {session.retention}, not as {wanted}", name)


def _has_some(session: Session) -> bool:
    """Whether a session has something of every pool: it is passed over where it has none of the short one."""
    sequence = session.sequence
    pools = [sequence.ledger.pool(component) for component in sequence.ledger.layout.components]
    leased = sequence.lease is not None and sequence.lease.length > 0
    return leased or all(session.holder.held[pool.index] for pool in pools)


def _is_there(session: Session) -> bool:
    """Whether an idle session still has its memory on the device; one that is busy now counts as there."""
    return session.place is Place.HOME and session.sequence.lease is not None
