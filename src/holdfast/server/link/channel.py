"""The API process's end of the socket to an engine process, on the event loop.

The process connects once; frames that were sent before wait for it. Frames that have come are handed over in
one callback, without a task or a future for each. Used by the supervisor; the other end is in `frames.py`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import cast

from holdfast.server.link.frames import Frames, framed

__all__ = ["FRAMES_MAX", "Channel"]

FRAMES_MAX = 64
"""Frames that one callback hands over; other work of the loop comes between."""


class Channel(asyncio.Protocol):
    """Sends frames without waiting, and hands over those that come until it is closed."""

    def __init__(self, hear: Callable[[bytes], None]) -> None:
        """What `hear` raises ends the channel."""
        self._hear = hear
        self._loop = asyncio.get_running_loop()
        self._listening: asyncio.Server | None = None
        self._transport: asyncio.Transport | None = None
        self._frames = Frames()
        self._looks = False
        """Whether a look at the frames is scheduled."""
        self._dropped = False
        """Whether the connection has ended."""
        self._unsent: list[bytes] = []
        """Frames for a process that has not connected yet."""
        self.ended: asyncio.Future[None] = self._loop.create_future()

    async def listen(self, path: Path) -> None:
        """Make the socket that the process connects to; only this user may."""
        before = os.umask(0o177)
        try:
            self._listening = await self._loop.create_unix_server(lambda: self, str(path))
        finally:
            os.umask(before)

    def send(self, frame: bytes) -> None:
        """Send a frame after those before it; one to a process that has ended is dropped."""
        if self._transport is None:
            self._unsent.append(framed(frame))
        elif not self._dropped:
            self._transport.write(framed(frame))

    def close(self) -> None:
        """Hand over nothing more."""
        if self._listening is not None:
            self._listening.close()
        if self._transport is not None:
            self._transport.abort()
        if not self.ended.done():
            self.ended.cancel()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's is of another class.
        if self._transport is not None or self.ended.done():
            transport.abort()  # Nobody else is expected.
            return
        self._transport = transport
        transport.set_write_buffer_limits(high=1 << 30)  # Nobody waits for room.
        unsent, self._unsent = self._unsent, []
        transport.writelines(unsent)

    def connection_lost(self, _error: Exception | None) -> None:
        self._dropped = True

    def data_received(self, data: bytes) -> None:
        self._frames.feed(data)
        if not self._looks:
            self._look()

    def _look(self) -> None:
        """Hand over the frames that have come; go on in the next pass of the loop if they are many."""
        self._looks = False
        if self.ended.done():
            return
        try:
            for _ in range(FRAMES_MAX):
                frame = self._frames.take()
                if frame is None:
                    return
                self._hear(frame)
        except Exception as error:  # noqa: BLE001
            self.ended.set_exception(error)
            return
        self._looks = True
        self._loop.call_soon(self._look)
