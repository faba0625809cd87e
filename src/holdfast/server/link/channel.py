"""The API process's end of the socket to an engine process, on the event loop.

Frames that have come are handed over in one callback, without a task or a future for each.
The socket's descriptor tells of changes, not of states: a send may take the news of a frame with it, so what
has come is looked for after every send as well. Used by the supervisor.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import zmq

__all__ = ["FRAMES_MAX", "Channel"]

FRAMES_MAX = 64
"""Frames that one callback hands over; other work of the loop comes between."""


class Channel:
    """Sends frames without waiting, and hands over those that come until it is closed."""

    __slots__ = ("_descriptor", "_hear", "_looks", "_loop", "_socket", "_unsent", "ended")

    def __init__(self, socket: zmq.Socket[bytes], hear: Callable[[bytes], None]) -> None:
        """What `hear` raises ends the channel."""
        self._socket = socket
        self._hear = hear
        self._loop = asyncio.get_running_loop()
        self._looks = False
        """Whether a look at the socket is scheduled."""
        self._unsent: deque[bytes] = deque()
        """Frames for a process that has not connected yet."""
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._descriptor = socket.fileno()
        self._loop.add_reader(self._descriptor, self._look)
        self._look_soon()

    def send(self, frame: bytes) -> None:
        """Send a frame after those before it; one to a process that has ended is dropped."""
        self._unsent.append(frame)
        self._flush()
        self._look_soon()

    def close(self) -> None:
        """Hand over nothing more."""
        self._loop.remove_reader(self._descriptor)
        if not self.ended.done():
            self.ended.cancel()

    def _flush(self) -> None:
        while self._unsent:
            try:
                self._socket.send(self._unsent[0], zmq.NOBLOCK)
            except zmq.Again:
                return
            self._unsent.popleft()

    def _look_soon(self) -> None:
        if not self._looks:
            self._looks = True
            self._loop.call_soon(self._look_again)

    def _look_again(self) -> None:
        self._looks = False
        self._look()

    def _look(self) -> None:
        """Hand over the frames that have come; go on in the next pass of the loop if they are many."""
        if self.ended.done():
            return
        try:
            for _ in range(FRAMES_MAX):
                self._hear(self._socket.recv(zmq.NOBLOCK))
            self._look_soon()
        except zmq.Again:
            if self._unsent:
                self._flush()
        except Exception as error:  # noqa: BLE001
            self.ended.set_exception(error)
