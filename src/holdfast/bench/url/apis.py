"""The two ways to converse with a server: Holdfast's sessions, and OpenAI's chat interface."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

import httpx

from holdfast.bench.url.load import Ask, Conversation, Sample
from holdfast.client import AsyncClient, AsyncSession, AsyncTurn, Conflict, Retries, Sampling
from holdfast.client.calls import base_url
from holdfast.client.errors import error_from_response, lost_connection
from holdfast.client.stream import EventDecoder
from holdfast.client.transport import bearer

__all__ = ["ChatApi", "ChatConversation", "SessionConversation", "SessionsApi"]

SYSTEM = "You are a voice on the telephone. Answer at once and go on until you are interrupted."
BUSY_POLL_SECONDS = 0.002


class SessionsApi:
    """Holdfast's sessions: a turn sends its new input alone."""

    name = "sessions"

    def __init__(self, url: str, api_key: str | None) -> None:
        self.client = AsyncClient(url, api_key, retries=Retries(attempts=1))

    async def open(self) -> Conversation:
        """Open a session."""
        return SessionConversation(await self.client.session(SYSTEM))

    async def close(self) -> None:
        """Close the connections."""
        await self.client.close()


class SessionConversation:
    """A session."""

    def __init__(self, session: AsyncSession) -> None:
        self.session = session

    async def fork(self) -> SessionConversation:
        """A conversation that goes on from here."""
        return SessionConversation(await self.session.fork())

    async def turn(self, ask: Ask, sample: Sample) -> None:
        """Run a turn and fill in the sample, except for `total`."""
        began = time.perf_counter()
        turn = await self._begin(ask)
        async with turn:
            async for _ in turn:
                sample.pieces.append(time.perf_counter() - began)
                if ask.cut_after is not None and turn.tokens_shown >= ask.cut_after and not sample.cut:
                    sample.cut = True
                    sample.tokens = turn.tokens_shown
                    if ask.leave:
                        return
                    await self.session.interrupt()
        sample.tokens = turn.usage.completion_tokens
        sample.prompt_tokens = turn.usage.prompt_tokens
        sample.cached_tokens = turn.usage.cached_tokens

    async def _begin(self, ask: Ask) -> AsyncTurn:
        """Start a turn; retries while the server has not noticed that the last turn was aborted."""
        sampling: Sampling = {
            "max_tokens": ask.output_tokens,
            "temperature": 0.0,
            "ignore_eos": ask.ignore_eos,
        }
        while True:
            try:
                return await self.session.say(ask.words, on_abort="keep", **sampling)
            except Conflict as conflict:
                if conflict.code != "session_busy":
                    raise
                await asyncio.sleep(BUSY_POLL_SECONDS)

    async def close(self) -> None:
        """Close the session."""
        await self.session.close()


class ChatApi:
    """OpenAI's chat interface: every turn sends the whole history."""

    name = "chat"

    def __init__(self, url: str, api_key: str | None, model: str) -> None:
        self.url = base_url(url)
        self.model = model
        self.http = httpx.AsyncClient(
            base_url=self.url,
            headers=bearer(api_key),
            timeout=httpx.Timeout(600.0, pool=None),
            limits=httpx.Limits(max_connections=None),
        )

    async def open(self) -> Conversation:
        """Start an empty history."""
        return ChatConversation(self)

    async def close(self) -> None:
        """Close the connections."""
        await self.http.aclose()

    async def events(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of a streamed answer."""
        decoder = EventDecoder()
        try:
            async with self.http.stream("POST", "/v1/chat/completions", json=body) as response:
                if not response.is_success:
                    raise error_from_response(response.status_code, await response.aread(), response.headers)
                async for chunk in response.aiter_bytes():
                    for event in decoder.feed(chunk):
                        if event.text != "[DONE]":
                            yield event.body()
        except httpx.TransportError as error:
            raise lost_connection(self.url, error) from error


class ChatConversation:
    """A history that the client keeps."""

    def __init__(self, api: ChatApi, system: str = SYSTEM) -> None:
        self.api = api
        self.history: list[dict[str, str]] = [{"role": "system", "content": system}]

    async def fork(self) -> ChatConversation:
        """A conversation that goes on from here."""
        forked = ChatConversation(self.api)
        forked.history = list(self.history)
        return forked

    async def turn(self, ask: Ask, sample: Sample) -> None:
        """Run a turn and fill in the sample, except for `total`."""
        began = time.perf_counter()
        self.history.append({"role": "user", "content": ask.words})
        body: dict[str, Any] = {
            "model": self.api.model,
            "messages": self.history,
            "max_tokens": ask.output_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if ask.ignore_eos:
            body["ignore_eos"] = True
        said = ""
        events = self.api.events(body)
        try:
            async for event in events:
                usage = event.get("usage")
                if usage:
                    sample.tokens = usage["completion_tokens"]
                    sample.prompt_tokens = usage["prompt_tokens"]
                    details = usage.get("prompt_tokens_details") or {}
                    sample.cached_tokens = details.get("cached_tokens") or 0
                text = "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))
                if text:
                    said += text
                    sample.pieces.append(time.perf_counter() - began)
                if ask.cut_after is not None and len(sample.pieces) >= ask.cut_after:
                    sample.cut = True
                    sample.tokens = len(sample.pieces)
                    break
        finally:
            await events.aclose()
            self.history.append({"role": "assistant", "content": said or "…"})

    async def close(self) -> None:
        """Forget the history."""
        self.history.clear()
