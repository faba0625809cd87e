"""Logs: one line an event, as text for people or as JSON for machines.

Lines carry ids (of requests, turns, sessions) and figures. What people and models say is never in them.
Extra fields are given as `extra={"fields": {...}}`.
"""

from __future__ import annotations

import logging
import time
from typing import TextIO

import msgspec

__all__ = ["set_up_logging"]


def _fields(record: logging.LogRecord) -> dict[str, object]:
    found = record.__dict__.get("fields")
    return found if isinstance(found, dict) else {}


class TextFormatter(logging.Formatter):
    """`12:00:01 INFO  holdfast.server  turn ended  turn=t-1 tokens=12`."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        extra = "".join(f" {name}={value}" for name, value in _fields(record).items())
        line = f"{clock} {record.levelname:<7} {record.name}  {record.getMessage()}{extra}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            entry["trace"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry, enc_hook=str).decode()


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether a line of the HTTP library says anything of the server.

    A client's message that is not UTF-8 is the client's own fault, and it is told so when its connection is
    closed; nor is a client that leaves before its WebSocket is open an error of the server's.
    """
    if record.exc_info is not None and isinstance(record.exc_info[1], UnicodeDecodeError):
        return False
    return record.msg != "ASGI callable returned without completing handshake."


def set_up_logging(level: str, form: str, stream: TextIO) -> None:
    """Send this process's log lines to a stream."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("holdfast").setLevel(level.upper())
    logging.getLogger("uvicorn.error").addFilter(_is_ours)
