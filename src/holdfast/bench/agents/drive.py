"""Runs a load of agents against a server, through its sessions or through OpenAI's chat interface.

Through sessions a turn sends what is new and a sub-agent is a fork; through the chat interface every turn
sends the whole history, and a sub-agent begins with a copy of it. The prefix hit rate is the share of all
prompt tokens that the server had in memory, by its own count. `inside` runs the same load on an engine in
process.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from holdfast.bench.agents.workload import Agent, AgentLoad, Step, plan, system_prompt, words_of
from holdfast.bench.url.apis import ChatApi, ChatConversation, SessionConversation, SessionsApi
from holdfast.bench.url.load import Ask, Sample, percentile
from holdfast.client import HoldfastError

__all__ = ["AgentApi", "Figure", "Talk", "Told", "figures_of", "measure", "run_agents", "summarise"]

Figure = dict[str, Any]
Told = Callable[[Sample], None]

SHARES = {"p50": 0.50, "p90": 0.90, "p99": 0.99}


class Talk(Protocol):
    """A conversation that can be forked."""

    async def turn(self, ask: Ask, sample: Sample) -> None: ...

    async def fork(self) -> Talk: ...

    async def close(self) -> None: ...


class AgentApi(Protocol):
    """A way to converse with a model.

    `bare`: the model has no chat template, so what would be the system prompt begins the first input.
    """

    name: str
    bare: bool

    async def open(self, system: str | None) -> Talk: ...

    async def close(self) -> None: ...


async def run_agents(api: AgentApi, load: AgentLoad, told: Told) -> tuple[list[Sample], float]:
    """Run all agents at once; returns the turns and the seconds of the whole load."""
    system = f"{api.name} {system_prompt(load)}"  # The other interface's prefix is no help.
    began = time.perf_counter()
    lists = await asyncio.gather(*(_run(api, agent, system, told) for agent in plan(load)))
    return [sample for samples in lists for sample in samples], time.perf_counter() - began


async def _run(api: AgentApi, agent: Agent, system: str, told: Told) -> list[Sample]:
    chance = random.Random(f"{agent.seed} words {api.name}")
    talk = await api.open(None if api.bare else system)
    try:
        return await _steps(talk, agent.steps, chance, told, begin=f"{system} " if api.bare else "")
    finally:
        await talk.close()


async def _steps(
    talk: Talk, steps: Sequence[Step], chance: random.Random, told: Told, known: int = 0, begin: str = ""
) -> list[Sample]:
    """Run the steps; the conversation has `known` tokens before them, and the first input has `begin`."""
    samples: list[Sample] = []
    for number, step in enumerate(steps):
        if step.fork:
            child = await talk.fork()
            try:
                samples += await _steps(child, step.fork, chance, told, known)
            finally:
                await child.close()
        await asyncio.sleep(step.pause)
        sample = await _turn(talk, number, step, begin + words_of(chance, step.words))
        begin = ""
        sample.known_tokens = known
        if sample.error is None:
            known = sample.prompt_tokens + sample.tokens
        samples.append(sample)
        told(sample)
    return samples


async def _turn(talk: Talk, number: int, step: Step, words: str) -> Sample:
    sample = Sample(number)
    ask = Ask(words, step.wanted, ignore_eos=True, cut_after=None, leave=False)
    began = time.perf_counter()
    try:
        await talk.turn(ask, sample)
    except HoldfastError as error:
        sample.error = f"{type(error).__name__}: {error}"
    sample.total = time.perf_counter() - began
    return sample


class ChatAgents:
    """Agents on OpenAI's chat interface."""

    name = "chat"
    bare = False

    def __init__(self, url: str, api_key: str | None, model: str) -> None:
        self._api = ChatApi(url, api_key, model)

    async def open(self, system: str | None) -> Talk:
        """Begin a history."""
        assert system is not None, "a chat needs a chat template"
        return ChatConversation(self._api, system)

    async def close(self) -> None:
        """Close the connections."""
        await self._api.close()


class SessionAgents:
    """Agents on Holdfast's sessions."""

    name = "sessions"

    def __init__(self, url: str, api_key: str | None, bare: bool) -> None:
        self._api = SessionsApi(url, api_key)
        self.bare = bare

    async def open(self, system: str | None) -> Talk:
        """Open a session."""
        return SessionConversation(await self._api.client.session(system))

    async def close(self) -> None:
        """Close the connections."""
        await self._api.close()


def measure(
    url: str,
    name: str,
    model: str,
    api_key: str | None,
    load: AgentLoad,
    told: Told,
    bare: bool = False,
) -> list[Figure]:
    """Run a load through one interface and return its figures; `bare`: the model has no chat template."""

    async def run() -> tuple[list[Sample], float]:
        chat = name == "chat"
        api: AgentApi = ChatAgents(url, api_key, model) if chat else SessionAgents(url, api_key, bare)
        try:
            return await run_agents(api, load, told)
        finally:
            await api.close()

    samples, seconds = asyncio.run(run())
    return figures_of(samples, seconds, load, model, name)


def figures_of(
    samples: Sequence[Sample], seconds: float, load: AgentLoad, model: str, system: str
) -> list[Figure]:
    """The figures of the turns, with the load that they are of."""
    common = {**asdict(load), "model": model, "system": system}
    return [{**each, **common} for each in summarise(samples, seconds)]


def summarise(samples: Sequence[Sample], seconds: float) -> Iterator[Figure]:
    """The figures of the turns: hit rate, computed tokens, first tokens, rates, failed turns.

    `computed_again` are tokens of the history, prompts and answers, that a later turn did not find in memory.
    """
    good = [sample for sample in samples if sample.error is None]
    prompt = sum(sample.prompt_tokens for sample in good)
    cached = sum(sample.cached_tokens for sample in good)
    yield {"name": "prefix_hits", "value": round(cached / max(1, prompt), 4), "unit": "share"}
    yield {"name": "prompt_tokens", "value": prompt, "unit": "tokens"}
    yield {"name": "computed_prompt", "value": prompt - cached, "unit": "tokens"}
    again = sum(max(0, sample.known_tokens - sample.cached_tokens) for sample in good)
    yield {"name": "computed_again", "value": again, "unit": "tokens"}
    firsts = [sample.first for sample in good if sample.first is not None]
    if firsts:
        shares = {key: round(percentile(firsts, share) * 1e3, 1) for key, share in SHARES.items()}
        yield {"name": "ttft", "value": shares["p50"], "unit": "ms", **shares}
    written = sum(sample.tokens for sample in good)
    yield {"name": "output", "value": round(written / seconds, 2), "unit": "tokens/s"}
    yield {"name": "computed", "value": round((prompt - cached) / seconds, 1), "unit": "prompt tokens/s"}
    yield {"name": "turns", "value": round(len(good) / seconds, 3), "unit": "turns/s"}
    yield {"name": "errors", "value": len(samples) - len(good), "unit": "turns"}
