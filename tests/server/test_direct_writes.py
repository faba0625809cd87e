"""Output that is written where it is received: writes, callbacks and bytes are counted, no time is measured.

The feeds, the forms and the answers are real; the connection is the test's own, so that it can be slow.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import h11
import pytest

from holdfast.engine.echo import echo_tokenizer
from holdfast.server.http.answers import FeedAnswer, TurnForm, event
from holdfast.server.http.body_writer import EXTENSION, BodyWriter, offer_writer, writer_of
from holdfast.server.http.problems import Problem
from holdfast.server.link import wire
from holdfast.server.link.turn_feed import TurnFeed
from holdfast.server.routes.openai import ChunkForm
from holdfast.server.routes.openai_format import Chat
from holdfast.server.routes.session_format import TurnEvents, TurnStreamForm

STREAMS, WORDS = 16, 40
ODD = 'a "quoted" \\ line\n and \u2028 é 🙂 <\0>'


class Connection:
    """What the writer and uvicorn know of a connection; a paused one is drained when the test says."""

    def __init__(self) -> None:
        self.response_started = self.response_complete = self.disconnected = False
        self.flow = self
        self.write_paused = False
        self.transport = self
        self.written: list[bytes] = []
        self.direct = 0
        self.resumed = asyncio.Event()

    def write(self, content: bytes) -> None:
        """A chunk of the writer."""
        self.direct += 1
        self.written.append(content)

    async def send(self, message: dict[str, Any]) -> None:
        """An ASGI message, framed as h11 does it."""
        while self.write_paused:
            self.resumed.clear()
            await self.resumed.wait()
        if message["type"] == "http.response.start":
            self.response_started = True
            return
        body = message["body"]
        if body:
            self.written.append(b"%x\r\n%b\r\n" % (len(body), body))
        self.response_complete = not message["more_body"]

    async def receive(self) -> dict[str, object]:
        await asyncio.Event().wait()
        raise AssertionError

    def pause(self, paused: bool) -> None:
        self.write_paused = paused
        self.resumed.set()

    def body(self) -> bytes:
        """The body as a client reads it."""
        client = h11.Connection(h11.CLIENT)
        client.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
        client.send(h11.EndOfMessage())
        client.receive_data(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        client.receive_data(b"".join(self.written) + b"0\r\n\r\n")
        said = b""
        while not isinstance(heard := client.next_event(), h11.EndOfMessage):
            said += bytes(heard.data) if isinstance(heard, h11.Data) else b""
        return said


class Stream:
    """One turn that is streamed to its connection."""

    def __init__(self, number: int, make: Callable[[list[TurnFeed]], TurnForm]) -> None:
        command = wire.StartTurn(number, f"t-{number}", "ann", [1], wire.SamplingFields(), session="ann/s")
        self.feed = TurnFeed(command, lambda _: None)
        self.connection = Connection()
        self.left = 0
        answer = FeedAnswer([self.feed], make([self.feed]), self.leave, lambda problem: event(problem.body()))
        cycle: Any = self.connection
        scope = {"type": "http", "extensions": {EXTENSION: BodyWriter(cycle)}}
        self.answering = asyncio.ensure_future(answer(scope, cycle.receive, cycle.send))  # type: ignore[arg-type]

    def leave(self) -> None:
        self.left += 1

    def say(self, index: int, text: str) -> None:
        self.feed.push(wire.Delta(self.feed.call, index, text, [index], prompt=None if index else (1, 0)))

    def end(self) -> None:
        self.feed.finish(wire.End(self.feed.call, "finished", "stop", "", [], 1, 0, 1, 0.0, 0.0, 0.0))


def sessions_form(feeds: list[TurnFeed]) -> TurnForm:
    return TurnStreamForm(feeds[0])


def chat_form(feeds: list[TurnFeed]) -> TurnForm:
    return ChunkForm(feeds, Chat("c-1", "echo", "f", echo_tokenizer()), usage=True, choices=1)


FORMS = pytest.mark.parametrize("make", [sessions_form, chat_form], ids=["sessions", "chat"])


async def begun(stream: Stream) -> None:
    """Wait until the answer has begun, and its reader waits for news."""
    while stream.feed._pen is None:
        await asyncio.sleep(0)
    await asyncio.sleep(0)


def texts(body: bytes) -> list[str]:
    """The pieces of text of a body, in either form."""
    found = []
    for line in body.split(b"\n"):
        if line.startswith(b"data: {"):
            shown = json.loads(line[6:])
            choices = shown.get("choices") or []
            if "token_ids" in shown and "index" in shown:
                found.append(shown["text"])
            elif choices and choices[0]["finish_reason"] is None and "role" not in choices[0]["delta"]:
                found.append(choices[0]["delta"]["content"])
    return found


@FORMS
def test_a_token_is_one_write_and_wakes_nobody(
    make: Callable[[list[TurnFeed]], TurnForm], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        streams = [Stream(number, make) for number in range(STREAMS)]
        for stream in streams:
            await begun(stream)
        before = [len(stream.connection.written) for stream in streams]
        loop, scheduled = asyncio.get_running_loop(), list[object]()
        with monkeypatch.context() as patched:
            soon = loop.call_soon
            patched.setattr(loop, "call_soon", lambda *a, **k: (scheduled.append(a), soon(*a, **k))[1])
            for index in range(WORDS):
                for stream in streams:
                    stream.say(index, f"word{index} ")
        assert not scheduled, "no task, future or callback runs for a token"
        for stream, count in zip(streams, before, strict=True):
            assert len(stream.connection.written) - count == stream.connection.direct == WORDS
            stream.end()
            await stream.answering
            assert texts(stream.connection.body()) == [f"word{index} " for index in range(WORDS)]
            assert stream.connection.response_complete and not stream.left

    asyncio.run(main())


@FORMS
def test_what_a_slow_client_does_not_read_is_joined_and_nothing_overtakes_it(
    make: Callable[[list[TurnFeed]], TurnForm],
) -> None:
    async def main() -> None:
        stream = Stream(1, make)
        await begun(stream)
        stream.say(0, "0 ")
        stream.connection.pause(True)
        for index in range(1, WORDS):
            stream.say(index, f"{index} ")
            await asyncio.sleep(0)
        assert stream.connection.direct == 1
        stream.connection.pause(False)
        stream.say(WORDS, f"{WORDS} ")  # The reader has not written what waits: this waits behind it.
        for _ in range(5):
            await asyncio.sleep(0)
        stream.say(WORDS + 1, f"{WORDS + 1} ")
        assert stream.connection.direct == 2, "and then goes on directly"
        stream.end()
        await stream.answering
        said = texts(stream.connection.body())
        assert "".join(said) == "".join(f"{index} " for index in range(WORDS + 2))
        assert len(said) <= 5, "joined"

    asyncio.run(main())


def test_a_form_that_fails_fails_its_own_request_and_not_the_link() -> None:
    class Failing(TurnStreamForm):
        def delta(self, _place: int, _delta: wire.Delta) -> bytes:
            raise ValueError("wrong")

    async def main() -> None:
        stream = Stream(1, lambda feeds: Failing(feeds[0]))
        await begun(stream)
        stream.say(0, "x")
        with pytest.raises(ValueError, match="wrong"):
            await stream.answering
        assert stream.left == 1
        stream.say(1, "y")
        assert stream.connection.direct == 0

    asyncio.run(main())


def test_nothing_is_written_after_a_problem_has_ended_the_answer() -> None:
    async def main() -> None:
        stream = Stream(1, sessions_form)
        await begun(stream)
        stream.say(0, "x")
        stream.feed.lose(Problem(503, "engine_lost", "lost"))
        await stream.answering
        count = len(stream.connection.written)
        stream.connection.response_complete = False
        stream.say(1, "y")
        assert len(stream.connection.written) == count and stream.left == 1
        assert b"engine_lost" in stream.connection.body()

    asyncio.run(main())


def test_plain_text_is_put_together_as_it_would_be_encoded() -> None:
    async def main() -> None:
        command = wire.StartTurn(3, 't-"3"', "ann", [1], wire.SamplingFields())
        feed = TurnFeed(command, lambda _: None)
        session, chat = TurnStreamForm(feed), chat_form([feed])
        plain = Chat("c-1", "echo", "f", echo_tokenizer())
        for index, text in enumerate(("first", ODD, "")):
            delta = wire.Delta(3, index, text, [7, index])
            ((kind, shown),) = TurnEvents(feed.name).of(delta)
            assert session.delta(0, delta) == event(shown, kind)
            expected = [json.loads(event(chunk)[6:]) for chunk in plain.chunks(0, delta)]
            found = chat.delta(0, delta)
            made = [json.loads(found[6:])] if found else []
            for chunk in (*expected, *made):
                chunk["created"] = 0
            assert made == expected

    asyncio.run(main())


def test_a_body_is_written_directly_only_where_it_is_chunked() -> None:
    """HTTP/1.0 has no chunks: such answers go through the ASGI server."""
    for version, offered in ((b"1.1", True), (b"1.0", False)):
        cycle: Any = Cycle(version)
        offer_writer(cycle)
        assert (writer_of(cycle.scope) is not None) == offered
    assert writer_of({"type": "http"}) is None


class Cycle:
    """A request whose answer has not begun."""

    def __init__(self, version: bytes) -> None:
        self.scope: dict[str, Any] = {"type": "http"}
        self.conn = self
        self.their_http_version = version
