"""Connections before and between requests: how long a request may take to arrive, and who may wait here.

Uvicorn's HTTP protocol, with deadlines for the headers and the body of a request, and with a bound on clients
that have not shown a key yet. An answer that is under way, an idle connection that has been used, and a
WebSocket have no deadline here. When descriptors run short a warning says so, and new connections are
answered with 503 while those there are go on. `serve` hands `Config` to uvicorn; nobody else uses this.
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
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from holdfast.server.http.problems import Problem

__all__ = ["Config", "Connections", "HttpConnection", "raise_descriptor_limit"]

log = logging.getLogger("holdfast.server")

STRANGERS_MAX = 1024
DESCRIPTORS_RESERVED = 32
"""Kept for what the server itself opens: the engine's process, files, sockets that are refused politely."""
WARNING_SECONDS = 60.0

HEAD, BODY = "headers", "body"


def raise_descriptor_limit() -> int:
    """Let this process have as many descriptors as it may; returns how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else 1 << 20


class Connections:
    """All connections of a server, as far as they can be in each other's way.

    A *stranger* is a connection none of whose requests was let in yet. The number of strangers is bounded:
    one more closes the one that has waited longest, so that somebody with a request always gets through.
    """

    def __init__(self, header_seconds: float, body_seconds: float, descriptors_max: int) -> None:
        self.header_seconds = header_seconds
        self.body_seconds = body_seconds
        self.descriptors_max = max(descriptors_max - DESCRIPTORS_RESERVED, descriptors_max // 2)
        self.strangers_max = min(STRANGERS_MAX, max(1, descriptors_max // 4))
        self.strangers: dict[HttpConnection, None] = {}
        self._warned = -WARNING_SECONDS

    def enter(self, connection: HttpConnection, descriptor: int) -> bool:
        """A connection has come; whether there is room for it.

        The system hands out the lowest free descriptor, so its number says how many are in use.
        """
        if descriptor >= self.descriptors_max:
            self._warn(descriptor)
            self._close_oldest()
            return False
        if descriptor >= self.descriptors_max * 9 // 10:
            self._warn(descriptor)
        self.strangers[connection] = None
        if len(self.strangers) > self.strangers_max:
            self._close_oldest()
        return True

    def leave(self, connection: HttpConnection) -> None:
        """A connection is closed, or no stranger any more."""
        self.strangers.pop(connection, None)

    def _close_oldest(self) -> None:
        """Close the stranger that has waited longest; those that were let in meanwhile are none."""
        while self.strangers:
            oldest = next(iter(self.strangers))
            del self.strangers[oldest]
            if not oldest.let_in:
                oldest.close()
                return

    def _warn(self, descriptor: int) -> None:
        if time.monotonic() - self._warned >= WARNING_SECONDS:
            self._warned = time.monotonic()
            log.warning(
                "descriptors run short: connections may be refused; raise the limit (ulimit -n, LimitNOFILE)",
                extra={"fields": {"in_use": descriptor + 1, "usable": self.descriptors_max}},
            )


class Config(uvicorn.Config):
    """Uvicorn's configuration, and what its connections share."""

    def __init__(self, app: Any, connections: Connections, **options: Any) -> None:
        super().__init__(app, http=HttpConnection, **options)
        self.crowd = connections


class HttpConnection(H11Protocol):
    """One connection that speaks HTTP, until it ends or becomes a WebSocket."""

    config: Config

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.crowd = config.crowd
        self._awaited: tuple[str, object] | None = None
        """What has to arrive by the deadline, and the request before or of which it is."""
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def let_in(self) -> bool:
        """Whether the gate has let a request of this connection in, under somebody's name."""
        scope: Any = self.scope  # None before the first request.
        caller = None if scope is None else scope["state"].get("caller")
        return caller is not None and caller.tenant != ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.crowd.enter(self, transport.get_extra_info("socket").fileno()):
            self._watch()
        else:
            self._refuse(Problem(503, "too_many_connections", "too many connections are open"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._await(None)
        self.crowd.leave(self)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        self._watch()

    def on_response_complete(self) -> None:
        if self.let_in:
            self.crowd.leave(self)
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
        self.crowd.leave(self)
        super().handle_websocket_upgrade(event)

    def close(self) -> None:
        """End the connection; nothing of it was let in."""
        if not self.transport.is_closing():
            self.transport.close()

    # --- deadlines --------------------------------------------------------------------------------

    def _watch(self) -> None:
        """See what is awaited now: the headers of a first or a begun request, the body of one, or nothing."""
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
            seconds = self.crowd.header_seconds if awaited[0] == HEAD else self.crowd.body_seconds
            self._deadline = self.loop.call_later(seconds, self._late)

    def _late(self) -> None:
        """What was awaited has not come. An answer that is under way goes on; the connection ends with it."""
        assert self._awaited is not None
        what, cycle = self._awaited[0], self.cycle
        self._await(None)
        if what == BODY and cycle.response_started:
            if cycle.response_complete:
                self.close()
            cycle.keep_alive = False
        elif what == HEAD and not self.conn.trailing_data[0]:
            self.close()  # It has said nothing at all.
        else:
            option, seconds = (
                ("--header-seconds", self.crowd.header_seconds)
                if what == HEAD
                else ("--body-seconds", self.crowd.body_seconds)
            )
            self._refuse(
                Problem(408, "request_timeout", f"the {what} did not arrive within {seconds:g} s ({option})")
            )

    def _refuse(self, problem: Problem) -> None:
        """Answer before, or instead of, the application, and close."""
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
