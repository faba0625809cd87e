"""The row changes of a batch of records, computed without reading the tables.

A life is the only writer of its sessions, so it knows their rows: `Known` caches the facts for the next
record (numbers and checksums of the turns, the description, repeatable request ids). A `Builder` turns
records into `Part`s: the rows of one statement (`commit`). It works on copies, which replace the originals
when a batch is ready to be sent, so an error in between changes nothing. Used by the store.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple, TypeVar

from holdfast.cluster.ownership import Kind, Write
from holdfast.core.tokens import TOKEN_BYTES, pack
from holdfast.engine.durable.journal_tables import description_checksum, row_checksum, turn_checksum
from holdfast.engine.durable.records import (
    TURNS_KEPT,
    About,
    Closed,
    Compacted,
    Ended,
    Forked,
    JournalError,
    Opened,
    Record,
    Requested,
    Retained,
    Retooled,
    SnapshotDropped,
    SnapshotWritten,
    Truncated,
    Updated,
    detail,
)

__all__ = ["About", "Batch", "Builder", "Kind", "Known", "Part", "TurnRow"]

Row = TypeVar("Row")

LIFE_BITS = 40
"""Turns are numbered within their life: a life may write 2 ** 40 of them."""


@dataclass(slots=True)
class Known:
    """A session of this life, as its rows are once every record so far is stored."""

    tenant: str
    origin: int
    about: About
    epoch: int = 1
    commits: int = 0
    numbers: array[int] = field(default_factory=lambda: array("q"))
    sums: array[int] = field(default_factory=lambda: array("q"))
    finished: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    serial: int = 0
    """The number of its last finished turn or request."""
    opaque: bool = False
    """Its history could not be read: it may be closed, and nothing else."""

    def copy(self) -> Known:
        """One that can be changed without changing this."""
        return Known(
            *(self.tenant, self.origin, self.about, self.epoch, self.commits, self.numbers[:], self.sums[:]),
            *(list(self.finished), list(self.requests), self.serial, self.opaque),
        )

    @property
    def head(self) -> int | None:
        """The number of its last turn."""
        return self.numbers[-1] if self.numbers else None

    @property
    def checksum(self) -> int:
        """The checksum that its next turn continues."""
        return self.sums[-1] if self.sums else self.origin


@dataclass(slots=True)
class Change:
    """The change of one session's row; its condition is the owner, the epoch and the number of the commit."""

    kind: Kind
    known: Known
    needs: str | None = None
    """The session that a fork was made of: refused with it."""
    describes: bool = False
    moves: bool = False
    """Whether its last turn is another."""


class TurnRow(NamedTuple):
    """A turn to be inserted."""

    session: str
    number: int
    before: int | None
    depth: int
    turn_id: str
    input: bytes
    output: bytes
    finish: str
    checksum: int
    details: str


class Content(NamedTuple):
    """The content of a turn: its row without links."""

    turn_id: str
    input: bytes
    output: bytes
    finish: str
    details: str


class FinishedRow(NamedTuple):
    """The result of a turn."""

    number: int
    result: str
    checksum: int


class RequestRow(NamedTuple):
    """An answered request."""

    number: int
    asked: str
    answer: str
    checksum: int
    needs: str | None = None
    """The fork that the request made: stored with it, or not at all."""


@dataclass(slots=True)
class Part:
    """The rows of one statement. Nothing in it depends on another row that the same statement writes."""

    changes: dict[str, Change] = field(default_factory=dict)
    turns: list[TurnRow] = field(default_factory=list)
    finished: dict[tuple[str, str], FinishedRow] = field(default_factory=dict)
    unfinished: set[tuple[str, str]] = field(default_factory=set)
    requests: dict[tuple[str, str], RequestRow] = field(default_factory=dict)
    unrequested: set[tuple[str, str]] = field(default_factory=set)
    snapshots: dict[str, SnapshotWritten | None] = field(default_factory=dict)
    log: list[tuple[str, str, str]] = field(default_factory=list)


class Batch(NamedTuple):
    """Records that are ready to be sent, in one transaction; sent again unchanged if the answer is lost."""

    number: int
    parts: list[Part]
    records: int
    refused: set[str]
    """Sessions that this life does not have."""
    loose: list[int]
    """Turns that a session does not lead to any more."""

    @property
    def sessions(self) -> set[str]:
        """The sessions that it changes."""
        return {name for part in self.parts for name in part.changes}

    @property
    def writes(self) -> list[Write]:
        """The last write on each session."""
        last: dict[str, Write] = {}
        for part in self.parts:
            for name, change in part.changes.items():
                last[name] = Write(name, change.kind, change.known.epoch, change.known.commits)
        return list(last.values())


Fetch = Callable[[Sequence[int]], dict[int, Content]]
"""Reads the contents of turns."""


class Builder:
    """Makes the parts of one batch."""

    def __init__(self, known: dict[str, Known], life: int, serial: int, fetch: Fetch) -> None:
        """`serial` is the number of turns that this life has numbered so far."""
        self.serial = serial
        self.staged: dict[str, Known | None] = {}
        self.refused: set[str] = set()
        self.loose: list[int] = []
        self.parts: list[Part] = [Part()]
        self._known = known
        self._life = life
        self._fetch = fetch
        self._written: dict[int, TurnRow] = {}

    def build(self, records: Iterable[Record]) -> None:
        """Add records, in order."""
        for record in records:
            self._apply(record)

    @property
    def _part(self) -> Part:
        return self.parts[-1]

    def _apply(self, record: Record) -> None:
        name = record.session
        match record:
            case Opened():
                self._open(record)
            case Forked():
                self._fork(record)
            case Closed() | SnapshotDropped() | SnapshotWritten() if self._find(name) is None:
                return  # The row is gone, or another's: there is nothing to change.
            case Closed():
                self._close(name)
            case SnapshotWritten():
                self._touch(name)
                self._part.snapshots[name] = record
            case SnapshotDropped():
                self._touch(name)
                self._part.snapshots[name] = None
            case _:
                known = self._find(name)
                if known is None or known.opaque:
                    self.refused.add(name)
                    return
                self._touch(name)
                self._change(record, self._own(name))
        self._part.log.append((name, record.kind.value, detail(record)))

    def _change(self, record: Record, known: Known) -> None:
        match record:
            case Ended():
                self._end(record, known)
            case Truncated():
                self._truncate(record, known)
            case Compacted():
                self._compact(record, known)
            case Requested():
                self._request(record, known)
            case Retooled():
                self._describe(record.session, known.about._replace(tools=record.tools))
            case Updated():
                self._describe(record.session, known.about._replace(metadata=record.metadata))
            case Retained():
                about = known.about._replace(ttl=record.ttl, settings=record.settings)
                self._describe(record.session, about)

    # --- sessions ---------------------------------------------------------------------------------

    def _find(self, name: str) -> Known | None:
        return self.staged[name] if name in self.staged else self._known.get(name)

    def _own(self, name: str) -> Known:
        """A session that may be changed."""
        known = self.staged.get(name)
        if known is None:
            known = self.staged[name] = self._known[name].copy()
        return known

    def _touch(self, name: str) -> Change:
        """The change of a session in this part, which counts as one commit."""
        change = self._part.changes.get(name)
        if change is None:
            known = self._own(name)
            known.commits += 1
            change = self._part.changes[name] = Change(Kind.CHANGE, known)
        return change

    def _next_part(self) -> None:
        """The next record depends on a row of this part: it comes after it, in the same transaction."""
        self._freeze()
        self.parts.append(Part())

    def _freeze(self) -> None:
        """Let the changes of this part keep their state, whatever later parts do to the sessions."""
        for change in self._part.changes.values():
            change.known = change.known.copy()

    def _create(self, name: str, known: Known, needs: str | None = None) -> None:
        if name in self._part.changes:
            self._next_part()
        known.commits = 1
        self.staged[name] = known
        self._part.changes[name] = Change(Kind.CREATE, known, needs, describes=True, moves=True)

    def _open(self, record: Opened) -> None:
        if self._find(record.session) is not None:
            self._close(record.session)
        origin = row_checksum(record.session, record.tenant, record.created)
        about = About(
            *(record.ttl, record.metadata, record.system, record.created, None),
            *(record.tools, record.settings),
        )
        self._create(record.session, Known(record.tenant, origin, about))

    def _fork(self, record: Forked) -> None:
        parent = self._find(record.parent)
        if parent is None or parent.opaque:
            self.refused.add(record.session)
            return
        if self._find(record.session) is not None:
            self._close(record.session)
        change = self._part.changes.get(record.parent)
        if record.session in self._part.changes or (change is not None and change.kind is Kind.CREATE):
            self._next_part()
        self._touch(record.parent)
        about = parent.about._replace(created=record.created, parent=record.parent)
        child = Known(parent.tenant, parent.origin, about)
        child.numbers, child.sums = parent.numbers[: record.turns], parent.sums[: record.turns]
        self._create(record.session, child, record.parent)

    def _close(self, name: str) -> None:
        change = self._part.changes.get(name)
        if change is not None and change.kind is Kind.CREATE:
            self._next_part()
        change = self._touch(name)
        change.kind = Kind.REMOVE
        self._loosen(change.known)
        self.staged[name] = None
        part = self._part
        for rows in (part.finished, part.requests):
            for key in [key for key in rows if key[0] == name]:
                del rows[key]
        part.snapshots.pop(name, None)

    def _describe(self, name: str, about: About) -> None:
        change = self._touch(name)
        change.known.about, change.describes = about, True

    # --- turns ------------------------------------------------------------------------------------

    def _end(self, record: Ended, known: Known) -> None:
        turn, name = record.turn, record.session
        output = turn.tokens if record.output is None else record.output
        content = Content(turn.turn_id, pack(record.input), pack(output), turn.reason, record.details)
        self._add_turn(name, known, content)
        result = json.dumps(asdict(turn))
        known.serial += 1
        row = FinishedRow(known.serial, result, row_checksum(name, turn.turn_id, result))
        self._keep_last(name, turn.turn_id, known.finished, self._part.finished, self._part.unfinished, row)

    def _request(self, record: Requested, known: Known) -> None:
        values = (record.session, record.request_id, record.asked, record.answer)
        known.serial += 1
        part = self._part
        made = part.changes.get(record.answer)
        fork = record.answer if made is not None and made.needs == record.session else None
        row = RequestRow(known.serial, record.asked, record.answer, row_checksum(*values), fork)
        self._keep_last(
            record.session, record.request_id, known.requests, part.requests, part.unrequested, row
        )

    @staticmethod
    def _keep_last(
        name: str,
        key: str,
        kept: list[str],
        rows: dict[tuple[str, str], Row],
        dropped: set[tuple[str, str]],
        row: Row,
    ) -> None:
        """Add a row, and drop the oldest beyond those that are kept."""
        if key in kept:
            kept.remove(key)
        kept.append(key)
        rows[name, key] = row
        dropped.discard((name, key))
        while len(kept) > TURNS_KEPT:
            oldest = (name, kept.pop(0))
            rows.pop(oldest, None)
            dropped.add(oldest)

    def _truncate(self, record: Truncated, known: Known) -> None:
        self._loosen(known)
        self._touch(record.session).moves = True
        del known.numbers[record.turns :]
        del known.sums[record.turns :]
        if record.kept is not None and known.numbers:
            (content,) = self._contents(known.numbers[-1:])
            known.numbers.pop()
            known.sums.pop()
            kept = content._replace(output=content.output[: TOKEN_BYTES * record.kept])
            self._add_turn(record.session, known, kept)

    def _compact(self, record: Compacted, known: Known) -> None:
        """Add a turn for those that gave way, and the turns after them once more: rows never change."""
        later = self._contents(known.numbers[record.last :])
        self._loosen(known)
        del known.numbers[record.first - 1 :]
        del known.sums[record.first - 1 :]
        replaced = Content(record.turn_id, pack(record.input), b"", "length", "")
        for content in (replaced, *later):
            self._add_turn(record.session, known, content)

    def _add_turn(self, name: str, known: Known, content: Content) -> None:
        self.serial += 1
        number = self._life << LIFE_BITS | self.serial
        turn_id, tokens_in, tokens_out, finish, details = content
        checksum = turn_checksum(known.checksum, turn_id, tokens_in, tokens_out, finish, details)
        row = TurnRow(name, number, known.head, len(known.numbers) + 1, *content[:4], checksum, details)
        self._part.turns.append(row)
        self._written[number] = row
        known.numbers.append(number)
        known.sums.append(checksum)
        self._touch(name).moves = True

    def _contents(self, numbers: Sequence[int]) -> list[Content]:
        """What turns say; those of earlier batches are read."""
        missing = [number for number in numbers if number not in self._written]
        found = self._fetch(missing) if missing else {}
        if len(found) < len(missing):
            raise JournalError(f"{len(missing) - len(found)} turns are missing from the journal")
        contents: list[Content] = []
        for number in numbers:
            row = self._written.get(number)
            contents.append(
                found[number]
                if row is None
                else Content(row.turn_id, row.input, row.output, row.finish, row.details)
            )
        return contents

    def _loosen(self, known: Known) -> None:
        """A session no longer ends with its last turn, which may now be unreachable."""
        if known.head is not None:
            self.loose.append(known.head)


def tenant_sum(name: str, known: Known) -> int:
    """The checksum of a session's tenant."""
    return row_checksum(name, known.tenant, known.origin)


def about_sum(name: str, known: Known) -> int:
    """The checksum of a session's description."""
    return description_checksum(name, *known.about)


def head_sum(name: str, known: Known) -> int:
    """The checksum of a session's link to its last turn."""
    return row_checksum(name, known.checksum)
