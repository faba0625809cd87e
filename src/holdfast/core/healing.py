"""The consequences of a finding: only owners whose memory cannot be trusted lose it.

The audit repairs the counts (`audit.py`). The sessions that a finding names lose their turn and, once no row
in flight reads it, their memory; the committed tokens stay, and the next turn computes them again. Called by
the scheduler after each step, and in idle moments.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from holdfast.core.audit import Audit, Finding, Owner
from holdfast.core.events import Event, EventKind
from holdfast.core.registry import Registry
from holdfast.core.session import Life, Session
from holdfast.core.settler import Settler
from holdfast.core.turn import Ending, TurnEvent


class Healing:
    """The audit of a registry, and the effect of its findings on sessions."""

    __slots__ = ("audit", "registry", "settler")

    def __init__(self, registry: Registry, settler: Settler) -> None:
        self.registry = registry
        self.settler = settler
        self.audit = Audit(registry.ledger, registry.tree, self._owners)

    def _owners(self) -> Iterator[Owner]:
        for session in self.registry.sessions.values():
            yield session.sequence
            if session.parcel is not None:
                yield session.parcel

    def census(self) -> list[Finding]:
        """A whole census now."""
        found = self.audit.census()
        self.suffer(found)
        return found

    def suffer(self, findings: Iterable[Finding]) -> None:
        """Findings name owners whose memory cannot be trusted: their turns fail, their memory goes."""
        registry = self.registry
        for finding in findings:
            registry.events.append(Event(EventKind.FINDING, "", None, [], str(finding)))
            for owner in finding.owners:
                for session in [s for s in registry.sessions.values() if owner in (s.sequence, s.parcel)]:
                    self._fail_memory(session, str(finding))
        if registry.queues.tainted:
            self._drop_tainted()

    def _fail_memory(self, session: Session, reason: str) -> None:
        """Fail a session's turn and give up its memory; its committed tokens stay."""
        turn = session.turn
        if turn is not None and session.life in (Life.RUNNING, Life.CLOSING):
            turn.ending = Ending(TurnEvent.FAIL, reason, trusted=False)
            if not session.unsettled:
                self.settler.end(session)
        if session.id in self.registry.sessions:
            self.registry.queues.tainted[session] = None

    def _drop_tainted(self) -> None:
        """Give up memory that cannot be trusted, as soon as no row in flight names it."""
        tainted = self.registry.queues.tainted
        for session in [session for session in tainted if not session.unsettled]:
            del tainted[session]
            self.registry.drop_memory(session)
