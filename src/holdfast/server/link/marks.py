"""When one request passed each point on its way, on the clock that both processes share.

The middleware makes the marks of a request; what handles the request sets the rest, once each. The engine's
own times come with the end of the turn. Nothing is set, compared or allocated for a token after the first.
`telemetry/tracing.py` turns the marks of an ended turn into spans.
"""

from __future__ import annotations

from contextvars import ContextVar
from time import monotonic as clock

__all__ = ["Marks", "clock", "marks"]


class Marks:
    """Times of one request, in seconds; None where it has not come to that point."""

    __slots__ = ("arrived", "heard", "parsed", "posted", "written")

    def __init__(self, arrived: float) -> None:
        self.arrived = arrived
        """The headers were read."""
        self.parsed: float | None = None
        """The body was decoded and checked."""
        self.posted: float | None = None
        """The first command of its turns was handed to the socket."""
        self.heard: float | None = None
        """The first output came back from the engine process."""
        self.written: float | None = None
        """That output was handed to the connection."""


marks: ContextVar[Marks | None] = ContextVar("marks", default=None)
"""The marks of the current request."""
