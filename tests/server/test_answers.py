"""Answers that watch their client, without a server: when they leave its turn, and how soon."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from starlette.responses import Response

from holdfast.server.http.answers import StreamAnswer, TurnAnswer, json_answer
from holdfast.server.http.problems import Problem


class Client:
    """One connection: what was sent on it, and how often its turn was left."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.sent: list[bytes] = []
        self.left = 0

    async def receive(self) -> dict[str, object]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, object]) -> None:
        body = message.get("body")
        if isinstance(body, bytes) and body:
            self.sent.append(body)

    def leave(self) -> None:
        self.left += 1


def shown(problem: Problem) -> bytes:
    return problem.code.encode()


async def endless() -> AsyncIterator[bytes]:
    yield b"one"
    await asyncio.Event().wait()


def test_a_turn_is_left_in_the_pass_of_the_loop_that_hears_of_it() -> None:
    async def main() -> None:
        client = Client()
        answer = StreamAnswer(lambda _writer: endless(), client.leave, shown)
        answering = asyncio.ensure_future(answer({"type": "http"}, client.receive, client.send))
        while not client.sent:
            await asyncio.sleep(0)
        client.gone.set()
        await asyncio.sleep(0)
        assert client.left == 1, "before anything that is read after it"
        await answering
        assert client.left == 1 and client.sent == [b"one"]

    asyncio.run(main())


def test_a_turn_that_was_answered_is_not_left() -> None:
    async def main() -> None:
        client = Client()

        async def result() -> Response:
            return json_answer({"text": "hello"})

        await TurnAnswer(result(), client.leave)({"type": "http"}, client.receive, client.send)
        client.gone.set()
        await asyncio.sleep(0)
        assert client.left == 0 and client.sent == [b'{"text":"hello"}']

    asyncio.run(main())


def test_a_problem_on_the_way_leaves_the_turn_and_is_raised() -> None:
    async def main() -> None:
        client = Client()

        async def result() -> Response:
            raise Problem(503, "engine_lost", "the engine is gone")

        with pytest.raises(Problem):
            await TurnAnswer(result(), client.leave)({"type": "http"}, client.receive, client.send)
        assert client.left == 1

    asyncio.run(main())


def test_a_problem_in_a_stream_leaves_the_turns_that_go_on_and_is_told() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b"one"
        raise Problem(500, "numeric_error", "one of several choices failed")

    async def main() -> None:
        client = Client()
        await StreamAnswer(lambda _writer: chunks(), client.leave, shown)(
            {"type": "http"}, client.receive, client.send
        )
        assert client.left == 1 and client.sent == [b"one", b"numeric_error"]

    asyncio.run(main())
