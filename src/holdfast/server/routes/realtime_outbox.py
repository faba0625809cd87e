"""The send queue of one connection, with backpressure.

Producers wait for `room`, so a reader slower than the model gets larger deltas. A reader that takes nothing
for too long, or whose queue exceeds the bound, is closed with 1008. A single message never exceeds it,
whatever its length: the end of a turn has all of its text. A message is written to the connection at once
where nothing waits before it and the reader keeps up; the connection's task takes the others with `take`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from holdfast.server.http.body_writer import Writer
from holdfast.server.link import wire

__all__ = ["Outbox", "TurnPen"]

log = logging.getLogger("holdfast.server")

BYTES_MAX = 1 << 20
BYTES_LOW = 64 << 10
LONG_MESSAGES_MAX = 4
STALL_SECONDS = 30.0

TOO_SLOW = (1008, "messages are read too slowly")


class Outbox:
    """Queued messages, and the close code and reason once the connection is closing."""

    def __init__(
        self,
        writer: Writer | None = None,
        *,
        bytes_max: int = BYTES_MAX,
        bytes_low: int = BYTES_LOW,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        """`writer` is the direct way to the client, if there is one."""
        self._writer = writer
        self._taken = False
        """Whether a message was taken that may not be written yet."""
        self.bytes = 0
        self.closing: tuple[int, str] | None = None
        self._bytes_max = bytes_max
        self._bytes_low = bytes_low
        self._stall_seconds = stall_seconds
        self._texts: deque[str] = deque()
        self._news = asyncio.Event()
        self._space = asyncio.Event()
        self._space.set()

    def put(self, text: str) -> None:
        """Queue a message."""
        if self.closing is not None:
            return
        writer = self._writer
        if writer is not None and not self._texts and not self._taken and writer.ready:
            writer.write(text.encode())
            return
        self._texts.append(text)
        self.bytes += self._weight(text)
        if self.bytes > self._bytes_max:
            self.close(*TOO_SLOW)
        elif self.bytes > self._bytes_low:
            self._space.clear()
        self._news.set()

    @property
    def has_room(self) -> bool:
        """Whether `room` would not wait."""
        return self._space.is_set()

    def _weight(self, text: str) -> int:
        """The bytes that a message counts for: its length, up to a part of the bound."""
        return min(len(text), self._bytes_max // LONG_MESSAGES_MAX)

    def close(self, code: int, reason: str) -> None:
        """Drop the queue and close; the first reason counts."""
        if self.closing is None:
            self.closing = (code, reason)
            self._texts.clear()
            self.bytes = 0
            self._space.set()
            self._news.set()

    async def room(self) -> None:
        """Wait until the queue is nearly empty; a stalled reader is closed."""
        while not self._space.is_set():
            waiting = self.bytes
            try:
                await asyncio.wait_for(self._space.wait(), self._stall_seconds)
            except TimeoutError:
                if self.bytes >= waiting:
                    self.close(*TOO_SLOW)

    async def take(self) -> str | None:
        """The next message; None when the connection is to be closed."""
        self._taken = False
        while True:
            if self.closing is not None:
                return None
            if self._texts:
                self._taken = True
                text = self._texts.popleft()
                self.bytes -= self._weight(text)
                if self.bytes <= self._bytes_low:
                    self._space.set()
                return text
            self._news.clear()
            await self._news.wait()


class TurnPen:
    """Has the output of a turn sent in the loop's callback that received it.

    `hear` sends output; it answers False if that cannot be done now, and the turn's reader gets it.
    """

    __slots__ = ("_hear",)

    def __init__(self, hear: Callable[[wire.Delta], bool]) -> None:
        self._hear = hear

    def write(self, delta: wire.Delta) -> bool:
        """Send output; False if the reader must."""
        try:
            return self._hear(delta)
        except Exception:
            log.exception("output of a turn cannot be sent")
            return False
