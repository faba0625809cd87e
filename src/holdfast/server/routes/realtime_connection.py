"""One WebSocket connection to `/v1/realtime`: its reader, its writer, and the protocol that it speaks.

A connection starts with one of the two protocols. A client that turns out to speak the other one is handed
over with the message that showed it, as long as nothing was done in the first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from starlette.types import Message
from starlette.websockets import WebSocket, WebSocketDisconnect

from holdfast.server.routes.realtime_outbox import Outbox

__all__ = ["Connection", "Speaker"]

log = logging.getLogger("holdfast.server")

CLOSE_SECONDS = 10.0


class Speaker(Protocol):
    """One side of a conversation in one protocol."""

    async def listen(self, first: Message | None) -> Message | None:
        """Take messages, `first` before others, until the client disconnects or speaks the other protocol:
        then that message is returned."""

    def leave(self) -> None:
        """The connection has ended, or is handed over. May be called again."""

    async def finish(self) -> None:
        """Wait for what is left to do; called last."""


class Connection:
    """One connection."""

    def __init__(
        self, websocket: WebSocket, outbox: Outbox, openai: bool, speaks: Callable[[bool], Speaker]
    ) -> None:
        """`speaks` makes the speaker of OpenAI's protocol, or of Holdfast's."""
        self.websocket = websocket
        self.outbox = outbox
        self._openai = openai
        self._speaks = speaks
        self._speaker = speaks(openai)

    async def run(self) -> None:
        """Read and write until one side disconnects."""
        writing = asyncio.create_task(self._write())
        reading = asyncio.create_task(self._read())
        try:
            await asyncio.wait({reading, writing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._speaker.leave()
            self.outbox.close(1001, "the connection is closed")
            for task in (reading, writing):
                task.cancel()
            results = await asyncio.gather(reading, writing, return_exceptions=True)
            await self._speaker.finish()
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _write(self) -> None:
        """Send queued messages. After a frame error the connection is already closed: the send fails, and the
        reader gets the reason."""
        try:
            while (text := await self.outbox.take()) is not None:
                await self.websocket.send({"type": "websocket.send", "text": text})
            assert self.outbox.closing is not None
            # Leave before the close handshake, which a slow client may delay.
            self._speaker.leave()
            await asyncio.wait_for(self.websocket.close(*self.outbox.closing), CLOSE_SECONDS)
        except (WebSocketDisconnect, RuntimeError, TimeoutError) as error:
            log.debug("connection closed: %s", type(error).__name__)

    async def _read(self) -> None:
        message: Message | None = None
        while True:
            message = await self._speaker.listen(message)
            if message is None:
                return
            self._speaker.leave()
            self._openai = not self._openai
            self._speaker = self._speaks(self._openai)
