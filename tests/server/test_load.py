"""Many sessions at once, with interruptions and clients that go away: every transcript is the one of the
same conversation run alone.

Rounding depends on the shape of a batch, so the models are those whose greedy tokens do not
(tests/engine/test_batch_invariance.py shows it); where two words were closer to each other than rounding
could tell apart, a difference proves nothing, and few conversations may have such a place.
"""

import asyncio
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast.engine.engine import Engine
from holdfast.engine.sampling import Sampling
from tests.models.small import CLEAR_MARGIN, conversation, least_margin, write_small_model
from tests.plain import NO_TLS
from tests.server.conftest import Serve
from tests.server.serving import Server

SAID = 12
"""Tokens of an answer."""

TURN_TOKENS = 80
"""More than a turn adds to a history: with room for all of them, nothing is ever computed twice."""


@dataclass
class Spoken:
    """One turn that stands: what was said to the model, and the tokens that were kept of its answer."""

    words: str
    tokens: list[int]
    cut: bool


@dataclass
class Talk:
    """One client: a conversation, and what became of each of its turns."""

    name: str
    words: list[str]
    chance: random.Random
    stands: list[Spoken] = field(default_factory=list)
    known: int = 0
    errors: list[str] = field(default_factory=list)
    warm: bool = True
    """Whether all that was said is in memory at every turn, so that none of it may be computed again."""

    async def run(self, client: httpx.AsyncClient) -> None:
        await client.post("/v1/sessions", json={"id": self.name})
        for number, words in enumerate(self.words):
            fate = self.chance.random()
            if fate < 0.05:
                await self.leave(client, words)
            else:
                await self.speak(client, words, f"t-{number}", interrupt=fate < 0.10)

    def body(self, words: str) -> dict[str, Any]:
        return {"input": words, "sampling": {"max_tokens": SAID, "temperature": 0}}

    async def speak(self, client: httpx.AsyncClient, words: str, turn: str, interrupt: bool) -> None:
        answer = await client.post(
            f"/v1/sessions/{self.name}/turns", json={**self.body(words), "turn_id": turn}
        )
        if answer.status_code != 200:
            self.errors.append(answer.text)
            return
        result = answer.json()
        cached, cut = result["usage"]["cached_tokens"], bool(self.stands) and self.stands[-1].cut
        if self.warm and cached < self.known and not cut:
            self.errors.append(f"{self.known} tokens were known, {cached} cached")
        tokens = result["token_ids"]
        if interrupt:
            tokens = tokens[: self.chance.randint(0, len(tokens))]
            body = {"turn_id": turn, "keep_tokens": len(tokens)}
            heard = await client.post(f"/v1/sessions/{self.name}/interrupt", json=body)
            if heard.status_code != 200:
                self.errors.append(heard.text)
        self.stands.append(Spoken(words, tokens, interrupt))
        self.known = result["usage"]["prompt_tokens"] + len(tokens)

    async def leave(self, client: httpx.AsyncClient, words: str) -> None:
        """Go away in the middle of an answer: the turn never was."""
        body = {**self.body(words), "stream": True, "sampling": {"max_tokens": 400, "temperature": 0}}
        async with client.stream("POST", f"/v1/sessions/{self.name}/turns", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    break
        for _ in range(2000):
            state = (await client.get(f"/v1/sessions/{self.name}")).json()
            if state["state"] == "IDLE":
                if state["tokens"]["known"] != self.known:
                    self.errors.append(f"{state['tokens']['known']} tokens after a rollback to {self.known}")
                return
            await asyncio.sleep(0.01)
        self.errors.append("a turn without a client did not end")


async def run_all(server: Server, talks: list[Talk]) -> None:
    limits = httpx.Limits(max_connections=len(talks) * 2)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits, verify=NO_TLS) as client:
        await asyncio.gather(*(talk.run(client) for talk in talks))


def same_alone(directory: Path, talk: Talk) -> bool:
    """Whether a conversation run alone says the same; None of it where rounding decides."""
    with Engine(str(directory), kv_tokens=4096, window_tokens=4096, state_slots=16, audit="on") as engine:
        session = engine.session()
        for spoken in talk.stands:
            turn = session.say(spoken.words, Sampling(max_tokens=SAID, temperature=0, logprobs=2))
            expected = turn.token_ids[: len(spoken.tokens)]
            if expected != spoken.tokens:
                assert least_margin(turn) < CLEAR_MARGIN, (talk.name, spoken, expected)
                return False
            if spoken.cut:
                session.interrupt(keep=len(spoken.tokens))
    return True


def options_for(sessions: int, turns: int) -> tuple[str, ...]:
    """Room for every history of so many sessions, counted strictly."""
    tokens = str(max(24_576, sessions * turns * TURN_TOKENS))
    sizes = ("--kv-tokens", tokens, "--window-tokens", tokens, "--state-slots", "512")
    return ("--audit", "strict", "--max-running", "64", *sizes)


def load(serve: Serve, directory: Path, sessions: int, turns: int, *options: str) -> None:
    server = serve(directory, *options_for(sessions, turns), *options)
    talks = [
        Talk(f"s-{number}", conversation(number, turns, words=6), random.Random(number))
        for number in range(sessions)
    ]
    asyncio.run(run_all(server, talks))
    check(server, directory, talks)


def check(server: Server, directory: Path, talks: list[Talk]) -> None:
    """Nobody heard of an error, everybody what they hear alone, and nothing is held or was found."""
    assert [error for talk in talks for error in talk.errors] == []
    assert any(spoken.cut for talk in talks for spoken in talk.stands)
    same = [same_alone(directory, talk) for talk in talks]
    assert sum(same) >= 0.9 * len(same)
    assert json.loads(server.get("/v1/memory").text)["findings"] == []
    server.check_clean()


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.soak), "bamba"])
def test_sessions_under_load_say_what_they_say_alone(serve: Serve, tmp_path: Path, family: str) -> None:
    load(serve, write_small_model(tmp_path / family, family), 12, 5)


@pytest.mark.soak
@pytest.mark.parametrize("family", ["llama", "mistral", "bamba"])
@pytest.mark.parametrize("overlap", ["--overlap", "--no-overlap"])
def test_64_sessions_of_20_turns(serve: Serve, tmp_path: Path, family: str, overlap: str) -> None:
    load(serve, write_small_model(tmp_path / family, family), 64, 20, overlap)
