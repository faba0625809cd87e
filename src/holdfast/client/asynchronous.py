"""The client for asynchronous code: sessions and turns of a server, call by call.

    async with AsyncClient("http://127.0.0.1:8000") as client:
        async with await client.session(system="You are terse.") as session:
            async for piece in await session.say("Name three rivers."):
                print(piece, end="")

One task can interrupt the turn that another one reads. Calls are sent again by themselves when the connection
fails or the server asks for patience (see `retry`). The same names as in `sync`, to be awaited; the number of
turns is in a session's `view`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Literal, TypeVar, Unpack

from holdfast.client import calls
from holdfast.client.calls import Call
from holdfast.client.dialogue import Dialogue
from holdfast.client.errors import Expired, NotFound
from holdfast.client.realtime import AsyncRealtime
from holdfast.client.retry import Retries
from holdfast.client.transport import AsyncTransport
from holdfast.client.turn import AsyncTurn
from holdfast.client.values import (
    Generated,
    Keep,
    Prompt,
    Said,
    Sampling,
    SessionChange,
    SessionSettings,
    SessionView,
    Tool,
    ToolOutput,
    TurnFields,
)

__all__ = ["AsyncClient", "AsyncSession"]

Answer = TypeVar("Answer")


class AsyncSession:
    """A session: a conversation whose memory stays on the server between turns."""

    def __init__(self, transport: AsyncTransport, session_id: str, system: str | None = None) -> None:
        self._transport = transport
        self.id = session_id
        self.system = system
        self._current: AsyncTurn | None = None
        self._appended = 0

    async def __aenter__(self) -> AsyncSession:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def say(
        self,
        said: Said | None = None,
        *,
        turn_id: str | None = None,
        **fields: Unpack[TurnFields],
    ) -> AsyncTurn:
        """Start a turn: iterate over it for streamed text, or await its `wait()`.

        Without an argument the appended input is used.
        """
        self._appended = 0
        call = calls.start_turn(self.id, said, fields, turn_id)
        self._current = await AsyncTurn(self._transport, call).connect()
        return self._current

    async def append(self, text: str, start: int | None = None) -> int:
        """Say more of the next turn's input, or other text from character `start` on; it is computed ahead.

        Returns how many characters there are. `say` without an argument starts the turn.
        """
        at = self._appended if start is None else start
        self._appended = await self._transport.ask(calls.append_input(self.id, at, text))
        return self._appended

    async def steer(
        self,
        said: Said,
        *,
        keep: Keep = "heard",
        turn_id: str | None = None,
        **fields: Unpack[TurnFields],
    ) -> AsyncTurn:
        """Cut the running turn after the received tokens, and continue with this one, in one call.

        `keep` is as of `interrupt`, without "none".
        """
        current = self._current
        kept = calls.steer_fields(keep, None if current is None else current.tokens_settled)
        call = calls.start_turn(self.id, said, fields, turn_id, kept)
        self._current = await AsyncTurn(self._transport, call).connect()
        if current is not None and "keep_tokens" in kept:
            current.cut(kept)
        return self._current

    async def tool_results(
        self,
        results: Mapping[str, ToolOutput],
        *,
        turn_id: str | None = None,
        **fields: Unpack[TurnFields],
    ) -> AsyncTurn:
        """Start a turn with the results of tool calls, by their ids.

        A result that is not text is sent as JSON.
        """
        return await self.say(calls.tool_messages(results), turn_id=turn_id, **fields)

    async def interrupt(self, keep: Keep = "heard") -> None:
        """Interrupt the turn in flight, or the last one if no other has begun.

        `keep` is the number of tokens to keep, or `"heard"` for those handed out so far without half a tool
        call, `"all"`, or `"none"` (the turn is rolled back).
        """
        current = self._current
        if current is None:
            await self._transport.ask(calls.interrupt_session(self.id, None, calls.keep_fields(keep, None)))
            return
        kept = calls.keep_fields(keep, current.tokens_settled)
        await self._transport.ask(calls.interrupt_session(self.id, current.id, kept))
        current.cut(kept)

    async def compact(self, from_turn: int, to_turn: int, said: str | Sequence[Mapping[str, Any]]) -> int:
        """Replace turns, counted from 1, by a user message or messages; the turns after them stay.

        Returns how many tokens the next turn computes again.
        """
        return await self._transport.ask(calls.compact_session(self.id, from_turn, to_turn, said))

    async def rewind(self, turns: int) -> SessionView:
        """Rewind so that only the first `turns` turns remain."""
        self._current = None
        return await self._transport.ask(calls.rewind_session(self.id, turns))

    async def update(self, **change: Unpack[SessionChange]) -> SessionView:
        """Change how the session is kept; settings that are left out stay. Forks inherit them.

        `ttl`: seconds of idleness after which it is closed, None for the server's default. `pin`: its memory
        stays on the device while that of other idle sessions can leave. `priority`, from -4 to 4: the lowest
        leaves first, and of turns that wait the highest goes first.
        """
        return await self._transport.ask(calls.change_session(self.id, change))

    async def fork(self, at_turn: int | None = None, id: str | None = None) -> AsyncSession:  # noqa: A002
        """Fork the session here, or at the end of an earlier turn; memory is shared."""
        child_id = await self._transport.ask(calls.fork_session(self.id, id, at_turn))
        return AsyncSession(self._transport, child_id, self.system)

    async def spill(self, tier: Literal["host", "disk"] | None = None) -> SessionView:
        """Move the session's memory off the device (default: to the nearest tier with room)."""
        return await self._transport.ask(calls.spill_session(self.id, tier)) or await self.view()

    async def restore(self) -> SessionView:
        """Bring the session's memory back to the device."""
        return await self._transport.ask(calls.restore_session(self.id)) or await self.view()

    async def view(self) -> SessionView:
        """The session as the server describes it now."""
        return await self._transport.ask(calls.show_session(self.id))

    def realtime(self, resume_after: int | None = None) -> AsyncRealtime:
        """A full-duplex WebSocket: input may be sent while the model generates.

        `resume_after` is the number of the last event received, to replay the later ones.
        """
        transport = self._transport
        dialogue = Dialogue(self.id, resume_after)
        return AsyncRealtime(transport.url, transport.headers, dialogue, transport.retries)

    async def close(self) -> None:
        """Close the session and free its memory. Idempotent."""
        if self._current is not None:
            await self._current.close()
            self._current = None
        with suppress(NotFound, Expired):
            await self._transport.ask(calls.close_session(self.id))


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
        """`timeout` is the read timeout in seconds."""
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
        """Close the connections; sessions stay open on the server."""
        await self._transport.http.aclose()

    async def session(
        self,
        system: str | None = None,
        id: str | None = None,  # noqa: A002
        ttl: float | None = None,
        metadata: Mapping[str, str] | None = None,
        tools: Sequence[Tool] | None = None,
        **settings: Unpack[SessionSettings],
    ) -> AsyncSession:
        """Open a session; `ttl` is its idle time limit in seconds, `tools` are in OpenAI's form."""
        session_id = await self.ask(calls.open_session(id, system, ttl, metadata, tools, settings))
        return AsyncSession(self._transport, session_id, system)

    async def resume(self, id: str) -> AsyncSession:  # noqa: A002
        """Attach to a session that is open on the server."""
        view = await self.ask(calls.show_session(id))
        return AsyncSession(self._transport, view.id)

    async def sessions(self) -> list[SessionView]:
        """All sessions of this key."""
        listed, more = await self.ask(calls.list_sessions())
        while more is not None:
            page, more = await self.ask(calls.list_sessions(more))
            listed += page
        return listed

    async def memory(self) -> dict[str, Any]:
        """The ledger: units by holder kind, component and tier; the largest holders; findings."""
        return await self.ask(calls.memory())

    async def metrics(self) -> dict[str, float]:
        """The server's metrics by name and labels; needs the admin key."""
        return await self.ask(calls.metrics())

    async def models(self) -> list[str]:
        """The names of the server's models."""
        return [str(model["id"]) for model in await self.ask(calls.models())]

    async def generate(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        **sampling: Unpack[Sampling],
    ) -> Generated:
        """Complete one or more prompts, texts or lists of token ids, without a session."""
        name = model if model is not None else (await self.models())[0]
        return await self.ask(calls.generate(name, prompt, sampling))

    async def ask(self, call: Call[Answer]) -> Answer:
        """Send any call of `calls` and return its decoded answer."""
        return await self._transport.ask(call)
