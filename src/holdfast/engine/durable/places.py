"""Where a journal is: a SQLite file, or a PostgreSQL database named by a URL. Standard library only.

A URL may hold a password; `shown` is the form for messages, logs and answers. Used by the options, the
recovery and the command.
"""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

__all__ = ["is_database", "shown"]

SCHEMES = ("postgresql://", "postgres://")


def is_database(place: str | Path) -> bool:
    """Whether a journal is a PostgreSQL database."""
    return isinstance(place, str) and place.startswith(SCHEMES)


def shown(place: str | Path) -> str:
    """A journal's place without user, password and parameters."""
    text = os.fspath(place)
    if not is_database(text):
        return text
    parts = urlsplit(text)
    return f"postgresql://{parts.netloc.rpartition('@')[2]}{parts.path}"
