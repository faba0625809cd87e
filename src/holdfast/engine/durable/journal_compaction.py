"""Compaction of a journal: turns that no session reaches any more are swept away, a portion at a time.

Turns may be written, and sessions cut, forked and closed, between two portions. What was reachable when the
sweep began is kept, and so is everything that was written since: its numbers are higher than any that are
looked at. (The highest of those goes last, so that no number is given twice meanwhile.) Used by the journal.
"""

from __future__ import annotations

import sqlite3

from holdfast.engine.durable.journal_reading import CHAIN

PORTION = 1024
"""Turns that are looked at in one portion, and the most that are deleted."""

PAGES = 128
"""Pages of the file that are given back in one portion."""


class Sweep:
    """One compaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        heads = connection.execute("SELECT head FROM sessions WHERE head IS NOT NULL").fetchall()
        self._ends: list[int] = [head for (head,) in heads]
        """Turns that a session reaches; those before them have not been looked at."""
        self._last: int = connection.execute("SELECT ifnull(max(number), 0) FROM turns").fetchone()[0]
        self._reached: set[int] = set()
        self._passed = -1

    def go_on(self) -> bool:
        """One more portion; whether there is more to do. What it raises leaves no transaction open."""
        if self._ends:
            self._mark()
            return True
        if self._passed < self._last:
            self._delete()
            return True
        before = self._free_pages()
        self._connection.execute(f"PRAGMA incremental_vacuum({PAGES})").fetchall()
        return 0 < self._free_pages() < before

    def _free_pages(self) -> int:
        return int(self._connection.execute("PRAGMA freelist_count").fetchone()[0])

    def _mark(self) -> None:
        """Follow turns back to those that are known to be reached, or to the first."""
        left = PORTION
        while self._ends and left > 0:
            found = self._connection.execute(
                f"{CHAIN} SELECT number, before FROM chain LIMIT ?", (self._ends.pop(), left)
            ).fetchall()
            left -= max(1, len(found))
            for number, _ in found:
                if number in self._reached:
                    break
                self._reached.add(number)
            else:
                if found and found[-1][1] is not None:
                    self._ends.append(found[-1][1])

    def _delete(self) -> None:
        found = self._connection.execute(
            "SELECT number FROM turns WHERE number > ? AND number <= ? ORDER BY number LIMIT ?",
            (self._passed, self._last, PORTION),
        ).fetchall()
        lost = [(number,) for (number,) in found if number not in self._reached]
        if lost:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                self._connection.executemany("DELETE FROM turns WHERE number = ?", lost)
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
        self._passed = found[-1][0] if found else self._last
