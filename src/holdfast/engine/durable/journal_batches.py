"""The list of committed batches, a file beside the database that reveals a damaged write-ahead log.

SQLite's recovery ends at the first frame of the write-ahead log that fails its checksum, and silently drops
later transactions. So the database has the number of its last batch and a name for each opening (a run), and
after each commit a line with the number and contents of the batch is appended to the list. A database of the
same run whose number is lower than that of the last line has lost batches.

A line is written after its commit and is not synced: if the process is killed between the two, the list is
behind the database, which is harmless. After a crash of the machine, batches that were not synced (durability
`off` and `commit`) may be missing although the list has them: that is logged, not refused. Lines have
checksums; a line whose checksum fails is skipped. Used by the journal.
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
from typing import Any, NamedTuple

from holdfast.engine.durable.records import Ended, JournalError, Record

log = logging.getLogger("holdfast.journal")

SUFFIX = ".batches"
BOOT = Path("/proc/sys/kernel/random/boot_id")

BYTES_MAX = 1 << 20
LINES_KEPT = 1024
"""Lines that stay when the file is rewritten: more than the write-ahead log has before a checkpoint."""

RECORDS_NAMED = 32
"""Most records that a line names, and most sessions that an error names."""


class Change(NamedTuple):
    """A session that a batch changed, and how."""

    session: str
    what: str


@dataclass(slots=True)
class Listing:
    """The content of a list: its run, the boot and the durability of that run, and its batches."""

    run: str
    boot: str
    durability: str
    batches: dict[int, list[Change]] = field(default_factory=dict)


def list_path(journal: Path) -> Path:
    """The list of a journal, beside its real path."""
    real = Path(os.path.realpath(journal))
    return real.with_name(real.name + SUFFIX)


def boot_id() -> str:
    """The kernel's id of this boot; empty where the system has none."""
    try:
        return BOOT.read_text(encoding="ascii").strip()
    except OSError:
        log.debug("the system has no boot id")
        return ""


class BatchList:
    """The list of a journal that is open for writing. No turn fails because the list cannot be written."""

    def __init__(self, journal: Path, run: str, durability: str) -> None:
        self._path = list_path(journal)
        self._head = _line({"run": run, "boot": boot_id(), "durability": durability})
        self._kept: deque[bytes] = deque(maxlen=LINES_KEPT)
        self._bytes = 0
        self._failed = False
        self._descriptor: int | None = None
        self._rewrite()

    def add(self, number: int, records: list[Record]) -> None:
        """A batch is committed."""
        changes = [Change(record.session, _what(record)) for record in records[:RECORDS_NAMED]]
        line = _line([number, changes])
        self._kept.append(line)
        if self._descriptor is None or self._bytes > BYTES_MAX:
            self._rewrite()
        else:
            self._append(line)

    def _append(self, content: bytes) -> None:
        assert self._descriptor is not None
        try:
            self._bytes += os.write(self._descriptor, content)
            self._failed = False
        except OSError as error:
            self._warn(error)

    def _rewrite(self) -> None:
        """Replace the file by one with the last lines."""
        new = self._path.with_name(self._path.name + ".new")
        try:
            descriptor = os.open(new, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND, 0o600)
            self.close()
            self._descriptor, self._bytes = descriptor, 0
            self._append(b"".join([self._head, *self._kept]))
            new.replace(self._path)
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._failed:
            log.warning("%s cannot be written; damage could go undetected (%s)", self._path.name, error)
        self._failed = True

    def close(self) -> None:
        """Close the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _what(record: Record) -> str:
    return f"turn {record.turn.turn_id}" if isinstance(record, Ended) else record.kind.value


def _line(value: object) -> bytes:
    content = json.dumps(value).encode()
    return b"%08x %s\n" % (zlib.crc32(content), content)


def read_list(journal: Path) -> Listing | None:
    """The readable lines of a journal's list; None if there is none, or its head is damaged."""
    try:
        lines = list_path(journal).read_bytes().splitlines()
    except FileNotFoundError:
        return None
    values = [value for line in lines if (value := _value(line)) is not None]
    if not values or "run" not in values[0]:
        log.warning("%s cannot be read; damage could go undetected", list_path(journal).name)
        return None
    head = values[0]
    listed = Listing(str(head["run"]), str(head.get("boot", "")), str(head.get("durability", "")))
    for number, changes in values[1:]:
        listed.batches[number] = [Change(session, what) for session, what in changes]
    return listed


def _value(line: bytes) -> Any:
    """The value of a line; None if its checksum fails."""
    expected, _, content = line.partition(b" ")
    return json.loads(content) if expected == b"%08x" % zlib.crc32(content) else None


def require_no_lost_batches(journal: Path) -> None:
    """Refuse a journal that has lost committed batches; changes nothing, so that it can be restored.

    The list is read before the database: a process that writes both meanwhile leaves the database ahead.
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
        log.debug("the journal cannot be read, which opening it will report: %s", error)
        return
    if facts.get("run") != listed.run or not facts.get("batch", "").isdecimal():
        log.info("%s belongs to another journal, or to an older copy", list_path(journal).name)
        return
    missing = {number: named for number, named in listed.batches.items() if number > int(facts["batch"])}
    if not missing:
        return
    lost = f"{journal} has lost its last {len(missing)} acknowledged transactions: {_named(missing)}"
    if listed.durability != "fsync" and listed.boot != boot_id():
        log.error("%s. The machine crashed, and durability was %s", lost, listed.durability)
        return
    raise JournalError(
        f"{lost}. Its write-ahead log is damaged or missing: restore a copy of {journal.name} and "
        f"{journal.name}-wal, or remove {list_path(journal).name} to continue without them"
    )


def _named(missing: dict[int, list[Change]]) -> str:
    """The sessions of lost batches, and their lost changes, as far as the list names them."""
    lost: dict[str, list[str]] = {}
    for number in sorted(missing):
        for session, what in missing[number]:
            lost.setdefault(session, []).append(what)
    named = [f"session {ascii(name)[1:-1]}: {', '.join(lost[name])}" for name in list(lost)[:RECORDS_NAMED]]
    more = len(lost) - len(named)
    return "; ".join(named) + (f"; and {more} more sessions" if more else "")
