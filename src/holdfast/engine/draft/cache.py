"""The KV cache of a draft model or a draft head: pages of its own ledger, each held by one session.

The cache is bounded and recomputable. A session gets pages when its turn drafts and keeps them between turns;
the sessions that drafted longest ago give theirs up when others need them. Nothing is shared, forked or moved
to another tier: what is missing or no longer agrees with the session's tokens is computed again from those
(docs/decisions/0043). A head cannot compute what it was not fed: its cache begins where it was fed first
(docs/decisions/0048). Draft passes are run to their end before anything else happens here, so that no page is
ever named by a step in flight. Used by `proposer` and `head_proposer`.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Collection

from holdfast.core.layout import Component, MemoryLayout, Tier
from holdfast.core.ledger import Hold, Holder, Kind, Ledger
from holdfast.core.plan import TableChange
from holdfast.core.session import Session
from holdfast.core.tokens import TokenLog
from holdfast.core.turn import Turn

__all__ = ["DraftCache", "Entry"]

PORTION = 1024
"""Tokens that are compared at a time."""


class Entry:
    """The draft memory of one session: its pages, and the tokens whose keys and values they hold.

    The first `checked` of the tokens are known to agree with the session's, as long as its turn `turn` runs.
    The draft model's block tables have the first `sent` pages. The pages hold the tokens from position
    `base` on, the last `lag` left out: a head's place `i` takes token `i + 1`.
    """

    __slots__ = ("base", "checked", "holder", "holds", "lag", "number", "sent", "tokens", "turn")

    def __init__(self, ledger: Ledger, session: Session, lag: int) -> None:
        self.number = session.number
        self.holder: Holder = ledger.holder(Kind.SESSION, session.id, session.tenant)
        self.holds: list[Hold] = [ledger.take(pool, 0, self.holder) for pool in ledger.pools.values()]
        self.tokens = array("I")
        self.turn = -1
        self.checked = 0
        self.sent = 0
        self.base = 0
        self.lag = lag

    @property
    def pages(self) -> int:
        """Pages of each component."""
        return len(self.holds[0])

    @property
    def places(self) -> int:
        """Tokens whose keys and values are in the pages."""
        return max(0, len(self.tokens) - self.base - self.lag)


class DraftCache:
    """The draft memory of all sessions, least recently used first."""

    __slots__ = ("entries", "evicted", "forgotten", "lag", "ledger")

    def __init__(self, layout: MemoryLayout, pages: int, *, lag: int = 0) -> None:
        """`lag` is 1 for a draft head."""
        assert layout.paged and not layout.state, "a draft model has attention alone"
        self.lag = lag
        self.ledger = Ledger(layout, {(component, Tier.DEVICE): pages for component in layout.components})
        self.entries: OrderedDict[str, Entry] = OrderedDict()
        self.forgotten: list[int] = []
        """Numbers of block tables that the next pass drops."""
        self.evicted = 0
        """Sessions that have lost their draft memory to others."""

    def find(self, session: Session, turn: Turn) -> Entry:
        """The entry of a session, cut to the tokens that agree with it; it is now the most recently used."""
        entry = self.entries.get(session.id)
        if entry is not None and entry.number != session.number:
            self.release(session.id)
            entry = None
        if entry is None:
            entry = self.entries[session.id] = Entry(self.ledger, session, self.lag)
        self.entries.move_to_end(session.id)
        log = session.sequence.tokens
        if entry.turn != turn.number:
            entry.turn, entry.checked = turn.number, 0
        # The last token is computed again if it must be: what follows it is drafted from its logits.
        agreed = _agreement(entry.tokens, log, entry.checked)
        self._cut(entry, agreed if self.lag else min(agreed, len(log) - 1))
        entry.checked = len(entry.tokens)
        return entry

    def begin(self, entry: Entry, log: TokenLog, base: int) -> None:
        """Give up what an entry holds; it holds the tokens from position `base` on that come next."""
        self._cut(entry, 0)
        entry.base = base
        entry.tokens.frombytes(log.packed(0, base + self.lag))
        entry.checked = len(entry.tokens)

    def reserve(self, entry: Entry, length: int, needed: Collection[str]) -> bool:
        """Take pages for `length` tokens; sessions that are not `needed` may lose theirs. False without room.

        Nothing has changed then.
        """
        missing = self.ledger.layout.pages_for(length) - entry.pages
        if missing <= 0:
            return True
        room, evicted = min(len(pool.free) for pool in self.ledger.pools.values()), []
        for session_id, each in self.entries.items():
            if room >= missing:
                break
            if session_id not in needed and each.pages:
                evicted.append(session_id)
                room += each.pages
        if room < missing:
            return False
        for session_id in evicted:
            self.release(session_id)
        self.evicted += len(evicted)
        for hold in entry.holds:
            hold.grow(missing)
        return True

    def table_change(self, entry: Entry) -> TableChange | None:
        """What the block tables do not have yet of an entry; they have it from now on."""
        first, entry.sent = entry.sent, entry.pages
        if first == entry.sent:
            return None
        pages = {hold.pool.component: hold.units[first:] for hold in entry.holds}
        return TableChange(first, pages.get(Component.FULL, []), first, pages.get(Component.WINDOW, []))

    def take_forgotten(self) -> list[int]:
        """The numbers of block tables to drop, once."""
        forgotten, self.forgotten = self.forgotten, []
        return forgotten

    def release(self, session_id: str) -> None:
        """Give up the draft memory of a session, if it has any."""
        entry = self.entries.pop(session_id, None)
        if entry is None:
            return
        for hold in entry.holds:
            hold.release()
        self.forgotten.append(entry.number)

    def clear(self) -> None:
        """Give up everything: a pass failed, and nobody knows what is in memory."""
        for session_id in list(self.entries):
            self.release(session_id)

    def _cut(self, entry: Entry, length: int) -> None:
        """Forget the tokens from `length` on, and give up whole pages past them."""
        del entry.tokens[length:]
        spare = entry.pages - self.ledger.layout.pages_for(entry.places)
        if spare > 0:
            for hold in entry.holds:
                hold.shrink(spare)
            entry.sent = min(entry.sent, entry.pages)


def _agreement(tokens: array[int], log: TokenLog, first: int) -> int:
    """How many tokens agree with a log, of which the first `first` are known to."""
    stop = min(len(tokens), len(log))
    place = min(first, stop)
    while place < stop:
        end = min(stop, place + PORTION)
        if tokens[place:end].tobytes() != log.packed(place, end):
            return place + next(
                index
                for index, (one, other) in enumerate(
                    zip(tokens[place:end], log.slice(place, end), strict=True)
                )
                if one != other
            )
        place = end
    return stop
