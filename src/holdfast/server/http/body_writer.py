"""Writes pieces of a streamed answer to their connection at once, without a task and without ASGI messages.

Uvicorn's own way costs a message, a coroutine and an h11 event for each piece. The body of an answer in
HTTP/1.1 without a length is chunked, and h11 keeps no account of its chunks: they may be written to the
transport directly, between the headers and the end, which h11 still sends. Messages of a WebSocket are
framed by its own protocol object. `connections` and `websockets` put a writer into the scope of each
request; `answers` and the routes of WebSockets use it.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, Protocol

from uvicorn.protocols.http.h11_impl import RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.protocol import OPEN

__all__ = ["BodyWriter", "FrameWriter", "Writer", "frames_of", "offer_frames", "offer_writer", "writer_of"]

EXTENSION = "holdfast.body"
CHUNKED = b"1.1"
"""The version of HTTP whose bodies without a length are chunked."""


class Writer(Protocol):
    """The way to one client."""

    @property
    def ready(self) -> bool:
        """Whether it is open, and its client keeps up with it."""

    def write(self, piece: bytes) -> None:
        """Write a piece that is not empty; the writer must be ready."""


class BodyWriter:
    """The body of one answer."""

    __slots__ = ("_cycle", "written")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self.written = 0
        """Pieces so far."""

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
        self.written += 1
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))


class FrameWriter:
    """The messages of one WebSocket."""

    __slots__ = ("_connection",)

    def __init__(self, connection: WebSocketsSansIOProtocol) -> None:
        self._connection = connection

    @property
    def ready(self) -> bool:
        """Whether the WebSocket is open, and its client keeps up with it."""
        connection = self._connection
        return (
            connection.handshake_complete
            and not connection.close_sent
            and not connection.disconnected
            and connection.writable.is_set()
            and connection.conn.state is OPEN
            and not connection.transport.is_closing()
        )

    def write(self, piece: bytes) -> None:
        """Write one message of text; the connection must be ready."""
        connection = self._connection
        connection.conn.send_text(piece)
        connection.transport.write(b"".join(connection.conn.data_to_send()))


def offer_writer(cycle: RequestResponseCycle) -> None:
    """Put the writer of an answer into the scope of its request, where its body will be chunked."""
    if cycle.conn.their_http_version == CHUNKED:
        extensions: dict[str, Any] = cycle.scope.setdefault("extensions", {})
        extensions[EXTENSION] = BodyWriter(cycle)


def offer_frames(connection: WebSocketsSansIOProtocol) -> None:
    """Put the writer of a WebSocket into its scope."""
    extensions: dict[str, Any] = connection.scope["extensions"]
    extensions[EXTENSION] = FrameWriter(connection)


def writer_of(scope: MutableMapping[str, Any]) -> BodyWriter | None:
    """The writer of a request's answer; None behind another server than ours."""
    found = scope.get("extensions", {}).get(EXTENSION)
    return found if isinstance(found, BodyWriter) else None


def frames_of(scope: MutableMapping[str, Any]) -> FrameWriter | None:
    """The writer of a WebSocket; None behind another server than ours."""
    found = scope.get("extensions", {}).get(EXTENSION)
    return found if isinstance(found, FrameWriter) else None
