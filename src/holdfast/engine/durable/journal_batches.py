"""The list of what was committed, outside the database: a damaged write-ahead log does not go unnoticed.

SQLite's recovery ends at the first frame of the write-ahead log that fails its checksum; what was committed
after it is dropped without a word. So a journal numbers its transactions, and each opening for writing (a
run), in the database, and appends a line to a file beside it after each commit: the number, and what was in
it. A database of the same run whose number is lower than the last line's has lost transactions.

A line is written after its commit and is not synced: a process that is killed between the two leaves a file
that is behind, which says nothing. Where the machine itself went down, transactions that were not synced
(durability `off` and `commit`) may be gone while their lines are not: that is what was promised, and is told,
not refused. Lines carry checksums; one that fails its own is passed over. Used by the journal.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import zlib
from collections import deque
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.engine.durable.records import Ended, JournalError, Record

log = logging.getLogger("holdfast.journal")

SUFFIX = ".batches"
BOOT = Path("/proc/sys/kernel/random/boot_id")

BYTES_MAX = 1 << 20
LINES_KEPT = 1024
"""Lines that stay when the file is written anew: more than the write-ahead log holds before it is emptied."""

RECORDS_NAMED = 32
"""Records of a batch that its line names, and sessions that an error does."""


@dataclass(slots=True)
class Listed:
    """What a list says: which run it is of, under which promise, and what each of its batches was."""

    run: str
    boot: str
    durability: str
    batches: dict[int, list[tuple[str, str]]] = field(default_factory=dict)
    """For each number the sessions that it changed, and how."""


def beside(journal: Path) -> Path:
    """The list that belongs to a journal, under whichever name that is opened."""
    real = Path(os.path.realpath(journal))
    return real.with_name(real.name + SUFFIX)


def boot_id() -> str:
    """A name for this life of the machine; empty where the system has none."""
    try:
        return BOOT.read_text(encoding="ascii").strip()
    except OSError:
        log.debug("the system does not say when it was started")
        return ""


class BatchList:
    """The list of a journal that is open for writing. What cannot be written to it is no fault of a turn."""

    def __init__(self, journal: Path, run: str, durability: str) -> None:
        self._path = beside(journal)
        self._head = _line({"run": run, "boot": boot_id(), "durability": durability})
        self._kept: deque[bytes] = deque(maxlen=LINES_KEPT)
        self._bytes = 0
        self._failed = False
        self._descriptor: int | None = None
        self._write_anew()

    def add(self, number: int, records: list[Record]) -> None:
        """A batch is committed."""
        named = [(record.session, _what(record)) for record in records[:RECORDS_NAMED]]
        line = _line([number, named])
        self._kept.append(line)
        if self._descriptor is None or self._bytes > BYTES_MAX:
            self._write_anew()
        else:
            self._append(line)

    def _append(self, content: bytes) -> None:
        assert self._descriptor is not None
        try:
            self._bytes += os.write(self._descriptor, content)
            self._failed = False
        except OSError as error:
            self._complain(error)

    def _write_anew(self) -> None:
        """A new file with the last lines in the place of the old one, which goes when it is there."""
        new = self._path.with_name(self._path.name + ".new")
        try:
            descriptor = os.open(new, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND, 0o600)
            self.close()
            self._descriptor, self._bytes = descriptor, 0
            self._append(b"".join([self._head, *self._kept]))
            new.replace(self._path)
        except OSError as error:
            self._complain(error)

    def _complain(self, error: OSError) -> None:
        if not self._failed:
            log.warning("%s cannot be written: damage might go unnoticed (%s)", self._path.name, error)
        self._failed = True

    def close(self) -> None:
        """Let go of the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _what(record: Record) -> str:
    return f"turn {record.turn.turn_id}" if isinstance(record, Ended) else record.kind.value


def _line(value: object) -> bytes:
    content = json.dumps(value).encode()
    return b"%08x %s\n" % (zlib.crc32(content), content)


def read_list(journal: Path) -> Listed | None:
    """The list beside a journal, as far as it can be read; None if there is none, or none that helps."""
    try:
        lines = beside(journal).read_bytes().splitlines()
    except FileNotFoundError:
        return None
    values = [value for line in lines if (value := _value(line)) is not None]
    if not values or "run" not in values[0]:
        log.warning("%s cannot be read: damage might go unnoticed", beside(journal).name)
        return None
    head = values[0]
    listed = Listed(str(head["run"]), str(head.get("boot", "")), str(head.get("durability", "")))
    for number, named in values[1:]:
        listed.batches[number] = [(session, what) for session, what in named]
    return listed


def _value(line: bytes) -> Any:
    """What a line says; None if it is not as it was written."""
    expected, _, content = line.partition(b" ")
    return json.loads(content) if expected == b"%08x" % zlib.crc32(content) else None


def require_all(journal: Path) -> None:
    """Refuse a journal that has lost what was committed; changes nothing, so that it can be mended.

    The list is read before the database: whoever writes both meanwhile leaves the database ahead.
    """
    listed = read_list(journal)
    if listed is None or not listed.batches or not journal.exists():
        return
    place = f"{journal.absolute().as_uri()}?mode=ro"
    try:
        with closing(sqlite3.connect(place, uri=True)) as connection:
            facts: dict[str, str] = dict(
                connection.execute("SELECT name, value FROM facts WHERE name IN ('run', 'batch')").fetchall()
            )
    except (sqlite3.Error, UnicodeDecodeError) as error:
        log.debug("what is wrong with the journal is told when it is opened: %s", error)
        return
    if facts.get("run") != listed.run or not facts.get("batch", "").isdecimal():
        log.info("%s is of another journal, or of an older copy", beside(journal).name)
        return
    missing = {number: named for number, named in listed.batches.items() if number > int(facts["batch"])}
    if not missing:
        return
    told = (
        f"{journal} has lost its last {len(missing)} transactions, which were acknowledged: {_named(missing)}"
    )
    if listed.durability != "fsync" and listed.boot != boot_id():
        log.error("%s. The machine went down meanwhile, and durability was %s", told, listed.durability)
        return
    raise JournalError(
        f"{told}. Its write-ahead log is damaged or missing: restore a copy of {journal.name} and "
        f"{journal.name}-wal, or remove {beside(journal).name} to go on with what is left"
    )


def _named(missing: dict[int, list[tuple[str, str]]]) -> str:
    """Sessions with what they have lost, as far as that is known."""
    lost: dict[str, list[str]] = {}
    for number in sorted(missing):
        for session, what in missing[number]:
            lost.setdefault(session, []).append(what)
    told = [f"session {ascii(name)[1:-1]}: {', '.join(lost[name])}" for name in list(lost)[:RECORDS_NAMED]]
    more = len(lost) - len(told)
    return "; ".join(told) + (f"; and {more} sessions more" if more else "")
