"""Compaction: deletes unreachable turns, a portion at a time.

A turn is *loose* if no turn follows it and no session ends with it. It stays unreachable, because
turns are only ever added after the last turn of a session, and forks of a session end with turns of its
history. So the sweep needs no marks and no order of numbers, and other servers may write meanwhile. It
deletes a loose turn and its predecessors down to one that is still needed. It begins with the turns that
this life has loosened; those of earlier lives are searched once, at the start. Used by the store.
"""

from __future__ import annotations

from collections import deque

from holdfast.engine.durable.postgres.link import Connection

__all__ = ["Compaction"]

PORTION = 1024
"""Turns that one step examines, and the most that it deletes."""

LOG_KEPT = 10_000
"""Rows of the log table that are kept."""

NEEDED = (
    "EXISTS (SELECT 1 FROM holdfast.sessions s WHERE s.head = t.number) "
    "OR EXISTS (SELECT 1 FROM holdfast.turns n WHERE n.before = t.number{other})"
)

SWEEP = f"""
WITH RECURSIVE loose (number, before) AS (
    SELECT number, before FROM holdfast.turns t
    WHERE number = ANY(%(loose)s) AND NOT ({NEEDED.format(other="")})
    UNION SELECT t.number, t.before FROM loose l JOIN holdfast.turns t ON t.number = l.before
    WHERE NOT ({NEEDED.format(other=" AND n.number <> l.number")})),
portion AS (SELECT number FROM loose LIMIT %(most)s)
DELETE FROM holdfast.turns t USING portion p WHERE t.number = p.number RETURNING t.number, t.before
"""

LOOK = f"""
WITH portion AS (
    SELECT number FROM holdfast.turns WHERE number > %(after)s ORDER BY number LIMIT %(most)s)
SELECT number, NOT ({NEEDED.format(other="")}) FROM portion t ORDER BY number
"""

TRIM = "DELETE FROM holdfast.log WHERE number <= (SELECT max(number) FROM holdfast.log) - %s"


class Compaction:
    """The known loose turns, and the progress of the search for more."""

    def __init__(self) -> None:
        self.loose: deque[int] = deque()
        self._searched: int | None = -1
        """The highest number that the search has examined; None when it is over."""
        self._trimmed = False

    @property
    def due(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.loose) or self._searched is not None or not self._trimmed

    def add(self, numbers: list[int]) -> None:
        """Turns that a session has stopped to end with."""
        self.loose.extend(numbers)
        self._trimmed = False

    def step(self, connection: Connection) -> bool:
        """One portion; whether there is more to do."""
        if self.loose:
            self._sweep(connection)
        elif self._searched is not None:
            self._search(connection)
        elif not self._trimmed:
            connection.execute(TRIM, (LOG_KEPT,))
            self._trimmed = True
        return self.due

    def _sweep(self, connection: Connection) -> None:
        some = [self.loose[place] for place in range(min(PORTION, len(self.loose)))]
        rows = connection.execute(SWEEP, {"loose": some, "most": PORTION}).fetchall()
        for _ in some:
            self.loose.popleft()
        deleted = {number for number, _ in rows}
        self.loose.extend({before for _, before in rows if before is not None} - deleted)

    def _search(self, connection: Connection) -> None:
        rows = connection.execute(LOOK, {"after": self._searched, "most": PORTION}).fetchall()
        self.loose.extend(number for number, loose in rows if loose)
        self._searched = rows[-1][0] if rows else None
