"""Snapshot files that come from other engines: a session's memory, staged until the session is this engine's.

    begin --> the content is written to a partial file, by whoever receives it --> complete --> take
      └── abandon: nothing is left                                                     └── drop, after a while

A file appears complete or not at all. Its header is checked when it is announced, its end when it is
complete, its checksums when the session's next turn reads it: what does not fit is dropped, and the session
is computed again. A staged file whose session does not come is removed after a while. Used by the engine
process (`snapshot_receiver`) and by claims.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from holdfast.core.session import Session
from holdfast.engine.durable.records import SnapshotWritten, StoredSession
from holdfast.engine.tiers.files import BadFile, Header, Snapshot
from holdfast.engine.tiers.parts import read_parts
from holdfast.engine.tiers.snapshots import SnapshotStore

__all__ = ["ARRIVING_MAX", "NotStaged", "Staging"]

log = logging.getLogger("holdfast.disk")

STAGED_SECONDS = 120.0
"""How long a file is kept for a session that does not come."""

ARRIVING_MAX = 64
"""Files that may be on their way at a time: each has an open descriptor, and a thread while it comes."""


class NotStaged(RuntimeError):
    """A file is not taken; the message says why."""


@dataclass(frozen=True, slots=True)
class Arriving:
    """A file that is being received."""

    session: str
    snapshot: Snapshot


class Staging:
    """The files that were announced, and those that are complete, by session."""

    __slots__ = ("_arriving", "_clock", "_sessions", "_staged", "_store")

    def __init__(
        self, store: SnapshotStore, sessions: Mapping[str, Session], clock: Callable[[], float]
    ) -> None:
        """`sessions` are those of the engine: files of theirs may make room."""
        self._store = store
        self._sessions = sessions
        self._clock = clock
        self._arriving: dict[int, Arriving] = {}
        """Files that are being received, by the number of their call."""
        self._staged: dict[str, tuple[Snapshot, float]] = {}

    def begin(self, call: int, session: str, header: Header, size: int) -> int:
        """A file is announced: the descriptor to write its content to, which is the caller's to close.

        Raises `NotStaged` if it would be of no use, or has no room.
        """
        self._expire()
        if call in self._arriving:
            raise NotStaged("a transfer with the same number is in progress")
        if len(self._arriving) >= ARRIVING_MAX:
            raise NotStaged(f"{ARRIVING_MAX} transfers are in progress")
        if size < 1:
            raise NotStaged(f"the announced size is {size} bytes")
        if header != self._store.header(header.length, header.tokens):
            raise NotStaged("its model or the layout of its memory does not match")
        if not self._store.fits(size) and not self._store.make_room(size, session, self._sessions):
            raise NotStaged(f"there is no room for {size} bytes")
        snapshot = Snapshot(self._store.new_name(session), header.length, header.tokens, size)
        path = self._store.files.directory / _partial(snapshot)
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise NotStaged(f"it cannot be written: {error.strerror}") from error
        self._store.reserve(_place(snapshot), size)
        self._arriving[call] = Arriving(session, snapshot)
        return descriptor

    def complete(self, call: int) -> None:
        """All content of a file was written; raises `NotStaged`, and leaves nothing, if it cannot be used.

        It can if it has the announced size and the headers of its parts match the announcement.
        """
        arriving = self._arriving.get(call)
        if arriving is None:
            raise NotStaged("it was not announced, or its transfer was aborted")
        try:
            self._publish(arriving)
        except (OSError, BadFile) as error:
            self.abandon(call)
            raise NotStaged(str(error)) from error
        del self._arriving[call]

    def _publish(self, arriving: Arriving) -> None:
        snapshot, files = arriving.snapshot, self._store.files
        partial = _partial(snapshot)
        size = files.size(partial)
        if size != snapshot.bytes:
            raise BadFile(f"it has {size} bytes of the announced {snapshot.bytes}")
        found = read_parts(files, partial, snapshot.bytes, self._store.header_of(snapshot))
        if (found.length, found.tokens) != (snapshot.length, snapshot.tokens):
            raise BadFile("its last part does not match the announcement")
        (files.directory / partial).rename(files.directory / snapshot.file)
        self.drop(arriving.session)
        self._staged[arriving.session] = (snapshot, self._clock() + STAGED_SECONDS)

    def abandon(self, call: int) -> None:
        """A transfer is aborted: remove its file."""
        arriving = self._arriving.pop(call, None)
        if arriving is not None:
            self._store.release(_place(arriving.snapshot))
            self._store.files.remove(_partial(arriving.snapshot))

    def _expire(self) -> None:
        now = self._clock()
        for session in [session for session, (_, until) in self._staged.items() if until < now]:
            self.drop(session)

    def drop(self, session: str) -> None:
        """Remove a session's staged file, if it has one."""
        staged = self._staged.pop(session, None)
        if staged is not None:
            self._store.release(_place(staged[0]))
            self._store.files.remove(staged[0].file)

    def take(self, stored: StoredSession) -> SnapshotWritten | None:
        """A session is this engine's: the row of its staged file, which is the session's from now on."""
        self._expire()
        staged = self._staged.pop(stored.id, None)
        if staged is None:
            return None
        snapshot = staged[0]
        self._store.release(_place(snapshot))
        return SnapshotWritten(stored.id, snapshot.file, snapshot.length, snapshot.bytes)

    def close(self) -> None:
        """Remove everything that is staged."""
        for call in list(self._arriving):
            self.abandon(call)
        for session in list(self._staged):
            self.drop(session)


def _partial(snapshot: Snapshot) -> str:
    """The name of a file that is not complete."""
    return f"{snapshot.file}.partial"


def _place(snapshot: Snapshot) -> str:
    """The name under which a file's bytes are reserved; no session has it."""
    return f"staged {snapshot.file}"
