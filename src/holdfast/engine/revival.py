"""A loop's journal and files at its start: opened, and read for the sessions that come back.

What keeps one from being used is an `OptionError` of the option that names it, and says what to do next: such
a journal is never taken for an empty one. Used by the engine's loop.
"""

from __future__ import annotations

import hashlib
import sqlite3
from pathlib import Path

from holdfast.core.turn import TurnRequest
from holdfast.engine.journal import Journal, JournalError
from holdfast.engine.journal_tables import MEND
from holdfast.engine.lock import InUse
from holdfast.engine.options import EngineOptions, OptionError
from holdfast.engine.records import StoredSession
from holdfast.engine.spill_files import Files
from holdfast.engine.tokenizer import Tokenizer

WAIT_SECONDS = 20.0
"""How long an engine whose server was killed may take to write its sessions before the next one gives up."""

VOCABULARY_PROBE = (
    "The quick brown fox jumps over 13 lazy dogs: naïve façade, 北京, 🙂 <|end|> </s>\n\t0123456789"
)

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
        return Journal(path, options.durability, vocabulary_of(tokenizer), patience=WAIT_SECONDS)
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


def vocabulary_of(tokenizer: Tokenizer) -> str:
    """What tokens mean, as a short name: two tokenizers that agree on it read each other's histories."""
    return hashlib.sha256(repr(tokenizer.encode(VOCABULARY_PROBE)).encode()).hexdigest()[:32]


def history_of(stored: StoredSession) -> list[tuple[TurnRequest, list[int]]]:
    """The turns of a session as the core takes them: what each brought, and what it said."""
    return [
        (TurnRequest(turn.turn_id, tuple(turn.input), max(1, len(turn.output))), turn.output)
        for turn in stored.turns
    ]
