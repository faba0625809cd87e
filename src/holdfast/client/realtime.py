"""Realtime conversations over a WebSocket, for ordinary and for asynchronous code.

    with session.realtime() as realtime:
        realtime.append("Tell me a story.")
        realtime.commit()
        for event in realtime:
            print(event.text, end="")

Input may be appended while the model generates. A dropped connection is reopened and continues after the last
event received; unanswered messages are sent again. Iteration ends when the session is closed.
Sending from one thread (or task) while another one iterates is allowed.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from types import TracebackType
from typing import Any, Literal, Unpack

from websockets.asyncio.client import ClientConnection as AsyncConnection
from websockets.asyncio.client import connect as connect_async
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect

from holdfast.client import calls
from holdfast.client.dialogue import Dialogue, RealtimeEvent
from holdfast.client.errors import HoldfastError, error_from_response, lost_connection
from holdfast.client.retry import Attempts, Retries
from holdfast.client.values import Body, Keep, Said, ToolOutput, TurnFields

__all__ = ["AsyncRealtime", "Realtime", "RealtimeEvent"]

MESSAGE_BYTES_MAX = 16 << 20

FATAL_CODES = frozenset({1002, 1003, 1007, 1008, 1009, 1010})
"""Codes of a close that says this side is at fault: the same again would end the same."""


class _Line:
    """Shared state of both kinds of conversation: address, protocol state, and whether it is over."""

    def __init__(self, url: str, headers: Mapping[str, str], dialogue: Dialogue, retries: Retries) -> None:
        self.dialogue = dialogue
        self._url = f"ws{url.removeprefix('http')}/v1/realtime"
        self._settings: dict[str, Any] = {
            "additional_headers": dict(headers),
            "max_size": MESSAGE_BYTES_MAX,
        }
        self._retries = retries
        self._ended = False

    @property
    def session_id(self) -> str:
        """The session that is talked in."""
        return self.dialogue.session_id

    @property
    def last_seq(self) -> int | None:
        """The number of the last event that was heard."""
        return self.dialogue.last_seq

    @property
    def turn_id(self) -> str | None:
        """The turn that speaks, or spoke last."""
        return self.dialogue.turn_id

    def _pause(self, error: Exception, attempts: Attempts) -> float:
        """Seconds to wait before a connection is opened again; raises what makes another one no use."""
        reason = self._reason(error)
        if isinstance(error, ConnectionClosed) and error.rcvd is not None and error.rcvd.code in FATAL_CODES:
            raise reason from error
        return attempts.after(reason)

    def _reason(self, error: Exception) -> HoldfastError:
        """The exception for a failed connection."""
        if isinstance(error, InvalidStatus):
            response = error.response
            body = bytes(response.body or b"")
            return error_from_response(response.status_code, body, dict(response.headers))
        return lost_connection(self._url, error)

    def _hear(self, message: str | bytes, attempts: Attempts) -> RealtimeEvent | None:
        """An event, unless it was heard before; notes the one that ends the conversation."""
        event = self.dialogue.hear(message)
        if event is not None:
            attempts.progress()
            if event.type == "session.closed":
                self._ended = True
        return event


class Realtime(_Line):
    """A conversation in full duplex."""

    def __init__(self, url: str, headers: Mapping[str, str], dialogue: Dialogue, retries: Retries) -> None:
        super().__init__(url, headers, dialogue, retries)
        self._lock = threading.RLock()
        self._connection: ClientConnection | None = None

    def __enter__(self) -> Realtime:
        self._reconnect(None, Attempts(self._retries))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def append(self, said: Said) -> None:
        """More input of the turn to come: text, token ids, or messages."""
        self._send(self.dialogue.append(said))

    def replace(self, start: int, text: str) -> None:
        """Replace the appended text from character `start` on."""
        self._send(self.dialogue.replace(start, text))

    def tool_results(self, results: Mapping[str, ToolOutput]) -> None:
        """The results of tool calls, by their ids, as input of the turn to come."""
        self._send(self.dialogue.tool_results(results))

    def commit(
        self,
        *,
        turn_id: str | None = None,
        mode: Literal["after", "interrupt", "steer"] = "after",
        keep_tokens: int | None = None,
        **fields: Unpack[TurnFields],
    ) -> str:
        """Start a turn with the appended input, after the running one or in its place; returns its id.

        With the mode "steer" the running turn is cut after `keep_tokens` (by default those that were sent)
        in one act with the start of this one. `on_abort` says whether its tokens are kept if the connection
        breaks.
        """
        message = self.dialogue.commit(turn_id, mode, fields, keep_tokens)
        self._send(message)
        return str(message["turn_id"])

    def interrupt(self, keep: Keep = "heard", turn_id: str | None = None) -> None:
        """Cut into the turn that speaks."""
        self._send(self.dialogue.interrupt(keep, turn_id))

    def rewind(self, turns: int) -> None:
        """Go back so that `turns` turns remain; answered by `session.rewound`."""
        self._send(self.dialogue.rewind(turns))

    def fork(self, at_turn: int | None = None, id: str | None = None) -> str:  # noqa: A002
        """A second session from here or from an earlier turn; its id. Answered by `session.forked`."""
        message = self.dialogue.fork(id, at_turn)
        self._send(message)
        return str(message["id"])

    def close_session(self) -> None:
        """End the conversation for good; answered by `session.closed`, which ends the iteration."""
        self._send(self.dialogue.close())

    def close(self) -> None:
        """Close the connection; the session stays open at the server."""
        self._ended = True
        if self._connection is not None:
            self._connection.close()

    def __iter__(self) -> Iterator[RealtimeEvent]:
        attempts = Attempts(self._retries)
        while not self._ended:
            connection = self._connection
            assert connection is not None, "use it in a with block"
            try:
                event = self._hear(connection.recv(), attempts)
            except (ConnectionClosed, OSError) as error:
                if self._ended:
                    return
                self._reconnect(connection, attempts, error)
                continue
            if event is not None:
                yield event

    def _send(self, message: Body) -> None:
        attempts = Attempts(self._retries)
        while True:
            connection = self._connection
            assert connection is not None, "use it in a with block"
            try:
                connection.send(calls.written(message))
                return
            except (ConnectionClosed, OSError) as error:
                self._reconnect(connection, attempts, error)
                if self.dialogue.is_pending(message):
                    return

    def _reconnect(
        self, broken: ClientConnection | None, attempts: Attempts, error: Exception | None = None
    ) -> None:
        """Open a connection in the place of `broken`, unless another thread has done so already."""
        if error is not None:
            time.sleep(self._pause(error, attempts))
        with self._lock:
            while self._connection is broken:
                try:
                    # Entered, because newer versions of the library want that; `close` leaves it.
                    connection = connect(self._url, **self._settings).__enter__()
                    for message in self.dialogue.catching_up():
                        connection.send(calls.written(message))
                    self._connection = connection
                except (OSError, WebSocketException) as failure:
                    time.sleep(self._pause(failure, attempts))


class AsyncRealtime(_Line):
    """A conversation in full duplex, for asynchronous code."""

    def __init__(self, url: str, headers: Mapping[str, str], dialogue: Dialogue, retries: Retries) -> None:
        super().__init__(url, headers, dialogue, retries)
        self._lock = asyncio.Lock()
        self._connection: AsyncConnection | None = None

    async def __aenter__(self) -> AsyncRealtime:
        await self._reconnect(None, Attempts(self._retries))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def append(self, said: Said) -> None:
        """More input of the turn to come: text, token ids, or messages."""
        await self._send(self.dialogue.append(said))

    async def replace(self, start: int, text: str) -> None:
        """Replace the appended text from character `start` on."""
        await self._send(self.dialogue.replace(start, text))

    async def tool_results(self, results: Mapping[str, ToolOutput]) -> None:
        """The results of tool calls, by their ids, as input of the turn to come."""
        await self._send(self.dialogue.tool_results(results))

    async def commit(
        self,
        *,
        turn_id: str | None = None,
        mode: Literal["after", "interrupt", "steer"] = "after",
        keep_tokens: int | None = None,
        **fields: Unpack[TurnFields],
    ) -> str:
        """Start a turn with the appended input, after the running one or in its place; returns its id.

        With the mode "steer" the running turn is cut after `keep_tokens` (by default those that were sent)
        in one act with the start of this one. `on_abort` says whether its tokens are kept if the connection
        breaks.
        """
        message = self.dialogue.commit(turn_id, mode, fields, keep_tokens)
        await self._send(message)
        return str(message["turn_id"])

    async def interrupt(self, keep: Keep = "heard", turn_id: str | None = None) -> None:
        """Cut into the turn that speaks."""
        await self._send(self.dialogue.interrupt(keep, turn_id))

    async def rewind(self, turns: int) -> None:
        """Go back so that `turns` turns remain; answered by `session.rewound`."""
        await self._send(self.dialogue.rewind(turns))

    async def fork(self, at_turn: int | None = None, id: str | None = None) -> str:  # noqa: A002
        """A second session from here or from an earlier turn; its id. Answered by `session.forked`."""
        message = self.dialogue.fork(id, at_turn)
        await self._send(message)
        return str(message["id"])

    async def close_session(self) -> None:
        """End the conversation for good; answered by `session.closed`, which ends the iteration."""
        await self._send(self.dialogue.close())

    async def close(self) -> None:
        """Close the connection; the session stays open at the server."""
        self._ended = True
        if self._connection is not None:
            await self._connection.close()

    async def __aiter__(self) -> AsyncIterator[RealtimeEvent]:
        attempts = Attempts(self._retries)
        while not self._ended:
            connection = self._connection
            assert connection is not None, "use it in an async with block"
            try:
                event = self._hear(await connection.recv(), attempts)
            except (ConnectionClosed, OSError) as error:
                if self._ended:
                    return
                await self._reconnect(connection, attempts, error)
                continue
            if event is not None:
                yield event

    async def _send(self, message: Body) -> None:
        attempts = Attempts(self._retries)
        while True:
            connection = self._connection
            assert connection is not None, "use it in an async with block"
            try:
                await connection.send(calls.written(message))
                return
            except (ConnectionClosed, OSError) as error:
                await self._reconnect(connection, attempts, error)
                if self.dialogue.is_pending(message):
                    return

    async def _reconnect(
        self, broken: AsyncConnection | None, attempts: Attempts, error: Exception | None = None
    ) -> None:
        """Open a connection in the place of `broken`, unless another task has done so already."""
        if error is not None:
            await asyncio.sleep(self._pause(error, attempts))
        async with self._lock:
            while self._connection is broken:
                try:
                    connection = await connect_async(self._url, **self._settings)
                    for message in self.dialogue.catching_up():
                        await connection.send(calls.written(message))
                    self._connection = connection
                except (OSError, WebSocketException) as failure:
                    await asyncio.sleep(self._pause(failure, attempts))
