"""What a change of a session's history needs beside the core: the order of events, the journal, the file.

Used by the verbs (`verbs`, `submission`, `steering`).
"""

from __future__ import annotations

from holdfast.core.errors import UnknownSession
from holdfast.core.session import Session
from holdfast.engine.loop import EngineLoop

__all__ = ["catch_up", "note_cut", "require_same"]


def catch_up(loop: EngineLoop) -> float:
    """The time, after everything that was due by then: it also comes first in the journal."""
    now = loop.now()
    loop.scheduler.tick(now)
    loop.dispatcher.tell()
    return now


def note_cut(loop: EngineLoop, session: Session, kept: int | None) -> None:
    """Note a cut for the journal and the session's file; `kept` tokens are left of the last turn."""
    loop.session_log.truncated(session.id, len(session.boundaries), kept)
    if loop.disk is not None:
        loop.disk.truncated(session, session.sequence.known)


def require_same(loop: EngineLoop, session_id: str, meant: Session | None) -> None:
    """Refuse to act on another session than the one that had the name when the verb came."""
    found = loop.scheduler.registry.sessions.get(session_id)
    if found is not None and found is not meant:
        raise UnknownSession(f"session {session_id} was closed; its name is in use again")
