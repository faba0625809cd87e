"""HTTP connections: deadlines for requests, and limits on unauthenticated connections and descriptors.

Uvicorn's HTTP protocol, with deadlines for the headers and the body of a request, and with a bound on
connections without an authenticated request. Answers in progress, idle keep-alive connections and WebSockets
have no deadline here. When file descriptors run short, a warning is logged and new connections get 503.
`serve` gives `Config` to uvicorn.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from http import HTTPStatus
from typing import Any

import h11
import msgspec
import uvicorn
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from holdfast.server.http.body_writer import offer_writer
from holdfast.server.http.clients import offer_client
from holdfast.server.http.parser import Flow, Parser
from holdfast.server.http.problems import Problem

__all__ = ["Config", "Connections", "HttpConnection", "raise_descriptor_limit"]

log = logging.getLogger("holdfast.server")

UNAUTHENTICATED_MAX = 1024
DESCRIPTORS_RESERVED = 32
"""Descriptors kept for the server itself: the engine process, files, connections that get a 503."""
WARNING_SECONDS = 60.0

HEAD, BODY = "headers", "body"


def raise_descriptor_limit() -> int:
    """Raise the soft limit of file descriptors to the hard limit; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else 1 << 20


class Connections:
    """The connections of a server that share limits.

    A connection is unauthenticated until one of its requests was accepted. The number of those is bounded:
    one more closes the oldest, so that a client with a request always gets through.
    """

    def __init__(self, header_seconds: float, body_seconds: float, descriptors_max: int) -> None:
        self.header_seconds = header_seconds
        self.body_seconds = body_seconds
        self.descriptors_max = max(descriptors_max - DESCRIPTORS_RESERVED, descriptors_max // 2)
        self.unauthenticated_max = min(UNAUTHENTICATED_MAX, max(1, descriptors_max // 4))
        self.unauthenticated: dict[HttpConnection, None] = {}
        self._warned = -WARNING_SECONDS

    def enter(self, connection: HttpConnection, descriptor: int) -> bool:
        """Count a new connection; False if it must be rejected.

        The kernel assigns the lowest free descriptor, so its number tells how many are in use.
        """
        if descriptor >= self.descriptors_max:
            self._warn(descriptor)
            self._close_oldest()
            return False
        if descriptor >= self.descriptors_max * 9 // 10:
            self._warn(descriptor)
        self.unauthenticated[connection] = None
        if len(self.unauthenticated) > self.unauthenticated_max:
            self._close_oldest()
        return True

    def leave(self, connection: HttpConnection) -> None:
        """A connection is closed, or authenticated."""
        self.unauthenticated.pop(connection, None)

    def _close_oldest(self) -> None:
        """Close the oldest unauthenticated connection."""
        while self.unauthenticated:
            oldest = next(iter(self.unauthenticated))
            del self.unauthenticated[oldest]
            if not oldest.authenticated:
                oldest.close()
                return

    def _warn(self, descriptor: int) -> None:
        if time.monotonic() - self._warned >= WARNING_SECONDS:
            self._warned = time.monotonic()
            log.warning(
                "file descriptors run short: new connections may get 503; raise ulimit -n or LimitNOFILE",
                extra={"fields": {"in_use": descriptor + 1, "usable": self.descriptors_max}},
            )


class Config(uvicorn.Config):
    """Uvicorn's configuration with the state that connections share."""

    def __init__(self, app: Any, connections: Connections, **options: Any) -> None:
        super().__init__(app, http=HttpConnection, **options)
        self.shared = connections


class HttpConnection(H11Protocol):
    """One HTTP connection, until it ends or becomes a WebSocket."""

    config: Config

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.shared = config.shared
        assert config.h11_max_incomplete_event_size is not None, "the size of headers is bounded"
        self.conn: Parser = Parser(config.h11_max_incomplete_event_size)
        self._awaited: tuple[str, object] | None = None
        """What must arrive by the deadline (headers or body), and its request."""
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def authenticated(self) -> bool:
        """Whether the middleware has accepted a request of this connection for a tenant."""
        scope: Any = self.scope  # None before the first request.
        caller = None if scope is None else scope["state"].get("caller")
        return caller is not None and caller.tenant != ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow: Flow = Flow(transport)
        if self.shared.enter(self, transport.get_extra_info("socket").fileno()):
            self._watch()
        else:
            self._refuse(Problem(503, "too_many_connections", "too many connections are open"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._await(None)
        self.shared.leave(self)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        before: Any = self.cycle
        super().handle_events()
        if self.cycle is not before:
            offer_writer(self.cycle)
            offer_client(self.cycle)
        self._watch()
        if not self.conn.left and not self.flow.stopped:
            self.flow.stopped = True
            self.flow.pause_reading()
            self.loop.call_soon(self._parse_on)

    def _parse_on(self) -> None:
        """Parse more of what was read, and read on after it, unless a body or the next request must wait."""
        self.flow.stopped = False
        self.conn.go_on()
        if not self.transport.is_closing() and self.transport.get_protocol() is self:
            self.handle_events()
        next_waits = self.conn.their_state is h11.DONE and bool(self.conn.trailing_data[0])
        if not (self.transport.is_closing() or next_waits or len(self.cycle.body) > HIGH_WATER_LIMIT):
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        if self.authenticated:
            self.shared.leave(self)
        super().on_response_complete()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        headers = dict(self.headers)
        if (
            event.method != b"GET"
            or b"transfer-encoding" in headers
            or headers.get(b"content-length", b"0") != b"0"
        ):
            self._refuse(Problem(400, "bad_upgrade", "a WebSocket is opened by a GET request without a body"))
            return
        self._await(None)
        self.shared.leave(self)
        super().handle_websocket_upgrade(event)

    def close(self) -> None:
        """Close the connection."""
        if not self.transport.is_closing():
            self.transport.close()

    # --- deadlines --------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Set the deadline for the awaited part: headers, a body, or nothing."""
        state = self.conn.their_state
        cycle: Any = self.cycle  # None before the first request.
        if self.transport.is_closing() or self.transport.get_protocol() is not self:
            self._await(None)
        elif state is h11.SEND_BODY:
            self._await((BODY, cycle))
        elif state is h11.IDLE and (cycle is None or self.conn.trailing_data[0]):
            self._await((HEAD, cycle))
        else:
            self._await(None)

    def _await(self, awaited: tuple[str, object] | None) -> None:
        if awaited == self._awaited:
            return
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._awaited = awaited
        if awaited is not None:
            seconds = self.shared.header_seconds if awaited[0] == HEAD else self.shared.body_seconds
            self._deadline = self.loop.call_later(seconds, self._late)

    def _late(self) -> None:
        """The deadline has passed. An answer in progress continues; the connection closes after it."""
        assert self._awaited is not None
        what, cycle = self._awaited[0], self.cycle
        self._await(None)
        if what == BODY and cycle.response_started:
            if cycle.response_complete:
                self.close()
            cycle.keep_alive = False
        elif what == HEAD and not self.conn.trailing_data[0]:
            self.close()  # It has sent nothing.
        else:
            option, seconds = (
                ("--header-seconds", self.shared.header_seconds)
                if what == HEAD
                else ("--body-seconds", self.shared.body_seconds)
            )
            self._refuse(
                Problem(408, "request_timeout", f"the {what} did not arrive within {seconds:g} s ({option})")
            )

    def _refuse(self, problem: Problem) -> None:
        """Answer without the application, and close."""
        body = msgspec.json.encode(problem.body())
        head = [
            f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            *([] if problem.retry_after is None else [f"retry-after: {problem.retry_after}"]),
            "connection: close",
        ]
        self._await(None)
        cycle: Any = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.write("\r\n".join([*head, "", ""]).encode() + body)
        self.transport.close()
