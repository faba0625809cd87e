"""A loop's journal and files at its start: opened, and read for the sessions that come back.

Turns are put into the journal's words here, and back into the core's.

What keeps one from being used is an `OptionError` of the option that names it, and says what to do next: such
a journal is never taken for an empty one. Used by the engine's loop.
"""

from __future__ import annotations

import hashlib
import sqlite3
from pathlib import Path

from holdfast.core.errors import Refused, UnknownToken
from holdfast.core.registry import Event
from holdfast.core.scheduler import Scheduler
from holdfast.core.session import Session
from holdfast.core.turn import Turn, TurnRequest
from holdfast.engine.durable.journal import Journal, JournalError
from holdfast.engine.durable.journal_tables import MEND
from holdfast.engine.durable.records import FinishedTurn, StoredSession
from holdfast.engine.lock import InUse
from holdfast.engine.options import EngineOptions, OptionError
from holdfast.engine.text.stream import TurnStream
from holdfast.engine.text.tokenizer import Tokenizer
from holdfast.engine.tiers.files import Files

WAIT_SECONDS = 20.0
"""How long an engine whose server was killed may take to write its sessions before the next one gives up."""

VOCABULARY_PROBE = (
    "The quick brown fox jumps over 13 lazy dogs: naïve façade, 北京, 🙂 <|end|> </s>\n\t0123456789"
)

UNKNOWN_TOKENS = "start the server with the model that the session was written with"
"""What to do about a session whose tokens are not in the vocabulary."""

DAMAGED = (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
"""What SQLite says of a file that is none of its own any more, or whose tables are not those of a journal."""

UNREADABLE = (sqlite3.Error, UnicodeDecodeError)
"""What reading a journal may raise; the latter where what SQLite has to say of it is no text itself."""


def open_journal(options: EngineOptions, tokenizer: Tokenizer) -> Journal | None:
    """The journal that the options name, if they name one."""
    if options.journal is None:
        return None
    path = Path(options.journal)
    try:
        return Journal(
            path,
            options.durability,
            tokenizer.identity(),
            patience=WAIT_SECONDS,
            sample=sample_of(tokenizer),
        )
    except UNREADABLE as error:
        raise _unusable(path, error) from error
    except (JournalError, OSError) as error:
        raise OptionError("journal", f"cannot be used: {error}") from error


def open_files(directory: str) -> Files:
    """The directory for the memory of sessions, which no other engine may have."""
    try:
        return Files(Path(directory), WAIT_SECONDS)
    except InUse as error:
        raise OptionError("disk", f"cannot be used: {error}; every server needs one of its own") from error
    except OSError as error:
        raise OptionError("disk", f"cannot be used: {error}") from error


def read_journal(journal: Journal) -> list[StoredSession]:
    """The sessions of a journal; one that cannot be read is let go of."""
    try:
        return journal.load()
    except UNREADABLE as error:
        journal.close()
        raise _unusable(journal.path, error) from error


def _unusable(path: Path, error: sqlite3.Error | UnicodeDecodeError) -> OptionError:
    damaged = isinstance(error, UnicodeDecodeError) or (
        hasattr(error, "sqlite_errorcode") and error.sqlite_errorcode & 0xFF in DAMAGED
    )
    if damaged:
        return OptionError("journal", f"cannot be used: {path} is damaged, or no journal ({error}); {MEND}")
    return OptionError("journal", f"cannot be used: {error}")


def sample_of(tokenizer: Tokenizer) -> str:
    """What journals before version 3 knew of a vocabulary: how one sentence is encoded."""
    return hashlib.sha256(repr(tokenizer.encode(VOCABULARY_PROBE)).encode()).hexdigest()[:32]


def recover_session(scheduler: Scheduler, stored: StoredSession, now: float) -> str:
    """Have the core know a session again; why it will not, if so."""
    try:
        scheduler.recover(stored.id, stored.tenant, now, stored.ttl, history_of(stored))
    except UnknownToken as refusal:
        return f"{refusal}; {UNKNOWN_TOKENS}"
    except Refused as refusal:
        return str(refusal)
    return ""


def history_of(stored: StoredSession) -> list[tuple[TurnRequest, list[int]]]:
    """The turns of a session as the core takes them: what each brought, and what it said."""
    return [
        (TurnRequest(turn.turn_id, tuple(turn.input), max(1, len(turn.output))), turn.output)
        for turn in stored.turns
    ]


def finished_turn(event: Event, session: Session, turn: Turn, stream: TurnStream | None) -> FinishedTurn:
    """How a turn ended, for whoever asks again."""
    tokens = session.sequence.tokens.slice(turn.input_end, turn.input_end + turn.generated)
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
    )
