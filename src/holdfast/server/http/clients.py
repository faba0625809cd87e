"""Whether the client of a request is still connected, as the kernel knows it now.

The event loop hears of a disconnect when it next reads the connection, and the request's task some passes
later. A request that follows may be handled before that. `connections` puts a `Client` into the scope of
each request; `occupants` asks it.
"""

from __future__ import annotations

import select
from collections.abc import MutableMapping
from typing import Any

from uvicorn.protocols.http.h11_impl import RequestResponseCycle

__all__ = ["Client", "client_of", "offer_client"]

EXTENSION = "holdfast.client"
CLOSED = select.POLLRDHUP | select.POLLHUP | select.POLLERR
"""The other side has closed the connection, or its sending half: the server treats both as a disconnect."""


class Client:
    """The client of one HTTP request."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def gone(self) -> bool:
        """Whether it has disconnected."""
        cycle = self._cycle
        if cycle.disconnected or cycle.transport.is_closing():
            return True
        connection = cycle.transport.get_extra_info("socket")
        descriptor = -1 if connection is None else connection.fileno()
        if descriptor < 0:
            return True
        poll = select.poll()
        poll.register(descriptor, CLOSED)
        return bool(poll.poll(0))


def offer_client(cycle: RequestResponseCycle) -> None:
    """Put the client of a request into its scope."""
    extensions: dict[str, Any] = cycle.scope.setdefault("extensions", {})
    extensions[EXTENSION] = Client(cycle)


def client_of(scope: MutableMapping[str, Any]) -> Client | None:
    """The client of a request; None behind another server than ours."""
    found = scope.get("extensions", {}).get(EXTENSION)
    return found if isinstance(found, Client) else None
