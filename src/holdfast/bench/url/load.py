"""Load on a server from outside: many conversations at once, each turn timed as its client feels it.

`run_load` drives any number of conversations through a `Door`: Holdfast's sessions, or the chat interface
that OpenAI-compatible servers share, where every turn sends the whole history again. Turns may be cut short,
by an interruption or by leaving. Nothing here prints; `bench_url` does.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx

from holdfast.client import AsyncClient, AsyncSession, AsyncTurn, Conflict, HoldfastError, Retries, Sampling
from holdfast.client.calls import base_url
from holdfast.client.errors import error_from_response, lost_connection
from holdfast.client.stream import EventDecoder
from holdfast.client.transport import bearer

__all__ = ["ChatDoor", "Door", "Load", "Sample", "SessionsDoor", "percentile", "run_load"]

SYSTEM = "You are a voice on the telephone. Answer at once and go on until you are interrupted."
WORDS = (
    "river", "stone", "light", "garden", "window", "paper", "music", "winter", "bridge", "market", "silver",
    "morning", "letter", "island", "engine", "forest", "harbour", "simple", "yellow", "between", "every",
    "carry", "follow", "answer", "listen", "remember", "travel", "number", "question",
)  # fmt: skip
BUSY_POLL_SECONDS = 0.002


@dataclass(frozen=True, slots=True)
class Load:
    """What to do: conversations at once, turns of each, and how many are cut short.

    What is said is `input_tokens` common words, mostly of one token; an answer has `output_tokens` at most.
    """

    sessions: int = 8
    turns: int = 10
    input_tokens: int = 32
    output_tokens: int = 32
    aborts: float = 0.0
    idle: int = 0
    ignore_eos: bool = True
    seed: int = 1


@dataclass(slots=True)
class Sample:
    """One turn, in seconds since its request was sent; `pieces` are when words arrived."""

    turn: int
    pieces: list[float] = field(default_factory=list)
    total: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cut: bool = False
    error: str | None = None

    @property
    def first(self) -> float | None:
        """When the first words came."""
        return self.pieces[0] if self.pieces else None

    @property
    def between(self) -> float | None:
        """The mean time between two tokens."""
        if self.tokens < 2 or len(self.pieces) < 2:
            return None
        return (self.pieces[-1] - self.pieces[0]) / (self.tokens - 1)


@dataclass(frozen=True, slots=True)
class Ask:
    """One turn that is to be taken; `cut_after` tokens it is cut short, by leaving or by interrupting."""

    words: str
    output_tokens: int
    ignore_eos: bool
    cut_after: int | None
    leave: bool


class Conversation(Protocol):
    """One conversation with a server."""

    async def turn(self, ask: Ask, sample: Sample) -> None:
        """Take a turn and write down how it went; `total` is the caller's."""

    async def close(self) -> None:
        """End it."""


class Door(Protocol):
    """A way to talk to a server."""

    name: str

    async def open(self) -> Conversation:
        """Begin a conversation."""

    async def close(self) -> None:
        """Leave."""


class SessionsDoor:
    """Holdfast's sessions: a turn sends what is new."""

    name = "sessions"

    def __init__(self, url: str, api_key: str | None) -> None:
        self.client = AsyncClient(url, api_key, retries=Retries(attempts=1))

    async def open(self) -> Conversation:
        """Open a session."""
        return _SessionTalk(await self.client.session(SYSTEM))

    async def close(self) -> None:
        """Close the connections."""
        await self.client.close()


class _SessionTalk:
    def __init__(self, session: AsyncSession) -> None:
        self.session = session

    async def turn(self, ask: Ask, sample: Sample) -> None:
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
        """Say it; a server may not have seen yet that this client has left the turn before."""
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
        await self.session.close()


class ChatDoor:
    """OpenAI's chat interface: every turn sends the whole conversation."""

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
        """Begin a history."""
        return _ChatTalk(self)

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


class _ChatTalk:
    def __init__(self, door: ChatDoor) -> None:
        self.door = door
        self.history: list[dict[str, str]] = [{"role": "system", "content": SYSTEM}]

    async def turn(self, ask: Ask, sample: Sample) -> None:
        began = time.perf_counter()
        self.history.append({"role": "user", "content": ask.words})
        body: dict[str, Any] = {
            "model": self.door.model,
            "messages": self.history,
            "max_tokens": ask.output_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if ask.ignore_eos:
            body["ignore_eos"] = True
        said = ""
        events = self.door.events(body)
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
        self.history.clear()


async def run_load(door: Door, load: Load, told: Callable[[Sample], None]) -> tuple[list[Sample], float]:
    """All samples, and how many seconds they took together; `told` hears of each turn as it ends."""
    # Words of its own for each door: what one has said lies in the server's prefix tree.
    chance = random.Random(f"{load.seed} {door.name}")
    plans = [[_ask(load, chance) for _ in range(load.turns)] for _ in range(load.sessions)]
    idle = [await door.open() for _ in range(load.idle)]
    conversations = [await door.open() for _ in range(load.sessions)]
    began = time.perf_counter()
    try:
        lists = await asyncio.gather(
            *(_converse(each, plan, told) for each, plan in zip(conversations, plans, strict=True))
        )
    finally:
        seconds = time.perf_counter() - began
        for conversation in (*conversations, *idle):
            await conversation.close()
    return [sample for samples in lists for sample in samples], seconds


async def _converse(
    conversation: Conversation, asks: list[Ask], told: Callable[[Sample], None]
) -> list[Sample]:
    samples = []
    for number, ask in enumerate(asks):
        sample = Sample(number)
        began = time.perf_counter()
        try:
            await conversation.turn(ask, sample)
        except HoldfastError as error:
            sample.error = f"{type(error).__name__}: {error}"
        sample.total = time.perf_counter() - began
        samples.append(sample)
        told(sample)
    return samples


def _ask(load: Load, chance: random.Random) -> Ask:
    words = " ".join(chance.choice(WORDS) for _ in range(load.input_tokens))
    cut = chance.random() < load.aborts
    after = chance.randint(1, max(1, load.output_tokens // 2)) if cut else None
    return Ask(words, load.output_tokens, load.ignore_eos, after, leave=chance.random() < 0.5)


def percentile(values: list[float], share: float) -> float:
    """The value that a share of all values do not exceed; of the values themselves, not between them."""
    assert values and 0.0 <= share <= 1.0
    ordered = sorted(values)
    return ordered[max(0, math.ceil(round(share * len(ordered), 6)) - 1)]
