"""Logs: one line an event, as text for people or as JSON for machines.

Lines carry ids (of requests, turns, sessions) and figures. What people and models say is never in them.
Extra fields are given as `extra={"fields": {...}}`.

Some text in them is a client's, such as a path. Here, and nowhere else, it is made harmless: characters that
end a line, move a cursor or turn the direction of writing are escaped, a text with spaces is quoted among
the fields, and the lines of a traceback are indented. So no text can pass for a line of its own.
"""

from __future__ import annotations

import logging
import re
import time
from typing import TextIO

import msgspec

__all__ = ["set_up_logging"]

_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
_SEVERAL = re.compile(r'[\s="]')


def _fields(record: logging.LogRecord) -> dict[str, object]:
    found = record.__dict__.get("fields")
    return found if isinstance(found, dict) else {}


def _escaped(text: str) -> str:
    r"""The text with what is not for the eye as `\uXXXX`, as JSON has it too."""
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _quoted(text: str) -> str:
    """A field's text, as JSON if it could be taken for several fields."""
    return msgspec.json.encode(_whole(text)).decode() if _SEVERAL.search(text) else text


def _whole(value: object) -> object:
    """A text without halves of characters, which UTF-8 cannot have; anything else as it is."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


class TextFormatter(logging.Formatter):
    """`12:00:01 INFO  holdfast.server  turn ended  turn=t-1 tokens=12`."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        extra = "".join(f" {name}={_quoted(str(value))}" for name, value in _fields(record).items())
        message = _escaped(record.getMessage().rstrip())
        line = f"{clock} {record.levelname:<7} {record.name}  {message}{_escaped(extra)}"
        if record.exc_info:
            trace = self.formatException(record.exc_info).split("\n")
            line += "".join(f"\n  {_escaped(each)}" for each in trace)
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _whole(record.getMessage()),
            **{name: _whole(value) for name, value in _fields(record).items()},
        }
        if record.exc_info:
            entry["trace"] = _whole(self.formatException(record.exc_info))
        return _escaped(msgspec.json.encode(entry, enc_hook=str).decode())


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
