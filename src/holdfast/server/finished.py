"""Finished turns that may be asked for again: a turn's id is its idempotency key.

A client that lost the answer to a turn repeats it. The same id with the same body gets the same answer, and
nothing is computed or said twice; the same id with another body is a conflict. As many as `KEPT` turns of a
session are remembered, the last ones.
"""

from __future__ import annotations

from holdfast.core.errors import Refused
from holdfast.server import wire

KEPT = 8


class TurnConflict(Refused):
    """A finished turn has this id, and it was another one."""

    code = "turn_conflict"
    param = "turn_id"


class FinishedTurns:
    """The last answers of each session."""

    def __init__(self) -> None:
        self._by_session: dict[str, dict[str, tuple[str, wire.End]]] = {}

    def keep(self, session: str, turn_id: str, fingerprint: str, end: wire.End) -> None:
        """Remember how a turn ended."""
        turns = self._by_session.setdefault(session, {})
        turns[turn_id] = (fingerprint, end)
        if len(turns) > KEPT:
            del turns[next(iter(turns))]

    def find(self, session: str, turn_id: str, fingerprint: str) -> wire.End | None:
        """How a turn ended, if it did; raises `TurnConflict` if another body bore its id."""
        found = self._by_session.get(session, {}).get(turn_id)
        if found is None:
            return None
        if found[0] != fingerprint:
            raise TurnConflict(f"a finished turn {turn_id} of this session had another body")
        return found[1]

    def forget(self, session: str) -> None:
        """The session has changed under them, or is gone."""
        self._by_session.pop(session, None)
