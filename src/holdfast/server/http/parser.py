"""Bounded parsing: how many events of a connection are parsed before others get a turn.

A read has up to 256 KiB. With chunks of one byte those are 43,000 events, which would hold the event loop for
half a second, and again with each read. A parser stops after `EVENTS_MAX` events; its connection goes on in
the next round of the loop, and reads nothing until then. Used by `HttpConnection`.
"""

from __future__ import annotations

from typing import Any

import h11
from uvicorn.protocols.http.flow_control import FlowControl

__all__ = ["EVENTS_MAX", "Flow", "Parser"]

EVENTS_MAX = 256


class Parser(h11.Connection):
    """The server's side of a connection; parses at most `EVENTS_MAX` events between two calls of `go_on`."""

    def __init__(self, incomplete_max: int) -> None:
        super().__init__(h11.SERVER, incomplete_max)
        self.left = EVENTS_MAX

    def go_on(self) -> None:
        """Parse some more events."""
        self.left = EVENTS_MAX

    def next_event(self) -> Any:
        """The next event. It is `NEED_DATA` as well where the parser has stopped."""
        if not self.left:
            return h11.NEED_DATA
        event = super().next_event()
        self.left -= event is not h11.NEED_DATA
        return event


class Flow(FlowControl):
    """Flow control that does not read while a parser has stopped."""

    stopped = False

    def resume_reading(self) -> None:
        """Read on, unless the parser has stopped."""
        if not self.stopped:
            super().resume_reading()
