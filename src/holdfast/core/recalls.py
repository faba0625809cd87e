"""Recalls: a cut or a fork waits until the memory of its session can be used.

The scheduler cuts and forks at once, and drops memory that it cannot use at that moment: an incomplete copy,
memory on another tier, a fork without a free page or slot. A client's verb can wait some steps. It asks
`ready` between steps, and acts when the answer is yes, so that no memory on any tier is recomputed.

A spilled session is *recalled*: plans restore it as soon as there is room, before they admit turns, and do
not spill it again before the verb has had a chance to act. If room will never become free, the answer is yes
as well, and the verb acts without the memory.
"""

from __future__ import annotations

from holdfast.core.fallback import resume_length
from holdfast.core.layout import Component
from holdfast.core.ledger import OutOfUnits, OverQuota
from holdfast.core.pressure import Pressure
from holdfast.core.registry import Registry
from holdfast.core.session import Place, Session


class Recalls:
    """Says when verbs may act, and makes it so. Called by the scheduler alone."""

    __slots__ = ("pressure", "registry")

    def __init__(self, registry: Registry, pressure: Pressure) -> None:
        self.registry = registry
        self.pressure = pressure

    def ready(self, session: Session, known: int, forks: bool) -> bool:
        """Whether a cut or a fork that goes on from `known` tokens of a session can act now.

        `known` is 0 for verbs that need no memory. Those that will be refused may act, too.
        """
        if session.turn is not None:
            return True
        if session.unsettled or self.registry.in_flight.has_copies_of(session):
            return False
        if session.place is Place.HOME:
            return not forks or self._has_room(session, known)
        if not _uses_memory(session, known, forks):
            return True
        if session.place is Place.LEAVING and not forks:
            return True  # A cut cancels the move by itself.
        self.registry.queues.recalled[session] = None
        return False

    def _has_room(self, parent: Session, known: int) -> bool:
        """Whether the device has room for the units that a fork copies; if not, room is made."""
        sequence, ledger = parent.sequence, self.registry.ledger
        layout, length = ledger.layout, resume_length(sequence, known)
        if sequence.lease is None or not length:
            return True
        partial = length % layout.page_size > 0
        needs = [each for each in layout.components if each is Component.STATE or partial]
        for component in needs:
            pool, account = ledger.pool(component), parent.holder.account
            while not pool.available(account):
                quota = not pool.room(account)
                shortfall = OverQuota(pool, 1, account) if quota else OutOfUnits(pool, 1, len(pool.free))
                if not self.pressure.make_room(shortfall, parent, may_retract=False):
                    return self.pressure.in_vain(shortfall, parent, None)
        return True


def _uses_memory(session: Session, known: int, forks: bool) -> bool:
    """Whether a verb can use the memory of a session that is away, and would drop it otherwise."""
    sequence = session.sequence
    if known >= sequence.computed:
        return forks and sequence.computed > 0
    leased = 0 if sequence.lease is None else sequence.lease.length
    return resume_length(sequence, known) > leased
