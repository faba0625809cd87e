"""The snapshots of sessions: the file of each session, and the bytes of all files.

A snapshot is current as long as it holds exactly the computed tokens of its session. The journal has a row
for each (`SnapshotWritten`, `SnapshotDropped`), so that the next engine finds them. Room for a spill is made
by evicting snapshots whose session has its memory elsewhere as well, oldest first. Called by the disk tier.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping

from holdfast.core.layout import Tier
from holdfast.core.session import Session
from holdfast.core.tokens import TokenLog
from holdfast.engine.durable.records import SnapshotDropped, SnapshotWritten, StoredSession
from holdfast.engine.durable.session_log import SessionLog
from holdfast.engine.tiers.back_off import BackOff
from holdfast.engine.tiers.files import (
    SUFFIX,
    BadFile,
    Header,
    MemoryForm,
    Snapshot,
    SnapshotFiles,
)
from holdfast.engine.tiers.parts import PARTS_MAX, read_parts

log = logging.getLogger("holdfast.disk")


def only_on_disk(session: Session) -> bool:
    """Whether a session's memory is on disk alone, or is about to be."""
    return session.parcel is not None and session.parcel.tier is Tier.DISK


class SnapshotStore:
    """The files of one directory by session, within a limit of bytes."""

    def __init__(
        self,
        files: SnapshotFiles,
        limit: int,
        model: str,
        form: MemoryForm,
        session_log: SessionLog,
        back_off: BackOff,
    ) -> None:
        """`model` names the weights and `form` the form of the memory: a file is good for the same ones."""
        self.files = files
        self.limit = limit
        self.back_off = back_off
        self.snapshots: dict[str, Snapshot] = {}
        self._model = model
        self._form = form
        self._session_log = session_log
        self._bytes = 0
        self._reserved: dict[str, int] = {}
        """Bytes of the files and parts that are being written."""
        self.extended: dict[str, Snapshot] = {}
        """Files to which a part is being appended, by session: they make no room for others."""
        self._serial = 0

    # --- what a file holds ------------------------------------------------------------------------

    def header(self, length: int, tokens: str) -> Header:
        """The header of a file that holds the memory of `length` tokens with this digest."""
        return Header(self._model, self._form.layout, length, tokens, self._form.types)

    def header_of(self, snapshot: Snapshot) -> Header:
        """The header of the last part of a file."""
        return self.header(snapshot.length, snapshot.tokens)

    def covers(self, session: Session) -> bool:
        """Whether a session's file holds exactly its computed tokens."""
        snapshot, sequence = self.snapshots.get(session.id), session.sequence
        if snapshot is None or snapshot.length != sequence.computed:
            return False
        return snapshot.tokens == sequence.tokens.digest(snapshot.length)

    def base(self, session: Session) -> Snapshot | None:
        """The file of a session to which its new units can be appended."""
        snapshot, sequence = self.snapshots.get(session.id), session.sequence
        if snapshot is None or not snapshot.length < sequence.computed:
            return None
        follows = snapshot.tokens == sequence.tokens.digest(snapshot.length)
        return snapshot if follows and len(snapshot.parts) < PARTS_MAX else None

    def new_name(self, session_id: str) -> str:
        """A name that no file has."""
        self._serial += 1
        return f"{hashlib.sha256(session_id.encode()).hexdigest()[:20]}-{self._serial}{SUFFIX}"

    # --- room -------------------------------------------------------------------------------------

    @property
    def used(self) -> int:
        """Bytes in files, including those that are being written."""
        return self._bytes + sum(self._reserved.values())

    def reserve(self, session_id: str, size: int) -> None:
        """Count a file that is being written."""
        self._reserved[session_id] = size

    def release(self, session_id: str) -> None:
        """Count it no longer."""
        self._reserved.pop(session_id, None)

    def fits(self, size: int) -> bool:
        """Whether there is room for `size` more bytes."""
        return self.used + size <= self.limit and size <= self.files.free_bytes()

    def make_room(self, size: int, asker: str, sessions: Mapping[str, Session]) -> bool:
        """Evict snapshots, oldest first, until `size` bytes fit; none if that would not be enough."""
        excess = max(self.used + size - self.limit, size - self.files.free_bytes())
        evicted: list[str] = []
        for name, snapshot in self.snapshots.items():
            if excess <= 0:
                break
            needed = name in self.extended or (name in sessions and only_on_disk(sessions[name]))
            if name != asker and not needed:
                evicted.append(name)
                excess -= snapshot.bytes
        if excess > 0:
            return False
        for name in evicted:
            self.drop(name)
        return True

    # --- which session has which file -------------------------------------------------------------

    def replace(self, session_id: str, snapshot: Snapshot) -> None:
        """Let a session have this file, whose row is durable, instead of the one that it had."""
        before = self.snapshots.get(session_id)
        if before is not None and before.file == snapshot.file:
            self._bytes -= before.bytes
        else:
            self.forget(session_id)
        self.snapshots[session_id] = snapshot
        self._bytes += snapshot.bytes

    def forget(self, session_id: str) -> None:
        """Remove a session's file, whose row is gone or about to be replaced."""
        snapshot = self.snapshots.pop(session_id, None)
        if snapshot is not None:
            self.files.remove(snapshot.file)
            self._bytes -= snapshot.bytes
            self.back_off.room_freed()

    def drop(self, session_id: str) -> None:
        """Remove a session's file and its row."""
        self.forget(session_id)
        self._session_log.append(SnapshotDropped(session_id))

    def truncated(self, session: Session, length: int) -> None:
        """A session's history was cut at `length`: drop the parts of its file that reach past the cut."""
        snapshot = self.snapshots.get(session.id)
        if snapshot is None or snapshot.length <= length:
            return
        kept = snapshot.within(length)
        if kept is None:
            self.drop(session.id)
            return
        # The bytes go when the next part is appended: another engine may be receiving them.
        self.replace(session.id, kept)
        self.back_off.room_freed()
        self.log_row(session.id)

    def log_row(self, session_id: str) -> None:
        """Log the row of a session's file again, after a row of another file was logged."""
        snapshot = self.snapshots.get(session_id)
        if snapshot is None:
            self._session_log.append(SnapshotDropped(session_id))
        else:
            self._session_log.append(
                SnapshotWritten(session_id, snapshot.file, snapshot.length, snapshot.bytes)
            )

    # --- recovery ---------------------------------------------------------------------------------

    def check(self, stored: StoredSession, tokens: TokenLog) -> Snapshot | None:
        """The file that the journal names for a session, up to the last part with memory of these tokens."""
        row = stored.snapshot
        if row is None:
            return None
        try:
            snapshot = self._matching(read_parts(self.files, row.file, row.bytes, self.header(0, "")), tokens)
            if snapshot is None:
                raise BadFile("it does not match the history")
        except (OSError, ValueError, BadFile) as error:  # ValueError: a damaged row names an impossible path.
            log.warning("session %s will be recomputed: its snapshot cannot be used: %s", stored.id, error)
            self._session_log.append(SnapshotDropped(stored.id))
            return None
        # A process that was killed may have left a part without a row, or a row without its history.
        self.files.cut(row.file, snapshot.bytes)
        if snapshot.bytes != row.bytes:
            self._session_log.append(
                SnapshotWritten(stored.id, snapshot.file, snapshot.length, snapshot.bytes)
            )
        return snapshot

    def _matching(self, snapshot: Snapshot, tokens: TokenLog) -> Snapshot | None:
        """A file up to its last part that holds the memory of these tokens."""
        found: Snapshot | None = None
        for part in snapshot.parts:
            if part.length > len(tokens) or part.tokens != tokens.digest(part.length):
                break
            found = part
        return found

    def keep(self, stored: StoredSession) -> None:
        """A session of the journal could not be recovered: keep its file for the next engine."""
        row = stored.snapshot
        if row is not None and self.files.exists(row.file):
            # This engine never reads the file, so the digest of its tokens is not needed.
            self.replace(stored.id, Snapshot(row.file, row.length, "", row.bytes))

    def expect(self, rows: Iterable[SnapshotWritten]) -> None:
        """Keep files of sessions that this engine may claim later, by their rows in the journal."""
        for row in rows:
            if row.session not in self.snapshots and self.files.exists(row.file):
                self.replace(row.session, Snapshot(row.file, row.length, "", row.bytes))

    def remove_orphans(self) -> None:
        """Remove files that belong to no session: a killed process left them behind."""
        known = {snapshot.file for snapshot in self.snapshots.values()}
        for name in self.files.names():
            if name not in known:
                self.files.remove(name)
        numbers = [name.removesuffix(SUFFIX).rpartition("-")[2] for name in known]
        self._serial = max([self._serial, *(int(number) for number in numbers if number.isdecimal())])

    def close(self) -> None:
        """Release the directory. Without a journal no later engine could use the files: remove them."""
        if self._session_log.journal is None:
            for name in list(self.snapshots):
                self.forget(name)
        self.files.close()
