"""Compaction of a journal: removes turns that no session reaches any more, a portion at a time.

Turns may be written, and sessions truncated, forked and closed, between two portions. Turns that were
reachable when the compaction began are kept, and so is every later turn: its number is higher than any that
is examined. (The highest examined number is deleted last, so that no number is assigned twice meanwhile.)
Used by the journal.
"""

from __future__ import annotations

import sqlite3

from holdfast.engine.durable.journal_reading import CHAIN

PORTION = 1024
"""Turns that one step examines, and the most that it deletes."""

PAGES = 128
"""Pages of the file that one step frees."""


class Compaction:
    """One mark-and-sweep over the turns."""

    __slots__ = ("_connection", "_heads", "_last", "_marked", "_swept")

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        heads = connection.execute("SELECT head FROM sessions WHERE head IS NOT NULL").fetchall()
        self._heads: list[int] = [head for (head,) in heads]
        """Reachable turns from which the mark phase has yet to continue."""
        self._last: int = connection.execute("SELECT ifnull(max(number), 0) FROM turns").fetchone()[0]
        self._marked: set[int] = set()
        self._swept = -1
        """The highest number that the sweep phase has examined."""

    def step(self) -> bool:
        """One portion; whether there is more to do. An error leaves no transaction open."""
        if self._heads:
            self._mark()
            return True
        if self._swept < self._last:
            self._sweep()
            return True
        before = self._free_pages()
        self._connection.execute(f"PRAGMA incremental_vacuum({PAGES})").fetchall()
        return 0 < self._free_pages() < before

    def _free_pages(self) -> int:
        return int(self._connection.execute("PRAGMA freelist_count").fetchone()[0])

    def _mark(self) -> None:
        """Follow the links back to turns that are marked already, or to the first."""
        left = PORTION
        while self._heads and left > 0:
            found = self._connection.execute(
                f"{CHAIN} SELECT number, before FROM chain LIMIT ?", (self._heads.pop(), left)
            ).fetchall()
            left -= max(1, len(found))
            for number, _ in found:
                if number in self._marked:
                    break
                self._marked.add(number)
            else:
                if found and found[-1][1] is not None:
                    self._heads.append(found[-1][1])

    def _sweep(self) -> None:
        found = self._connection.execute(
            "SELECT number FROM turns WHERE number > ? AND number <= ? ORDER BY number LIMIT ?",
            (self._swept, self._last, PORTION),
        ).fetchall()
        unreachable = [(number,) for (number,) in found if number not in self._marked]
        if unreachable:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                self._connection.executemany("DELETE FROM turns WHERE number = ?", unreachable)
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
        self._swept = found[-1][0] if found else self._last
