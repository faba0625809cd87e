"""Logging: one line an event, as text or as JSON.

Lines carry ids (of requests, turns, sessions) and figures, never prompts or generated text. Extra fields are
given as `extra={"fields": {...}}`.

Some text is the client's, such as a path. It is sanitised here against log injection: line ends, control
characters and bidirectional marks are escaped, fields with spaces are quoted, and tracebacks are indented.
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
    r"""The text with unsafe characters as `\uXXXX`, as in JSON."""
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _quoted(text: str) -> str:
    """A field's text, JSON-quoted if it has spaces."""
    return msgspec.json.encode(_whole(text)).decode() if _SEVERAL.search(text) else text


def _whole(value: object) -> object:
    """A text without lone surrogates; other values unchanged."""
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
    """Whether a line of the HTTP library is about the server.

    Messages that are not UTF-8, and disconnects during the WebSocket handshake, are errors of the client.
    """
    if record.exc_info is not None and isinstance(record.exc_info[1], UnicodeDecodeError):
        return False
    return record.msg != "ASGI callable returned without completing handshake."


def set_up_logging(level: str, form: str, stream: TextIO) -> None:
    """Log to a stream."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("holdfast").setLevel(level.upper())
    logging.getLogger("uvicorn.error").addFilter(_is_ours)
