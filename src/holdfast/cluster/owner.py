"""What one life knows of its sessions, and what it may tell clients of them.

An owner sends one batch at a time. A batch whose answer is lost is sent again, unchanged; a batch that the
store refuses is either stored already (the answer to it was lost) or the life is over. Sessions that are
refused are dropped, unacknowledged: they belong to another life, or were never accepted. Used by the journal
in PostgreSQL and by the replicas of the simulation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Generic, Protocol, TypeVar

from holdfast.cluster.lives import ALIVE
from holdfast.cluster.ownership import Claimed, Offer, Standing

__all__ = ["Owned", "Owner"]


class Owned(Protocol):
    """A session as its owner knows it: its epoch, and how many commits it has once all batches are stored."""

    epoch: int
    commits: int


Known = TypeVar("Known", bound=Owned)


class Owner(Generic[Known]):
    """The sessions of one life."""

    __slots__ = ("_refused", "batch", "life", "over", "sessions")

    def __init__(self, life: int) -> None:
        self.life = life
        self.sessions: dict[str, Known] = {}
        self.batch = 0
        """The number of the last batch whose answer is known."""
        self.over = False
        """Whether the life is known to be over: it writes nothing any more."""
        self._refused: set[str] = set()

    # --- commits ----------------------------------------------------------------------------------

    def is_stored(self, standing: Standing, batch: int) -> bool:
        """Whether a batch that the store refused is stored already; False means that the life is over."""
        return standing.state in ALIVE and standing.batch >= batch

    def settle(self, batch: int, sent: Collection[str], accepted: Collection[str]) -> set[str]:
        """A batch was answered: the refused sessions, which are dropped."""
        self.batch = batch
        refused = {name for name in sent if name not in accepted}
        self.refuse(refused)
        return refused

    def refuse(self, names: Collection[str]) -> None:
        """Drop sessions that are not this life's."""
        for name in names:
            self.sessions.pop(name, None)
        self._refused.update(names)

    def end(self) -> None:
        """The life is over: nothing that it has is its own any more."""
        self.over = True
        self.refuse(list(self.sessions))

    def take_refused(self) -> frozenset[str]:
        """The sessions that were dropped since the last call."""
        refused, self._refused = frozenset(self._refused), set()
        return refused

    # --- owners -----------------------------------------------------------------------------------

    def won(self, answer: Mapping[str, Claimed]) -> list[str]:
        """The sessions of a claim's answer that are this life's, and to be read."""
        return [name for name, claimed in answer.items() if claimed.owner == self.life and not self.over]

    def adopt(self, name: str, known: Known) -> None:
        """A claimed session was read."""
        self.sessions[name] = known

    def offer(self, names: Collection[str], target: int, unsettled: Collection[str]) -> list[Offer]:
        """Sessions at rest to be handed over; those with a batch that is not answered yet are left out."""
        return [
            Offer(name, known.epoch, known.commits, target)
            for name in names
            if name not in unsettled and (known := self.sessions.get(name)) is not None
        ]

    def gave(self, offers: Collection[Offer], answer: Mapping[str, Claimed]) -> list[str]:
        """A hand-over was answered: the sessions that left.

        One that stands as it was offered is kept: its taker is not live any more. Any other is dropped: this
        life had an older view of it. It is claimed, and read, again when it is needed.
        """
        left: list[str] = []
        for offer in offers:
            at = answer.get(offer.session)
            if at is not None and at[:3] == (self.life, offer.epoch, offer.commits):
                continue
            if at is not None and at[:2] == (offer.target, offer.epoch + 1):
                self.sessions.pop(offer.session, None)
                left.append(offer.session)
            else:
                self.refuse((offer.session,))
        return left
