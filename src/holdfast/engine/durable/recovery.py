"""Start of an engine: opens the journal and the snapshot directory, and recovers the sessions.

A journal or directory that cannot be used is an `OptionError` of its option that says what to do next: a
damaged journal is never taken for an empty one. A session that cannot be recovered stays in the journal.
Turns are converted here between the journal's form and the core's. Used by the engine's loop.
"""

from __future__ import annotations

import hashlib
import logging
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

from holdfast.core.errors import Refused, UnknownToken
from holdfast.core.registry import Event
from holdfast.core.scheduler import Scheduler
from holdfast.core.session import Session
from holdfast.core.turn import Turn, TurnRequest
from holdfast.engine.durable.answers import NotedTurn, stored_answer
from holdfast.engine.durable.journal_tables import MEND
from holdfast.engine.durable.membership import Membership
from holdfast.engine.durable.records import FinishedTurn, JournalError, StoredSession
from holdfast.engine.durable.session_log import SessionLog
from holdfast.engine.durable.store import Store
from holdfast.engine.durable.stores import open_store
from holdfast.engine.options import EngineOptions, OptionError
from holdfast.engine.session_settings import SessionSettings
from holdfast.engine.start.lock import InUse
from holdfast.engine.start.memory_plan import disk_bytes
from holdfast.engine.text.stream import TurnStream
from holdfast.engine.text.tokenizer import Tokenizer
from holdfast.engine.tiers.back_off import BackOff
from holdfast.engine.tiers.disk import DiskTier
from holdfast.engine.tiers.files import MemoryForm, SnapshotFiles
from holdfast.engine.tiers.snapshots import SnapshotStore

log = logging.getLogger("holdfast.journal")

LOCK_SECONDS = 20.0
"""How long an engine waits for the engine of a killed server, which is still writing its sessions."""

VOCABULARY_PROBE = (
    "The quick brown fox jumps over 13 lazy dogs: naïve façade, 北京, 🙂 <|end|> </s>\n\t0123456789"
)

UNKNOWN_TOKENS = "start the server with the model that the session was written with"
"""What to do about a session whose tokens are not in the vocabulary."""

DAMAGED = (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
"""SQLite's error codes for a file that is not a database, or whose tables are not those of a journal."""

UNREADABLE = (sqlite3.Error, UnicodeDecodeError)
"""The errors of reading a journal; the latter when SQLite's own message is not valid UTF-8."""


def open_journal(
    options: EngineOptions, tokenizer: Tokenizer, member: Membership | None = None
) -> Store | None:
    """The journal that the options name, if they name one; a `member` of a cluster shares it."""
    if options.journal is None:
        return None
    try:
        return open_store(
            options.journal,
            options.durability,
            tokenizer.identity(),
            LOCK_SECONDS,
            sample_of(tokenizer),
            member,
        )
    except UNREADABLE as error:
        raise _unusable(options.journal, error) from error
    except (JournalError, OSError) as error:
        raise OptionError("journal", f"cannot be used: {error}") from error


def open_snapshots(
    options: EngineOptions, model: str, form: MemoryForm, session_log: SessionLog, clock: Callable[[], float]
) -> SnapshotStore | None:
    """The snapshot directory that the options name, if they name one, locked for this engine.

    `model` identifies the weights and `form` the form of the memory.
    """
    if options.disk is None:
        return None
    try:
        limit = disk_bytes(options)
        files = _open_files(Path(options.disk))
    except OptionError:
        if session_log.journal is not None:
            session_log.journal.close()
        raise
    return SnapshotStore(files, limit, model, form, session_log, BackOff(clock, session_log))


def _open_files(directory: Path) -> SnapshotFiles:
    try:
        return SnapshotFiles(directory, LOCK_SECONDS)
    except InUse as error:
        raise OptionError(
            "disk", f"cannot be used: {error}; give every server a directory of its own"
        ) from error
    except OSError as error:
        raise OptionError("disk", f"cannot be used: {error}") from error


def recover_sessions(
    scheduler: Scheduler, session_log: SessionLog, disk: DiskTier | None, now: float
) -> None:
    """Recover every session of the journal with its tokens; its memory is restored for its next turn."""
    journal = session_log.journal
    if journal is not None:
        try:
            foreign = False
            for stored in _sessions_of(journal):
                foreign = recover(scheduler, session_log, disk, stored, now) or foreign
            if not foreign:
                journal.adopt_vocabulary()
        except OptionError:
            if disk is not None:
                disk.store.files.close()
            raise
    if disk is not None and journal is not None and journal.owning is not None:
        disk.store.expect(journal.owning.snapshots())
    session_log.start()
    if disk is not None:
        disk.store.remove_orphans()


def recover(
    scheduler: Scheduler, session_log: SessionLog, disk: DiskTier | None, stored: StoredSession, now: float
) -> bool:
    """Recover one session; whether it has tokens outside the vocabulary."""
    refusal = stored.unusable or _recover_session(scheduler, stored, now)
    if not refusal:
        session_log.recovered(stored)
        if disk is not None:
            disk.recover(stored)
        return False
    log.error("session %s stays in the journal: %s", stored.id, refusal)
    session_log.unrecovered[stored.id] = refusal
    if disk is not None:
        disk.store.keep(stored)
    return refusal.endswith(UNKNOWN_TOKENS)


def _sessions_of(journal: Store) -> Iterator[StoredSession]:
    """The sessions of a journal; a journal that cannot be read is closed."""
    try:
        yield from journal.sessions()
    except UNREADABLE as error:
        journal.close()
        raise _unusable(journal.place, error) from error
    except JournalError as error:
        journal.close()
        raise OptionError("journal", f"cannot be used: {error}") from error


def _unusable(path: str, error: sqlite3.Error | UnicodeDecodeError) -> OptionError:
    damaged = isinstance(error, UnicodeDecodeError) or (
        hasattr(error, "sqlite_errorcode") and error.sqlite_errorcode & 0xFF in DAMAGED
    )
    if damaged:
        return OptionError("journal", f"cannot be used: {path} is damaged or not a journal ({error}); {MEND}")
    return OptionError("journal", f"cannot be used: {error}")


def sample_of(tokenizer: Tokenizer) -> str:
    """The vocabulary's identity in journals before version 3: a digest of one encoded sentence."""
    return hashlib.sha256(repr(tokenizer.encode(VOCABULARY_PROBE)).encode()).hexdigest()[:32]


def _recover_session(scheduler: Scheduler, stored: StoredSession, now: float) -> str:
    """Open a stored session in the core; returns the reason if the core refuses it."""
    try:
        retention = SessionSettings.read(stored.about.settings).retention(stored.about.ttl)
        scheduler.recover(stored.id, stored.tenant, now, retention, history_of(stored))
    except UnknownToken as refusal:
        return f"{refusal}; {UNKNOWN_TOKENS}"
    except Refused as refusal:
        return str(refusal)
    return ""


def history_of(stored: StoredSession) -> list[tuple[TurnRequest, list[int]]]:
    """The turns of a stored session as the core takes them: request and output."""
    return [
        (TurnRequest(turn.turn_id, tuple(turn.input), max(1, len(turn.output))), turn.output)
        for turn in stored.turns
    ]


def noted_turn(note: str, finished: FinishedTurn) -> NotedTurn:
    """A turn's note with its result."""
    return NotedTurn(
        turn_id=finished.turn_id,
        note=note,
        outcome=finished.outcome,
        reason=finished.reason,
        text=finished.text,
        prompt_tokens=finished.prompt_tokens,
        cached_tokens=finished.cached_tokens,
        completion_tokens=len(finished.tokens),
        answer=finished.answer,
    )


def finished_turn(event: Event, session: Session, turn: Turn, stream: TurnStream | None) -> FinishedTurn:
    """The result of a turn, for a client that submits it again."""
    tokens = session.sequence.tokens.slice(turn.input_end, turn.input_end + turn.generated)
    answer = None
    if stream is not None and stream.reader is not None:
        answer = stored_answer(stream.answer(turn.generated))
    return FinishedTurn(
        turn_id=turn.request.turn_id,
        fingerprint=stream.fingerprint or "" if stream is not None else "",
        outcome=event.kind,
        reason=event.reason,
        text=stream.text_of(turn.generated) if stream is not None else "",
        tokens=tokens,
        prompt_tokens=turn.input_end,
        cached_tokens=turn.cached,
        computed_tokens=turn.computed,
        answer=answer,
    )
