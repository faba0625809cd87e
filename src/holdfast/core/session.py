"""A session: one append-only conversation, and where its memory is.

Two tables say what may happen. `LIFE_TABLE` is what the session is doing, `PLACE_TABLE` where its memory is;
they are apart because they are independent: a session may wait for its turn while its memory is on its way
out or back. `Session.state` names the combination as clients see it. An event that is not in the table is a
fault of the caller.
"""

from __future__ import annotations

from enum import Enum

from holdfast.core.errors import IllegalTransition
from holdfast.core.ledger import Holder, Kind, Ledger
from holdfast.core.sequence import Sequence
from holdfast.core.tiers import Parcel
from holdfast.core.turn import Turn


class Life(Enum):
    """What a session is doing."""

    IDLE = "idle"
    QUEUED = "queued"
    RUNNING = "running"
    SEALING = "sealing"
    CLOSING = "closing"
    CLOSED = "closed"


LIFE_TABLE: dict[tuple[Life, str], Life] = {
    (Life.IDLE, "submit"): Life.QUEUED,
    (Life.IDLE, "close"): Life.CLOSED,
    (Life.IDLE, "defer close"): Life.CLOSING,
    (Life.QUEUED, "admit"): Life.RUNNING,
    (Life.QUEUED, "end"): Life.IDLE,
    (Life.RUNNING, "retract"): Life.QUEUED,
    (Life.RUNNING, "end"): Life.IDLE,
    (Life.RUNNING, "seal"): Life.SEALING,
    (Life.RUNNING, "defer close"): Life.CLOSING,
    (Life.SEALING, "submit"): Life.QUEUED,
    (Life.SEALING, "end"): Life.IDLE,
    (Life.SEALING, "close"): Life.CLOSED,
    (Life.SEALING, "defer close"): Life.CLOSING,
    (Life.CLOSING, "close"): Life.CLOSED,
}


class Place(Enum):
    """Where a session's memory is."""

    HOME = "home"
    LEAVING = "leaving"
    AWAY = "away"
    RETURNING = "returning"


PLACE_TABLE: dict[tuple[Place, str], Place] = {
    (Place.HOME, "spill"): Place.LEAVING,
    (Place.HOME, "adopt"): Place.AWAY,
    (Place.LEAVING, "settle"): Place.AWAY,
    (Place.LEAVING, "drop"): Place.HOME,
    (Place.AWAY, "restore"): Place.RETURNING,
    (Place.AWAY, "drop"): Place.HOME,
    (Place.RETURNING, "settle"): Place.HOME,
    (Place.RETURNING, "drop"): Place.HOME,
}

SHOWN = {
    (Life.IDLE, Place.LEAVING): "SPILLING",
    (Life.IDLE, Place.AWAY): "SPILLED",
    (Life.IDLE, Place.RETURNING): "RESTORING",
    (Life.QUEUED, Place.RETURNING): "RESTORING",
}


class Session:
    """A conversation. A one-shot request is a session of one turn that is never named.

    `durable`: what its last turn said would survive the process. `parcel`: its memory on another tier.
    """

    __slots__ = (
        "boundaries",
        "checkpoints",
        "created",
        "durable",
        "holder",
        "idle_since",
        "last",
        "life",
        "number",
        "parcel",
        "place",
        "sequence",
        "tenant",
        "ttl",
        "turn",
        "unsettled",
    )

    def __init__(
        self, ledger: Ledger, name: str, tenant: str, number: int, now: float, ttl: float | None
    ) -> None:
        self.holder: Holder = ledger.holder(Kind.SESSION, name, tenant)
        self.checkpoints: Holder = ledger.holder(Kind.CHECKPOINT, name, tenant)
        self.sequence = Sequence(ledger, self.holder)
        self.tenant = tenant
        self.number = number
        self.created = now
        self.idle_since = now
        self.ttl = ttl
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
        """Whether this is a request of its own rather than a conversation."""
        return self.ttl is None

    @property
    def state(self) -> str:
        """The state as clients see it."""
        return SHOWN.get((self.life, self.place), self.life.name)

    def on(self, event: str) -> None:
        """Follow the table of lives."""
        after = LIFE_TABLE.get((self.life, event))
        if after is None:
            raise IllegalTransition(f"session {self.id}: {event} while {self.life.value}")
        self.life = after

    def moved(self, event: str) -> None:
        """Follow the table of places."""
        after = PLACE_TABLE.get((self.place, event))
        if after is None:
            raise IllegalTransition(f"memory of session {self.id}: {event} while {self.place.value}")
        self.place = after

    @property
    def at_rest(self) -> bool:
        """Whether nothing in flight reads or writes the session's memory, and no turn has it."""
        return self.unsettled == 0 and self.life in (Life.IDLE, Life.QUEUED, Life.SEALING)
