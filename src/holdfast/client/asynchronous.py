"""The client for asynchronous code: sessions and turns of a server, call by call.

    async with AsyncClient("http://127.0.0.1:8000") as client:
        async with await client.session(system="You are terse.") as session:
            async for piece in await session.say("Name three rivers."):
                print(piece, end="")

One task can interrupt the turn that another one reads. Calls are sent again by themselves when the connection
fails or the server asks for patience (see `retry`). The same names as in `sync`, to be awaited.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Unpack

import httpx

from holdfast.client import calls
from holdfast.client.calls import Call
from holdfast.client.dialogue import Dialogue
from holdfast.client.errors import (
    ConnectionFailed,
    HoldfastError,
    NotFound,
    Unavailable,
    error_from_response,
    lost_connection,
)
from holdfast.client.realtime import AsyncRealtime
from holdfast.client.retry import Attempts, Retries
from holdfast.client.stream import EventDecoder, TurnReader
from holdfast.client.values import (
    Body,
    Generated,
    Keep,
    Said,
    Sampling,
    SessionView,
    Timing,
    TurnResult,
    Usage,
)

__all__ = ["AsyncClient", "AsyncSession", "AsyncTransport", "AsyncTurn"]


class AsyncTransport:
    """Sends calls, again where that helps, and turns answers into values or exceptions."""

    def __init__(self, url: str, api_key: str | None, retries: Retries, timeout: float) -> None:
        self.url = calls.base_url(url)
        self.retries = retries
        self.headers = {"authorization": f"Bearer {api_key}"} if api_key is not None else {}
        # Every session may have a turn in flight: the number of connections is the server's to limit.
        self.http = httpx.AsyncClient(
            base_url=self.url,
            headers=self.headers,
            timeout=httpx.Timeout(timeout, connect=10.0, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=20),
        )

    async def ask(self, call: Call) -> Body:
        """The answer to a call, as a JSON object."""
        body = await self.read(call)
        return {} if body is None else calls.parse_answer(body)

    async def read(self, call: Call) -> bytes | None:
        """The answer to a call; None if it was lost on the way, though the call has been carried out."""
        attempts = Attempts(self.retries)
        while True:
            try:
                response = await self.open(call)
                try:
                    return await response.aread()
                except httpx.TransportError as error:
                    raise lost_connection(self.url, error) from error
                finally:
                    await response.aclose()
            except HoldfastError as error:
                if attempts.carried_out(error, call.carried_out):
                    return None
                await asyncio.sleep(attempts.after(error))

    async def open(self, call: Call) -> httpx.Response:
        """One attempt: a response whose status is good and whose body is still to be read."""
        request = self.http.build_request(call.method, call.path, json=call.body)
        try:
            response = await self.http.send(request, stream=True)
            if response.is_success:
                return response
            try:
                raise error_from_response(response.status_code, await response.aread(), response.headers)
            finally:
                await response.aclose()
        except httpx.TransportError as error:
            raise lost_connection(self.url, error) from error


class AsyncTurn:
    """A turn: an iterator of text as it comes, and the result once it is done.

    Leaving one before its end (`close`, or the end of an `async with` block) ends it at the server as
    `on_abort` of `say` asked for.
    """

    def __init__(self, transport: AsyncTransport, call: Call) -> None:
        assert call.body is not None
        self.id: str = call.body["turn_id"]
        self._transport = transport
        self._call = call
        self._attempts = Attempts(transport.retries)
        self._reader = TurnReader()
        self._response: httpx.Response | None = None
        self._left = False
        self._pieces = self._read()

    async def __aenter__(self) -> AsyncTurn:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        return await anext(self._pieces)

    async def close(self) -> None:
        """Stop listening; a turn that was not done is ended at the server."""
        self._left = True
        if self._response is not None:
            await self._response.aclose()

    async def wait(self) -> TurnResult:
        """Read the turn to its end."""
        async for _ in self:
            continue
        return self.result

    @property
    def result(self) -> TurnResult:
        """How the turn ended; await `wait()` or iterate to its end first."""
        if self._reader.result is None:
            raise ConnectionFailed("the turn is not done: iterate to its end, or await its wait()")
        return self._reader.result

    @property
    def done(self) -> bool:
        """Whether the turn has had its end, as far as it was read."""
        return self._reader.result is not None

    @property
    def tokens_shown(self) -> int:
        """How many generated tokens were handed out."""
        return self._reader.tokens_shown

    @property
    def text(self) -> str:
        """Everything the turn said, of one that was cut short what stands."""
        return self.result.text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The generated tokens that stand."""
        return self.result.token_ids

    @property
    def finish_reason(self) -> str:
        """`stop`, `length` or `abort`."""
        return self.result.finish_reason

    @property
    def usage(self) -> Usage:
        """What the turn cost."""
        return self.result.usage

    @property
    def timing(self) -> Timing:
        """How long the turn took at the server."""
        return self.result.timing

    def cut(self, kept: int) -> None:
        """The server has kept so many tokens of the turn; called by `AsyncSession.interrupt`."""
        self._reader.cut(kept)

    async def connect(self) -> AsyncTurn:
        """Send the turn; `say` does it."""
        while True:
            try:
                self._response = await self._transport.open(self._call)
                return self
            except HoldfastError as error:
                await asyncio.sleep(self._attempts.after(error))

    async def _read(self) -> AsyncIterator[str]:
        """The pieces, over as many connections as it takes."""
        while self._reader.result is None and not self._left:
            try:
                async for piece in self._read_connection():
                    yield piece
            except (ConnectionFailed, Unavailable) as error:
                if self._left:
                    return
                await asyncio.sleep(self._attempts.after(error))
                self._reader.reopen()
                await self.connect()

    async def _read_connection(self) -> AsyncIterator[str]:
        assert self._response is not None, "the turn was never sent"
        decoder = EventDecoder()
        try:
            async for chunk in self._response.aiter_bytes():
                for event in decoder.feed(chunk):
                    if text := self._reader.hear(event):
                        self._attempts.progress()
                        yield text
        except (httpx.TransportError, httpx.StreamError) as error:
            raise lost_connection(self._transport.url, error) from error
        finally:
            await self._response.aclose()
        if self._reader.result is None:
            raise ConnectionFailed(f"{self._transport.url}: the stream ended before the turn did")


class AsyncSession:
    """A conversation whose memory stays at the server between turns."""

    def __init__(self, transport: AsyncTransport, session_id: str, system: str | None = None) -> None:
        self._transport = transport
        self.id = session_id
        self.system = system
        self._current: AsyncTurn | None = None

    async def __aenter__(self) -> AsyncSession:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def say(
        self,
        said: Said,
        *,
        turn_id: str | None = None,
        on_abort: Literal["rollback", "keep"] = "rollback",
        timeout: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> AsyncTurn:
        """Say something and get a turn: iterate over it for text as it comes, or await its `wait()`."""
        call = calls.start_turn(self.id, said, sampling, turn_id=turn_id, on_abort=on_abort, timeout=timeout)
        self._current = await AsyncTurn(self._transport, call).connect()
        return self._current

    async def interrupt(self, keep: Keep = "heard") -> None:
        """Cut into the turn in flight, or into the last one if no other has begun.

        Tokens that stay: a number, those that were handed out so far (`"heard"`), `"all"`, or `"none"` (then
        the turn never was).
        """
        current = self._current
        heard = None if current is None else current.tokens_shown
        turn_id = None if current is None else current.id
        call = calls.interrupt_session(self.id, turn_id, keep, heard)
        await self._transport.ask(call)
        if current is not None and call.body is not None and call.body.get("keep") != "all":
            current.cut(call.body.get("keep_tokens", 0))

    async def rewind(self, turns: int) -> SessionView:
        """Go back so that only the first `turns` turns remain."""
        self._current = None
        return await self._changed(calls.rewind_session(self.id, turns))

    async def fork(self, at_turn: int | None = None, id: str | None = None) -> AsyncSession:  # noqa: A002
        """A second session that goes on from here, or from the end of an earlier turn; memory is shared."""
        call = calls.fork_session(self.id, id, at_turn)
        assert call.body is not None
        await self._transport.ask(call)
        return AsyncSession(self._transport, call.body["id"], self.system)

    async def spill(self, tier: Literal["host", "disk"] | None = None) -> SessionView:
        """Move the session's memory off the device, to the nearest tier with room if none is named."""
        return await self._changed(calls.spill_session(self.id, tier))

    async def restore(self) -> SessionView:
        """Bring the session's memory back to the device."""
        return await self._changed(calls.restore_session(self.id))

    async def _changed(self, call: Call) -> SessionView:
        """Send a call that is answered with the session as it is then."""
        body = await self._transport.ask(call)
        return SessionView.from_body(body) if body else await self.view()

    async def view(self) -> SessionView:
        """The session as the server describes it now."""
        return SessionView.from_body(await self._transport.ask(calls.show_session(self.id)))

    def realtime(self, resume_after: int | None = None) -> AsyncRealtime:
        """Full duplex over a WebSocket: say more while the model speaks.

        `resume_after` is the number of the last event that was heard of this session, elsewhere or earlier.
        """
        transport = self._transport
        dialogue = Dialogue(self.id, resume_after)
        return AsyncRealtime(transport.url, transport.headers, dialogue, transport.retries)

    async def close(self) -> None:
        """End the conversation and give its memory back. Closing twice is no error."""
        if self._current is not None:
            await self._current.close()
        try:
            await self._transport.ask(calls.close_session(self.id))
        except NotFound:
            self._current = None


class AsyncClient:
    """A Holdfast server."""

    def __init__(
        self,
        url: str = calls.DEFAULT_URL,
        api_key: str | None = None,
        *,
        retries: Retries | None = None,
        timeout: float = 600.0,
    ) -> None:
        """`timeout` is how many seconds the server may stay silent in the middle of an answer."""
        self._transport = AsyncTransport(url, api_key, retries or Retries(), timeout)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def url(self) -> str:
        """The server's address."""
        return self._transport.url

    async def close(self) -> None:
        """Close the connections; sessions stay open at the server."""
        await self._transport.http.aclose()

    async def session(
        self,
        system: str | None = None,
        id: str | None = None,  # noqa: A002
        ttl: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> AsyncSession:
        """Open a conversation; `ttl` is how many seconds it may be idle."""
        call = calls.open_session(id, system, ttl, metadata)
        assert call.body is not None
        await self._transport.ask(call)
        return AsyncSession(self._transport, call.body["id"], system)

    async def resume(self, id: str) -> AsyncSession:  # noqa: A002
        """Go on with a session that is open at the server."""
        view = SessionView.from_body(await self._transport.ask(calls.show_session(id)))
        return AsyncSession(self._transport, view.id)

    async def sessions(self) -> list[SessionView]:
        """All sessions of this key."""
        answer = await self.ask(calls.list_sessions())
        return [SessionView.from_body(body) for body in answer["sessions"]]

    async def memory(self) -> dict[str, Any]:
        """The ledger: units by holder kind, component and tier; the largest holders; findings."""
        return await self.ask(calls.memory())

    async def metrics(self) -> dict[str, float]:
        """The server's figures by name and labels, for those who have the admin key."""
        page = await self._transport.read(calls.metrics())
        return {} if page is None else calls.parse_metrics(page)

    async def models(self) -> list[str]:
        """The names of the models that the server has."""
        return [str(model["id"]) for model in (await self.ask(calls.models()))["data"]]

    async def generate(
        self,
        prompt: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        *,
        model: str | None = None,
        **sampling: Unpack[Sampling],
    ) -> Generated:
        """Complete one or more prompts, texts or lists of token ids, without a session."""
        name = model if model is not None else (await self.models())[0]
        return Generated.from_body(await self.ask(calls.generate(name, prompt, sampling)))

    async def ask(self, call: Call) -> Body:
        """Send any call and return the JSON object that it is answered with."""
        return await self._transport.ask(call)
