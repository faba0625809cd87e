"""Realtime conversations over a WebSocket, for ordinary and for asynchronous code.

    with session.realtime() as realtime:
        realtime.append("Tell me a story.")
        realtime.commit()
        for event in realtime:
            print(event.text, end="")

Input may be appended while the model speaks. A dropped connection is opened again, and goes on after the last
event that was heard; what was said and not answered is said again. Iteration ends when the session is closed.
Sending from one thread (or task) while another one iterates is allowed.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Literal, Unpack

from websockets.asyncio.client import ClientConnection as AsyncConnection
from websockets.asyncio.client import connect as connect_async
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect

from holdfast.client import calls
from holdfast.client.dialogue import Dialogue, RealtimeEvent
from holdfast.client.errors import HoldfastError, error_from_response, lost_connection
from holdfast.client.retry import Attempts, Retries
from holdfast.client.values import Body, Keep, Sampling

__all__ = ["AsyncRealtime", "Realtime", "RealtimeEvent"]

MESSAGE_BYTES_MAX = 16 << 20

FATAL_CODES = frozenset({1002, 1003, 1007, 1008, 1009, 1010})
"""Codes of a close that says this side is at fault: the same again would end the same."""


def _address(url: str) -> str:
    return f"ws{url.removeprefix('http')}/v1/realtime"


def _reason(url: str, error: Exception) -> HoldfastError:
    """What a failed connection means."""
    if isinstance(error, InvalidStatus):
        response = error.response
        return error_from_response(response.status_code, bytes(response.body or b""), dict(response.headers))
    return lost_connection(url, error)


def _lasting(error: ConnectionClosed) -> bool:
    """Whether a closed connection is not worth opening again."""
    return error.rcvd is not None and error.rcvd.code in FATAL_CODES


class _Verbs:
    """The messages that both kinds of conversation send."""

    def __init__(self, dialogue: Dialogue) -> None:
        self.dialogue = dialogue

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

    @staticmethod
    def _rewinding(turns: int) -> Body:
        return {"type": "session.rewind", "to_turn": turns, "request_id": calls.new_id("r")}

    @staticmethod
    def _forking(id: str | None, at_turn: int | None) -> Body:  # noqa: A002
        message: Body = {"type": "session.fork", "request_id": calls.new_id("r")}
        message["id"] = id or calls.new_id("s")
        if at_turn is not None:
            message["at_turn"] = at_turn
        return message


class Realtime(_Verbs):
    """A conversation in full duplex."""

    def __init__(self, url: str, headers: Mapping[str, str], dialogue: Dialogue, retries: Retries) -> None:
        super().__init__(dialogue)
        self._url = _address(url)
        self._headers = dict(headers)
        self._retries = retries
        self._lock = threading.RLock()
        self._connection: ClientConnection | None = None
        self._ended = False

    def __enter__(self) -> Realtime:
        self._reconnect(None, Attempts(self._retries))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def append(self, said: str | Sequence[int]) -> None:
        """More input of the turn to come: text, or token ids."""
        self._send(self.dialogue.append(said if isinstance(said, str) else list(said)))

    def commit(
        self,
        *,
        turn_id: str | None = None,
        mode: Literal["after", "interrupt"] = "after",
        on_abort: Literal["rollback", "keep"] = "rollback",
        **sampling: Unpack[Sampling],
    ) -> str:
        """Start a turn with what was appended, after the one that speaks or in its place; its id.

        `on_abort` is what becomes of it if the connection breaks while it speaks.
        """
        message = self.dialogue.commit(turn_id, mode, on_abort, sampling)
        self._send(message)
        return str(message["turn_id"])

    def interrupt(self, keep: Keep = "heard", turn_id: str | None = None) -> None:
        """Cut into the turn that speaks."""
        self._send(self.dialogue.interrupt(keep, turn_id))

    def rewind(self, turns: int) -> None:
        """Go back so that `turns` turns remain; answered by `session.rewound`."""
        self._send(self._rewinding(turns))

    def fork(self, id: str | None = None, at_turn: int | None = None) -> str:  # noqa: A002
        """A second session from here or from an earlier turn; its id. Answered by `session.forked`."""
        message = self._forking(id, at_turn)
        self._send(message)
        return str(message["id"])

    def close_session(self) -> None:
        """End the conversation for good; answered by `session.closed`, which ends the iteration."""
        self._send({"type": "session.close"})

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
                event = self.dialogue.hear(connection.recv())
            except (ConnectionClosed, OSError) as error:
                if self._ended:
                    return
                self._reconnect(connection, attempts, error)
                continue
            if event is not None:
                attempts.progress()
                self._ended = event.type == "session.closed"
                yield event

    def _send(self, message: Body) -> None:
        attempts = Attempts(self._retries)
        while True:
            connection = self._connection
            assert connection is not None, "use it in a with block"
            try:
                connection.send(json.dumps(message))
                return
            except (ConnectionClosed, OSError) as error:
                self._reconnect(connection, attempts, error)
                if any(message is waiting for waiting in self.dialogue.pending):
                    return  # Said again with everything that is pending.

    def _reconnect(
        self, broken: ClientConnection | None, attempts: Attempts, error: Exception | None = None
    ) -> None:
        """Open a connection in the place of `broken`, unless another thread has done so already."""
        if isinstance(error, ConnectionClosed) and _lasting(error):
            raise _reason(self._url, error) from error
        if error is not None:
            time.sleep(attempts.after(_reason(self._url, error)))
        with self._lock:
            while self._connection is broken:
                try:
                    # Entered, because newer versions of the library want that; `close` leaves it.
                    connection = connect(
                        self._url, additional_headers=self._headers, max_size=MESSAGE_BYTES_MAX
                    ).__enter__()
                    for message in (self.dialogue.opening(), *self.dialogue.pending):
                        connection.send(json.dumps(message))
                    self._connection = connection
                except (OSError, WebSocketException) as failure:
                    time.sleep(attempts.after(_reason(self._url, failure)))


class AsyncRealtime(_Verbs):
    """A conversation in full duplex, for asynchronous code."""

    def __init__(self, url: str, headers: Mapping[str, str], dialogue: Dialogue, retries: Retries) -> None:
        super().__init__(dialogue)
        self._url = _address(url)
        self._headers = dict(headers)
        self._retries = retries
        self._lock = asyncio.Lock()
        self._connection: AsyncConnection | None = None
        self._ended = False

    async def __aenter__(self) -> AsyncRealtime:
        await self._reconnect(None, Attempts(self._retries))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def append(self, said: str | Sequence[int]) -> None:
        """More input of the turn to come: text, or token ids."""
        await self._send(self.dialogue.append(said if isinstance(said, str) else list(said)))

    async def commit(
        self,
        *,
        turn_id: str | None = None,
        mode: Literal["after", "interrupt"] = "after",
        on_abort: Literal["rollback", "keep"] = "rollback",
        **sampling: Unpack[Sampling],
    ) -> str:
        """Start a turn with what was appended, after the one that speaks or in its place; its id.

        `on_abort` is what becomes of it if the connection breaks while it speaks.
        """
        message = self.dialogue.commit(turn_id, mode, on_abort, sampling)
        await self._send(message)
        return str(message["turn_id"])

    async def interrupt(self, keep: Keep = "heard", turn_id: str | None = None) -> None:
        """Cut into the turn that speaks."""
        await self._send(self.dialogue.interrupt(keep, turn_id))

    async def rewind(self, turns: int) -> None:
        """Go back so that `turns` turns remain; answered by `session.rewound`."""
        await self._send(self._rewinding(turns))

    async def fork(self, id: str | None = None, at_turn: int | None = None) -> str:  # noqa: A002
        """A second session from here or from an earlier turn; its id. Answered by `session.forked`."""
        message = self._forking(id, at_turn)
        await self._send(message)
        return str(message["id"])

    async def close_session(self) -> None:
        """End the conversation for good; answered by `session.closed`, which ends the iteration."""
        await self._send({"type": "session.close"})

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
                event = self.dialogue.hear(await connection.recv())
            except (ConnectionClosed, OSError) as error:
                if self._ended:
                    return
                await self._reconnect(connection, attempts, error)
                continue
            if event is not None:
                attempts.progress()
                self._ended = event.type == "session.closed"
                yield event

    async def _send(self, message: Body) -> None:
        attempts = Attempts(self._retries)
        while True:
            connection = self._connection
            assert connection is not None, "use it in an async with block"
            try:
                await connection.send(json.dumps(message))
                return
            except (ConnectionClosed, OSError) as error:
                await self._reconnect(connection, attempts, error)
                if any(message is waiting for waiting in self.dialogue.pending):
                    return  # Said again with everything that is pending.

    async def _reconnect(
        self, broken: AsyncConnection | None, attempts: Attempts, error: Exception | None = None
    ) -> None:
        """Open a connection in the place of `broken`, unless another task has done so already."""
        if isinstance(error, ConnectionClosed) and _lasting(error):
            raise _reason(self._url, error) from error
        if error is not None:
            await asyncio.sleep(attempts.after(_reason(self._url, error)))
        async with self._lock:
            while self._connection is broken:
                try:
                    connection = await connect_async(
                        self._url, additional_headers=self._headers, max_size=MESSAGE_BYTES_MAX
                    )
                    for message in (self.dialogue.opening(), *self.dialogue.pending):
                        await connection.send(json.dumps(message))
                    self._connection = connection
                except (OSError, WebSocketException) as failure:
                    await asyncio.sleep(attempts.after(_reason(self._url, failure)))
