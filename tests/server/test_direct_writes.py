"""Output that is written where it is received: writes, callbacks and bytes are counted, no time is measured.

The feeds, the forms and the answers are real; the connection is the test's own, so that it can be slow.
"""

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import h11
import msgspec
import pytest
from websockets.client import ClientProtocol
from websockets.frames import Frame
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.uri import parse_uri

from holdfast.engine.echo import echo_tokenizer
from holdfast.server.http.answers import FeedAnswer, KeepAlive, StreamAnswer, TurnForm, event
from holdfast.server.http.body_writer import EXTENSION, BodyWriter, FrameWriter, offer_writer, writer_of
from holdfast.server.http.keys import Caller
from holdfast.server.http.problems import Problem
from holdfast.server.link import wire
from holdfast.server.link.turn_feed import TurnFeed
from holdfast.server.responses.events import ResponseEvents
from holdfast.server.responses.form import Note, Shown
from holdfast.server.responses.ids import Place
from holdfast.server.responses.running import Running
from holdfast.server.routes.messages_format import Answer, MessageStream
from holdfast.server.routes.openai import ChunkForm
from holdfast.server.routes.openai_format import Chat
from holdfast.server.routes.realtime_outbox import Outbox
from holdfast.server.routes.responses import ResponseForm, event_pieces
from holdfast.server.routes.responses_socket import LaneSink, framed
from holdfast.server.routes.session_format import TurnEvents, TurnStreamForm
from holdfast.server.routes.sglang_body import GENERATE_BODY
from holdfast.server.routes.sglang_call import Call
from holdfast.server.routes.sglang_format import Said
from holdfast.server.routes.sglang_sessions import Choice

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

    def __init__(
        self,
        number: int,
        make: Callable[[list[TurnFeed]], TurnForm],
        keep_alive: KeepAlive | None = None,
        *,
        direct: bool = True,
    ) -> None:
        command = wire.StartTurn(number, f"t-{number}", "ann", [1], wire.SamplingFields(), session="ann/s")
        self.feed = TurnFeed(command, lambda _: None)
        self.connection = Connection()
        self.left = 0
        form = make([self.feed])
        answer = FeedAnswer([self.feed], form, self.leave, lambda problem: event(problem.body()), keep_alive)
        cycle: Any = self.connection
        scope = {"type": "http", "extensions": {EXTENSION: BodyWriter(cycle)} if direct else {}}
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


def messages_form(_feeds: list[TurnFeed]) -> TurnForm:
    return MessageStream(Answer("m-1", "echo", max_tokens=WORDS, stop=lambda _tokens: None))


def response() -> Shown:
    return Shown("resp_1", Note(0.0, {}, []), {})


def responses_form(_feeds: list[TurnFeed]) -> TurnForm:
    return ResponseForm(ResponseEvents(response(), lambda _logprobs: []))


def generate_form(feeds: list[TurnFeed]) -> TurnForm:
    return generate_call(feeds, {"text": "x"})


def generate_call(feeds: list[TurnFeed], fields: dict[str, Any]) -> Call:
    """A call of `/generate` whose answers were started."""
    native: Any = SimpleNamespace(service=None, leave=lambda _tenant, _choice: None)
    body = msgspec.convert(fields, GENERATE_BODY.read)
    call = Call(native, Caller("ann", admin=False), body)
    for asked, feed in zip(call.asked * len(feeds), feeds, strict=False):
        call.choices.append(Choice(Said(f"r-{feed.call}", asked, [1], echo_tokenizer(), []), feed))
    return call


FORMS = pytest.mark.parametrize(
    "make",
    [sessions_form, chat_form, messages_form, responses_form, generate_form],
    ids=["sessions", "chat", "messages", "responses", "generate"],
)


async def begun(stream: Stream) -> None:
    """Wait until the answer has begun, and its reader waits for news."""
    while stream.feed._pen is None:
        await asyncio.sleep(0)
    await asyncio.sleep(0)


def texts(body: bytes) -> list[str]:
    """The pieces of text of a body, in any form."""
    found: list[str] = []
    for line in body.split(b"\n"):
        if line.startswith(b"data: {"):
            found += pieces_of(json.loads(line[6:]), "".join(found))
    return found


def pieces_of(shown: dict[str, Any], before: str) -> list[str]:
    """The text that an event adds to what came before it."""
    choices = shown.get("choices") or []
    if "token_ids" in shown and "index" in shown:
        return [shown["text"]]
    if choices and choices[0]["finish_reason"] is None and "role" not in choices[0]["delta"]:
        return [choices[0]["delta"]["content"]]
    if shown.get("type") == "content_block_delta":
        return [shown["delta"]["text"]]
    if shown.get("type") == "response.output_text.delta":
        return [shown["delta"]]
    if "meta_info" in shown and shown["meta_info"]["finish_reason"] is None:
        return [shown["text"].removeprefix(before)]
    return []


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


def test_a_token_of_a_stored_response_is_one_write_to_each_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        running, connections = stored(), [Connection() for _ in range(3)]
        running_task = asyncio.ensure_future(running.run(True, stands))
        answers = [asyncio.ensure_future(read(running, connection)) for connection in connections]
        lane = Lane(running)
        while not all(reader.waits for reader in running._readers) or len(running._readers) < 4:
            await asyncio.sleep(0)
        say(running.feed, 0, "first ")  # It begins the message.
        before = [len(connection.written) for connection in connections]
        framed_before = len(lane.messages)
        loop, scheduled = asyncio.get_running_loop(), list[object]()
        with monkeypatch.context() as patched:
            soon = loop.call_soon
            patched.setattr(loop, "call_soon", lambda *a, **k: (scheduled.append(a), soon(*a, **k))[1])
            for index in range(1, WORDS):
                say(running.feed, index, f"word{index} ")
        assert not scheduled, "no task, future or callback runs for a token"
        assert [len(each.written) for each in connections] == [count + WORDS - 1 for count in before]
        assert len(lane.messages) == framed_before + WORDS - 1
        assert all(message["stream_id"] == "l" for message in lane.messages)
        connections[0].pause(True)
        for index in range(WORDS, 2 * WORDS):
            say(running.feed, index, f"word{index} ")
        assert len(connections[0].written) == before[0] + WORDS - 1
        running.feed.finish(ended(running.feed))
        await running_task
        connections[0].pause(False)
        await asyncio.gather(*answers, lane.reading)
        said = ["first ", *(f"word{index} " for index in range(1, 2 * WORDS))]
        assert [texts(each.body()) for each in connections] == [said] * 3
        assert [text for message in lane.messages for text in pieces_of(message, "")] == said
        numbers = [message["sequence_number"] for message in lane.messages]
        assert numbers == list(range(len(numbers)))
        late = [event async for events in running.read(numbers[-3]) for event in events]
        assert [json.loads(event.body)["sequence_number"] for event in late] == numbers[-2:]
        assert not running._readers

    asyncio.run(main())


def stored() -> Running:
    """A response whose turn was started."""
    command = wire.StartTurn(1, "t-1", "ann", [1], wire.SamplingFields(), session="ann/~s")
    return Running("ann", Place("s", "t-1"), response(), TurnFeed(command, lambda _: None), lambda _: [])


async def stands(_running: Running, _result: wire.NotedTurn | None) -> None:
    """Its turn is in the history."""


def say(feed: TurnFeed, index: int, text: str) -> None:
    feed.push(wire.Delta(feed.call, index, text, [index], prompt=None if index else (1, 0)))


def ended(feed: TurnFeed) -> wire.End:
    return wire.End(feed.call, "finished", "stop", "", [], 1, 0, 1, 0.0, 0.0, 0.0)


async def read(running: Running, connection: Any) -> None:
    """Answer a request with the events of a response."""
    answer = StreamAnswer(event_pieces(running), lambda: None, lambda problem: event(problem.body()))
    scope = {"type": "http", "extensions": {EXTENSION: BodyWriter(connection)}}
    await answer(scope, connection.receive, connection.send)


class Lane:
    """A WebSocket that reads a response; frames are those of the library."""

    def __init__(self, running: Running) -> None:
        self.handshake_complete, self.close_sent, self.disconnected = True, False, False
        self.writable = asyncio.Event()
        self.writable.set()
        self.conn = ServerProtocol(state=State.OPEN)
        self.transport = self
        self.messages: list[dict[str, Any]] = []
        self._client = ClientProtocol(parse_uri("ws://x/"), state=State.OPEN)
        connection: Any = self
        self._frames = FrameWriter(connection)
        self.reading = asyncio.ensure_future(self.read(running))

    def is_closing(self) -> bool:
        return False

    def write(self, content: bytes) -> None:
        self._client.receive_data(content)
        for frame in self._client.events_received():
            assert isinstance(frame, Frame)
            self.messages.append(json.loads(frame.data))

    async def read(self, running: Running) -> None:
        async for events in running.read(sink=LaneSink(self._frames, "l")):
            for each in events:
                self._frames.write(framed(each, "l"))


def test_messages_of_a_realtime_connection_are_written_where_nothing_waits() -> None:
    class Direct:
        ready = True

        def __init__(self) -> None:
            self.written: list[str] = []

        def write(self, piece: bytes) -> None:
            self.written.append(piece.decode())

    async def main() -> None:
        direct = Direct()
        box = Outbox(direct, bytes_max=100, bytes_low=10)
        taking = asyncio.ensure_future(box.take())
        await asyncio.sleep(0)
        box.put("a")
        assert direct.written == ["a"] and box.bytes == 0
        direct.ready = False
        box.put("b")
        direct.ready = True
        box.put("c")
        assert direct.written == ["a"], "nothing overtakes what waits"
        assert await taking == "b"
        taking = asyncio.ensure_future(box.take())
        assert await taking == "c"
        box.put("d")
        assert direct.written == ["a"], "nor what was taken and may not be written yet"
        assert await box.take() == "d"
        taking = asyncio.ensure_future(box.take())
        await asyncio.sleep(0)
        box.put("e")
        assert direct.written == ["a", "e"]
        box.close(1000, "")
        box.put("f")
        assert await taking is None and direct.written == ["a", "e"]

    asyncio.run(main())


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "over ASGI"])
def test_a_silent_answer_is_kept_alive(direct: bool) -> None:
    async def main() -> None:
        stream = Stream(1, messages_form, KeepAlive(b"event: ping\n\n", 0.001), direct=direct)
        while stream.connection.body().count(b"ping") < 2:
            await asyncio.sleep(0.001)
        stream.connection.pause(True)
        count = stream.connection.body().count(b"ping")
        await asyncio.sleep(0.01)
        assert stream.connection.body().count(b"ping") == count, "a client that does not read needs none"
        stream.connection.pause(False)
        stream.say(0, "x")
        stream.end()
        await stream.answering
        body = stream.connection.body()
        await asyncio.sleep(0.005)
        assert stream.connection.body() == body and texts(body) == ["x"]

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


@pytest.mark.parametrize("reads", [False, True], ids=["text", "read for parts"])
def test_other_dialects_put_plain_text_together_as_it_would_be_encoded(reads: bool) -> None:
    async def main() -> None:
        command = wire.StartTurn(3, 't-"3"', "ann", [1], wire.SamplingFields())
        feed = TurnFeed(command, lambda _: None)
        answer = Answer("m-1", "echo", max_tokens=WORDS, stop=lambda _tokens: None)
        events = ResponseEvents(response(), lambda _logprobs: [])
        call, many = generate_call([feed], {"text": "x"}), generate_call([feed, feed], {"text": ["x", "y"]})
        said = Said("r-3", call.asked[0], [1], echo_tokenizer(), [])
        message, shown = messages_form([feed]), responses_form([feed])
        for index, text in enumerate(("first", ODD, "", "last")):
            parts = [wire.AnswerEvent(wire.Part.TEXT, text)] if reads else None
            delta = wire.Delta(3, index, text, [7, index], prompt=None if index else (5, 2), events=parts)
            assert message.delta(0, delta) == b"".join(event(e, e["type"]) for e in answer.read(delta))
            assert shown.delta(0, delta) == b"".join(event(e, e["type"]) for e in events.of(delta))
            said.add(delta)
            assert call.delta(0, delta) == event(said.chunk())
            assert many.delta(1, delta) == event({**said.chunk(), "index": 1})

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
