"""A session: one append-only conversation, and where its memory is.

Two tables define the legal events. `LIFE_TABLE` has the states of the session, `PLACE_TABLE` the places of
its memory; they are independent: a session may wait for its turn while its memory is being spilled or
restored. `Session.state` names the combination as clients see it. An event that is not in the table is a
fault of the caller.
"""

from __future__ import annotations

from enum import StrEnum

from holdfast.core.errors import IllegalTransition
from holdfast.core.ledger import Holder, Kind, Ledger
from holdfast.core.retention import Retention
from holdfast.core.sequence import Sequence
from holdfast.core.tiers import Parcel
from holdfast.core.turn import Turn


class Life(StrEnum):
    """The state of a session."""

    IDLE = "idle"
    QUEUED = "queued"
    RUNNING = "running"
    SEALING = "sealing"
    CLOSING = "closing"
    CLOSED = "closed"


class LifeEvent(StrEnum):
    """What may happen to a session."""

    SUBMIT = "submit"
    ADMIT = "admit"
    RETRACT = "retract"
    SEAL = "seal"
    END = "end"
    DEFER_CLOSE = "defer close"
    CLOSE = "close"


LIFE_TABLE: dict[tuple[Life, LifeEvent], Life] = {
    (Life.IDLE, LifeEvent.SUBMIT): Life.QUEUED,
    (Life.IDLE, LifeEvent.CLOSE): Life.CLOSED,
    (Life.IDLE, LifeEvent.DEFER_CLOSE): Life.CLOSING,
    (Life.QUEUED, LifeEvent.ADMIT): Life.RUNNING,
    (Life.QUEUED, LifeEvent.END): Life.IDLE,
    (Life.RUNNING, LifeEvent.RETRACT): Life.QUEUED,
    (Life.RUNNING, LifeEvent.END): Life.IDLE,
    (Life.RUNNING, LifeEvent.SEAL): Life.SEALING,
    (Life.RUNNING, LifeEvent.DEFER_CLOSE): Life.CLOSING,
    (Life.SEALING, LifeEvent.SUBMIT): Life.QUEUED,
    (Life.SEALING, LifeEvent.END): Life.IDLE,
    (Life.SEALING, LifeEvent.CLOSE): Life.CLOSED,
    (Life.SEALING, LifeEvent.DEFER_CLOSE): Life.CLOSING,
    (Life.CLOSING, LifeEvent.CLOSE): Life.CLOSED,
}


class Place(StrEnum):
    """Where a session's memory is."""

    HOME = "home"
    LEAVING = "leaving"
    AWAY = "away"
    RETURNING = "returning"


class PlaceEvent(StrEnum):
    """What may happen to a session's memory."""

    SPILL = "spill"
    ADOPT = "adopt"
    SETTLE = "settle"
    RESTORE = "restore"
    CANCEL = "cancel"
    DROP = "drop"


PLACE_TABLE: dict[tuple[Place, PlaceEvent], Place] = {
    (Place.HOME, PlaceEvent.SPILL): Place.LEAVING,
    (Place.HOME, PlaceEvent.ADOPT): Place.AWAY,
    (Place.LEAVING, PlaceEvent.SETTLE): Place.AWAY,
    (Place.LEAVING, PlaceEvent.DROP): Place.HOME,
    (Place.AWAY, PlaceEvent.RESTORE): Place.RETURNING,
    (Place.AWAY, PlaceEvent.DROP): Place.HOME,
    (Place.RETURNING, PlaceEvent.SETTLE): Place.HOME,
    (Place.RETURNING, PlaceEvent.CANCEL): Place.AWAY,
    (Place.RETURNING, PlaceEvent.DROP): Place.HOME,
}

SHOWN = {
    (Life.IDLE, Place.LEAVING): "SPILLING",
    (Life.IDLE, Place.AWAY): "SPILLED",
    (Life.IDLE, Place.RETURNING): "RESTORING",
    (Life.QUEUED, Place.RETURNING): "RESTORING",
}


class Session:
    """A conversation. A one-shot request is a session of one turn that is never named.

    `durable`: its last turn would survive the process. `parcel`: its memory on another tier.
    `expected`: when its next turn is expected, if its client said so; 0 if not. `volatile`: its client
    resends the conversation with each request, so the session may be lost at any time: it is in
    no journal and in no file, and counts towards no limit of sessions.
    """

    __slots__ = (
        "boundaries",
        "checkpoints",
        "created",
        "durable",
        "expected",
        "holder",
        "idle_since",
        "last",
        "life",
        "number",
        "parcel",
        "place",
        "retention",
        "sequence",
        "tenant",
        "turn",
        "unsettled",
        "volatile",
    )

    def __init__(
        self,
        ledger: Ledger,
        name: str,
        tenant: str,
        number: int,
        now: float,
        retention: Retention | None,
        volatile: bool = False,
    ) -> None:
        self.holder: Holder = ledger.holder(Kind.SESSION, name, tenant)
        self.checkpoints: Holder = ledger.holder(Kind.CHECKPOINT, name, tenant)
        self.sequence = Sequence(ledger, self.holder)
        self.tenant = tenant
        self.number = number
        self.created = now
        self.idle_since = now
        self.expected = 0.0
        self.retention = retention if retention is not None else Retention()
        self.volatile = volatile
        self.life = Life.IDLE
        self.place = Place.HOME
        self.parcel: Parcel | None = None
        self.turn: Turn | None = None
        self.last: Turn | None = None
        self.boundaries: list[int] = []
        self.unsettled = 0
        self.durable = True

    @property
    def id(self) -> str:
        """The name of the session."""
        return self.holder.name

    @property
    def one_shot(self) -> bool:
        """Whether this is a request of its own rather than a conversation: it has no time to live."""
        return self.retention.ttl is None

    @property
    def history(self) -> int:
        """How many tokens the conversation has: the input of an open turn is not said yet."""
        turn = self.turn
        return turn.known_before if turn is not None and turn.is_open else self.sequence.known

    def boundaries_below(self, known: int) -> list[int]:
        """The boundaries of its first `known` tokens: a turn that reaches past them ends there."""
        kept = [boundary for boundary in self.boundaries if boundary <= known]
        return kept if known in (0, *kept[-1:]) else [*kept, known]

    @property
    def state(self) -> str:
        """The state as clients see it."""
        if self.turn is not None and self.turn.is_open and self.life is not Life.CLOSING:
            return "LISTENING"
        return SHOWN.get((self.life, self.place), self.life.name)

    def on(self, event: LifeEvent) -> None:
        """Follow the table of lives."""
        after = LIFE_TABLE.get((self.life, event))
        if after is None:
            raise IllegalTransition(f"session {self.id}: {event} while {self.life.value}")
        self.life = after

    def moved(self, event: PlaceEvent) -> None:
        """Follow the table of places."""
        after = PLACE_TABLE.get((self.place, event))
        if after is None:
            raise IllegalTransition(f"memory of session {self.id}: {event} while {self.place.value}")
        self.place = after

    @property
    def at_rest(self) -> bool:
        """Whether nothing in flight reads or writes the session's memory, and no turn has it."""
        return self.unsettled == 0 and self.life in (Life.IDLE, Life.QUEUED, Life.SEALING)
