"""A turn as its caller sees it, sync and async: streamed text or events, then the result.

Both kinds read their stream through a `TurnReader` and reconnect when it breaks. The result of a `Turn`
(`text`, `usage` and the like) waits for its end; an `AsyncTurn` must be read first. Closing one early aborts
it on the server by its `on_abort`. Made by sessions.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Any

import httpx

from holdfast.client.calls import Call
from holdfast.client.errors import ConnectionFailed, HoldfastError, Unavailable, lost_connection
from holdfast.client.retry import Attempts
from holdfast.client.stream import EventDecoder, TurnReader
from holdfast.client.transport import AsyncTransport, Transport
from holdfast.client.values import Body, Timing, ToolCall, TurnEvent, TurnEventKind, TurnResult, Usage

__all__ = ["AsyncTurn", "Turn"]

BREAKS = (ConnectionFailed, Unavailable)
"""Errors after which the stream is opened again."""


class _Heard:
    """The state of a turn: its call, the parts read so far, and its result."""

    def __init__(self, url: str, call: Call[Any], attempts: Attempts) -> None:
        assert call.body is not None, "a turn is asked for with a body"
        self.id: str = call.body["turn_id"]
        self._url = url
        self._call = call
        self._attempts = attempts
        self._reader = TurnReader()
        self._response: httpx.Response | None = None
        self._left = False

    @property
    def done(self) -> bool:
        """Whether the turn has had its end, as far as it was read."""
        return self._reader.result is not None

    @property
    def tokens_shown(self) -> int:
        """How many generated tokens were handed out."""
        return self._reader.tokens_shown

    @property
    def tokens_settled(self) -> int:
        """How many of these lie outside an unfinished tool call: the tokens that an interrupt keeps."""
        return self._reader.tokens_settled

    @property
    def result(self) -> TurnResult:
        """How the turn ended."""
        if self._reader.result is None:
            why = "was left before its end" if self._left else "is not done: read it to its end first"
            raise ConnectionFailed(f"the turn {why}")
        return self._reader.result

    @property
    def text(self) -> str:
        """The whole text of the turn; after a cut, the part that stays."""
        return self.result.text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The generated tokens that stand."""
        return self.result.token_ids

    @property
    def finish_reason(self) -> str:
        """`stop`, `length`, `tool_calls` or `abort`."""
        return self.result.finish_reason

    @property
    def reasoning(self) -> str:
        """The model's reasoning."""
        return self.result.reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls whose results the session waits for; see `tool_results`."""
        return self.result.tool_calls

    @property
    def usage(self) -> Usage:
        """The token counts of the turn."""
        return self.result.usage

    @property
    def timing(self) -> Timing:
        """How long the turn took at the server."""
        return self.result.timing

    def cut(self, keep: Body) -> None:
        """The server has carried out an interruption that keeps so much; called by the session."""
        if keep.get("keep") != "all":
            self._reader.cut(keep.get("keep_tokens", 0))

    def _hear(self, decoder: EventDecoder, chunk: bytes) -> Iterator[TurnEvent]:
        """The new events of a chunk of the stream."""
        for event in decoder.feed(chunk):
            for told in self._reader.hear(event):
                self._attempts.progress()
                yield told

    def _require_end(self) -> None:
        """A stream is over: so must the turn be."""
        if self._reader.result is None:
            raise ConnectionFailed(f"{self._url}: the stream ended before the turn did")


class Turn(_Heard):
    """An iterator of text as it arrives; `text`, `usage` and the other results wait for the end."""

    def __init__(self, transport: Transport, call: Call[Any]) -> None:
        super().__init__(transport.url, call, Attempts(transport.retries))
        self._transport = transport
        self._events = self._read()
        self._connect()

    def __enter__(self) -> Turn:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while True:
            event = next(self._events)
            if event.kind is TurnEventKind.TEXT:
                return event.text

    def events(self) -> Iterator[TurnEvent]:
        """Text, reasoning and tool calls as they come, in the place of iterating over the text."""
        return self._events

    @property
    def result(self) -> TurnResult:
        """How the turn ended; waits for it."""
        return self.wait()

    def wait(self) -> TurnResult:
        """Read the turn to its end."""
        for _ in self._events:
            continue
        return super().result

    def close(self) -> None:
        """Stop listening; a turn that was not done is ended at the server."""
        self._left = True
        if self._response is not None:
            self._response.close()

    def _connect(self) -> None:
        while True:
            try:
                self._response = self._transport.open(self._call)
                return
            except HoldfastError as error:
                time.sleep(self._attempts.after(error))

    def _read(self) -> Iterator[TurnEvent]:
        """The events, over as many connections as it takes."""
        while not self.done and not self._left:
            try:
                yield from self._read_connection()
            except BREAKS as error:
                if self._left:
                    return
                time.sleep(self._attempts.after(error))
                self._reader.reopen()
                self._connect()

    def _read_connection(self) -> Iterator[TurnEvent]:
        assert self._response is not None, "the turn was never sent"
        decoder = EventDecoder()
        try:
            for chunk in self._response.iter_bytes():
                yield from self._hear(decoder, chunk)
        except (httpx.TransportError, httpx.StreamError) as error:
            raise lost_connection(self._url, error) from error
        finally:
            self._response.close()
        self._require_end()


class AsyncTurn(_Heard):
    """An asynchronous iterator of text as it comes; `wait` reads to the end."""

    def __init__(self, transport: AsyncTransport, call: Call[Any]) -> None:
        super().__init__(transport.url, call, Attempts(transport.retries))
        self._transport = transport
        self._events = self._read()

    async def __aenter__(self) -> AsyncTurn:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        while True:
            event = await anext(self._events)
            if event.kind is TurnEventKind.TEXT:
                return event.text

    def events(self) -> AsyncIterator[TurnEvent]:
        """Text, reasoning and tool calls as they come, in the place of iterating over the text."""
        return self._events

    async def wait(self) -> TurnResult:
        """Read the turn to its end."""
        async for _ in self._events:
            continue
        return self.result

    async def close(self) -> None:
        """Stop listening; a turn that was not done is ended at the server."""
        self._left = True
        if self._response is not None:
            await self._response.aclose()

    async def connect(self) -> AsyncTurn:
        """Send the turn; `say` does it."""
        while True:
            try:
                self._response = await self._transport.open(self._call)
                return self
            except HoldfastError as error:
                await asyncio.sleep(self._attempts.after(error))

    async def _read(self) -> AsyncIterator[TurnEvent]:
        """The events, over as many connections as it takes."""
        while not self.done and not self._left:
            try:
                async for event in self._read_connection():
                    yield event
            except BREAKS as error:
                if self._left:
                    return
                await asyncio.sleep(self._attempts.after(error))
                self._reader.reopen()
                await self.connect()

    async def _read_connection(self) -> AsyncIterator[TurnEvent]:
        assert self._response is not None, "the turn was never sent"
        decoder = EventDecoder()
        try:
            async for chunk in self._response.aiter_bytes():
                for event in self._hear(decoder, chunk):
                    yield event
        except (httpx.TransportError, httpx.StreamError) as error:
            raise lost_connection(self._url, error) from error
        finally:
            await self._response.aclose()
        self._require_end()
