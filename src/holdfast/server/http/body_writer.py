"""Writes pieces of a streamed answer to their connection at once, without a task and without ASGI messages.

Uvicorn's own way costs a message, a coroutine and an h11 event for each piece. The body of an answer in
HTTP/1.1 without a length is chunked, and h11 keeps no account of its chunks: they may be written to the
transport directly, between the headers and the end, which are sent as ever. `connections` puts a writer into
the scope of each request; `answers` uses it.
"""

from __future__ import annotations

from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

__all__ = ["BodyWriter", "offer_writer", "writer_of"]

EXTENSION = "holdfast.body"
CHUNKED = b"1.1"
"""The version of HTTP whose bodies without a length are chunked."""


class BodyWriter:
    """The body of one answer."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def ready(self) -> bool:
        """Whether the body is open, and its client keeps up with it."""
        cycle = self._cycle
        return (
            cycle.response_started
            and not cycle.response_complete
            and not cycle.disconnected
            and not cycle.flow.write_paused
        )

    def write(self, piece: bytes) -> None:
        """Write one chunk; the body must be ready, and the piece not empty."""
        assert piece, "an empty chunk would end the body"
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))


def offer_writer(cycle: RequestResponseCycle) -> None:
    """Put the writer of an answer into the scope of its request, where its body will be chunked."""
    if cycle.conn.their_http_version == CHUNKED:
        extensions: dict[str, Any] = cycle.scope.setdefault("extensions", {})
        extensions[EXTENSION] = BodyWriter(cycle)


def writer_of(scope: Scope) -> BodyWriter | None:
    """The writer of a request's answer; None behind another server than ours."""
    found = scope.get("extensions", {}).get(EXTENSION)
    return found if isinstance(found, BodyWriter) else None
