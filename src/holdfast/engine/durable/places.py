"""Where a journal is: a SQLite file, or a PostgreSQL database named by a URL. Standard library only.

A URL may hold a password; `shown` is the form for messages, logs and answers. A URL with a password that is
not percent-encoded is refused (`fault_of`): libpq would take part of the password for a host or a port, and
repeat it in its messages. Used by the options, the recovery and the command.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["fault_of", "is_database", "shown", "without_credentials"]

SCHEMES = ("postgresql://", "postgres://")

_HOST = r"(?:\[[0-9A-Za-z:.%]*\]|[\w.%~-]*)(?::\d*)?"
_ESCAPED = r"(?:[^%{0}]|%[0-9A-Fa-f]{{2}})*"
_URL = re.compile(
    rf"postgres(?:ql)?://(?:{_ESCAPED.format('@/?')}@)?"
    rf"(?P<place>{_HOST}(?:,{_HOST})*(?:/{_ESCAPED.format('@/?#')})?)"
    rf"(?:\?(?:\w+={_ESCAPED.format('&')}(?:&|$))*)?",
    re.ASCII,
)


def is_database(place: str | Path) -> bool:
    """Whether a journal is a PostgreSQL database."""
    return isinstance(place, str) and place.startswith(SCHEMES)


def fault_of(place: str | Path) -> str | None:
    """Why a place cannot name a journal; None if it can. The message repeats nothing of the place."""
    text = os.fspath(place)
    if not is_database(text):
        return "must name a file, or a database as postgresql://user@host/name" if "://" in text else None
    if _URL.fullmatch(text) is None:
        return "is not a PostgreSQL URL; a password needs percent-encoding (%40 for @, %2F for /)"
    return None


def shown(place: str | Path) -> str:
    """A journal's place without user, password and parameters; without anything if it is malformed."""
    text = os.fspath(place)
    if not is_database(text):
        return text
    found = _URL.fullmatch(text)
    return "postgresql://" + ("" if found is None else found["place"])


def without_credentials(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of an engine as they may be told to others."""
    journal = options.get("journal")
    return dict(options) if journal is None else {**options, "journal": shown(journal)}
