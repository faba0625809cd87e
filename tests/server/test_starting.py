"""Several turns of one request: all are sent before the first answer, and all begin or none does."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from holdfast.engine.sampling import Sampling
from holdfast.server.http.problems import Problem
from holdfast.server.link import wire
from holdfast.server.link.engine_client import TurnFeed
from holdfast.server.routes.sglang_body import GENERATE_BODY
from holdfast.server.routes.sglang_call import Call
from holdfast.server.routes.sglang_sessions import Native
from holdfast.server.turn_request import Input, TurnAsked
from tests.server.standing_in import ANN, EchoEngine

PROMPTS, CHOICES = 3, 4


def with_echo(story: Callable[[EchoEngine], Awaitable[None]]) -> None:
    async def run() -> None:
        engine = EchoEngine()
        try:
            await story(engine)
        finally:
            engine.service.close()

    asyncio.run(run())


def asked() -> list[TurnAsked]:
    sampling = Sampling(n=CHOICES, max_tokens=5)
    return [TurnAsked(Input(text=f"prompt {number}"), sampling, f"r-{number}") for number in range(PROMPTS)]


async def all_asked(engine: EchoEngine, count: int, task: "asyncio.Task[Any]") -> list[wire.StartTurn]:
    """Wait until so many turns were sent, while the engine answers none of them."""
    async with asyncio.timeout(60):
        while len(engine.started()) < count and not task.done():
            await asyncio.sleep(0.001)
    return engine.started()


def test_all_turns_of_a_request_are_sent_before_the_first_is_answered() -> None:
    async def story(engine: EchoEngine) -> None:
        task = asyncio.create_task(engine.service.start_requests(ANN, asked()))
        sent = await all_asked(engine, PROMPTS * CHOICES, task)
        assert [command.name for command in sent] == [
            f"ann#r-{number}{f'.{choice}' if choice else ''}"
            for number in range(PROMPTS)
            for choice in range(CHOICES)
        ]
        engine.says(*(wire.Done(command.call) for command in sent))
        feeds: list[TurnFeed] = await task
        assert [feed.call for feed in feeds] == [command.call for command in sent]

    with_echo(story)


def test_all_prompts_of_a_native_call_are_sent_before_the_first_is_answered() -> None:
    async def story(engine: EchoEngine) -> None:
        body = {"text": [f"prompt {n}" for n in range(PROMPTS)], "sampling_params": {"n": CHOICES}}
        call = Call(Native(engine.service), ANN, msgspec.convert(body, GENERATE_BODY.read))
        task = asyncio.create_task(call.start())
        sent = await all_asked(engine, PROMPTS * CHOICES, task)
        assert len(sent) == PROMPTS * CHOICES
        engine.says(*(wire.Done(command.call) for command in sent))
        await task
        assert len(call.choices) == PROMPTS * CHOICES

    with_echo(story)


def test_turns_are_ended_where_one_of_them_is_declined() -> None:
    async def story(engine: EchoEngine) -> None:
        task = asyncio.create_task(engine.service.start_requests(ANN, asked()))
        sent = await all_asked(engine, PROMPTS * CHOICES, task)
        declined = (2, 7)
        for place, command in enumerate(sent):
            if place in declined:
                engine.says(wire.Declined(command.call, "queue_full", f"{place} turns are waiting"))
            else:
                engine.says(wire.Done(command.call))
        with pytest.raises(Problem, match="2 turns are waiting"):
            await task
        assert engine.ended() == [command.call for place, command in enumerate(sent) if place not in declined]
        # They end as any other turn does, and nothing stays behind.
        assert engine.link.turns == len(sent) - len(declined)
        engine.link.lose()
        assert engine.link.turns == 0

    with_echo(story)


@pytest.mark.parametrize("answered", [0, 5])
def test_turns_are_ended_whose_client_leaves_before_they_are_accepted(answered: int) -> None:
    async def story(engine: EchoEngine) -> None:
        task = asyncio.create_task(engine.service.start_requests(ANN, asked()))
        sent = await all_asked(engine, PROMPTS * CHOICES, task)
        engine.says(*(wire.Done(command.call) for command in sent[:answered]))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.ended() == [command.call for command in sent]
        assert engine.link.turns == answered, "those that the engine will tell the end of"
        engine.says(*(wire.Done(command.call) for command in sent[answered:]))

    with_echo(story)


def test_nothing_waits_for_an_engine_that_is_lost_while_turns_are_sent() -> None:
    async def story(engine: EchoEngine) -> None:
        task = asyncio.create_task(engine.service.start_requests(ANN, asked()))
        await all_asked(engine, PROMPTS * CHOICES, task)
        engine.link.lose()
        with pytest.raises(Problem) as lost:
            await task
        assert lost.value.code == "engine_lost" and engine.ended() == [] and engine.link.turns == 0

    with_echo(story)


def test_a_request_that_begins_no_turn_gives_all_its_seeds_back() -> None:
    async def story(engine: EchoEngine) -> None:
        seeds = []
        for _ in range(2):
            task = asyncio.create_task(engine.service.start_requests(ANN, asked()))
            before = len(engine.started())
            sent = (await all_asked(engine, before + PROMPTS * CHOICES, task))[before:]
            seeds.append([command.sampling.seed for command in sent])
            engine.says(*(wire.Declined(command.call, "queue_full", "full") for command in sent))
            with pytest.raises(Problem):
                await task
        assert seeds[0] == seeds[1] and len(set(seeds[0])) == PROMPTS

    with_echo(story)
