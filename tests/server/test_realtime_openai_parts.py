"""Parts of OpenAI's realtime protocol in process: plans, marks, templates that take less, slow readers."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.websockets import WebSocket

from holdfast.engine.echo import open_echo
from holdfast.engine.options import make_options
from holdfast.server.link import wire
from holdfast.server.link.worker import vocabulary_of
from holdfast.server.routes.realtime_openai.conversation import OpenAIConversation
from holdfast.server.routes.realtime_openai.history import Marks, Turn, plan
from holdfast.server.routes.realtime_openai.items import Item, ItemKind, Status, chat_messages
from holdfast.server.routes.realtime_openai.response import Response
from holdfast.server.routes.realtime_openai.settings import AnswerSettings
from holdfast.server.routes.realtime_openai.talk import Asked, Talk
from holdfast.server.routes.realtime_outbox import Outbox
from tests.server.standing_in import ANN, EchoEngine
from tests.server.test_service import Engine
from tests.server.test_unread_streams import end, feeds

SYSTEM_FIRST = (
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('system messages come first') }}{% endif %}"
    "<|start|>{{ message.role }}\n{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def said(name: str, text: str, role: str = "user") -> Item:
    return Item(name, ItemKind.MESSAGE, (text,), role)


def turn(name: str, given: list[Item], answer: list[Item]) -> Turn:
    made = Turn(name, [item.said for item in given], "", [item.said for item in answer])
    for place in range(1, len(answer[-1].text) + 1 if answer else 0):
        made.marks.add(place, place)
    return made


# --- plans -------------------------------------------------------------------------------------------

ASKED, ANSWER = said("a", "hello"), said("b", "world", "assistant")
NEXT, LAST = said("c", "next"), said("d", "last", "assistant")
TURNS = [turn("t1", [ASKED], [ANSWER]), turn("t2", [NEXT], [LAST])]


def test_what_follows_the_history_is_appended() -> None:
    more = said("e", "more")
    made = plan(TURNS, [ASKED, ANSWER, NEXT, LAST, more])
    assert (made.turns, made.rest, made.cut) == (2, [more], None)
    assert plan([], [ASKED]).rest == [ASKED]
    assert plan(TURNS, [ASKED, ANSWER, NEXT, LAST]).rest == []


def test_a_beginning_of_the_last_answer_is_a_cut() -> None:
    shorter = said("d", "la", "assistant")
    made = plan(TURNS, [ASKED, ANSWER, NEXT, shorter])
    assert made.cut is not None
    assert (made.turns, made.rest, made.cut.tokens, made.cut.characters) == (2, [], 2, 2)
    for other in (said("d", "xa", "assistant"), said("x", "la", "assistant"), said("d", "la")):
        made = plan(TURNS, [ASKED, ANSWER, NEXT, other])
        assert (made.turns, made.rest, made.cut) == (1, [NEXT, other], None)


def test_an_edit_keeps_the_turns_before_it() -> None:
    assert plan(TURNS, [ASKED, ANSWER, NEXT]).turns == 1
    assert plan(TURNS, [ASKED, ANSWER]).turns == 1
    assert plan(TURNS, [ASKED, said("b", "wor", "assistant"), NEXT, LAST]).turns == 0
    assert plan(TURNS, [said("n", "new"), ASKED, ANSWER, NEXT, LAST]).turns == 0
    assert plan(TURNS, []).rest == []


def test_a_call_that_was_not_finished_is_no_part_of_the_history() -> None:
    broken = Item("x", ItemKind.CALL, ("{",), name="look", call_id="c", status=Status.INCOMPLETE)
    assert plan(TURNS, [ASKED, ANSWER, broken, NEXT, LAST]).turns == 2
    assert chat_messages([ASKED, broken]) == [{"role": "user", "content": "hello"}]


def test_calls_of_one_answer_are_one_message() -> None:
    calls = [Item(name, ItemKind.CALL, ("{}",), name="look", call_id=name) for name in ("c1", "c2")]
    result = Item("r", ItemKind.RESULT, ("seen",), call_id="c1")
    answer, tool = chat_messages([ANSWER, *calls, result])
    assert answer["content"] == "world" and [call["id"] for call in answer["tool_calls"]] == ["c1", "c2"]
    assert tool == {"role": "tool", "tool_call_id": "c1", "content": "seen"}


def test_marks_never_go_past_what_was_heard() -> None:
    marks = Marks()
    marks.begin(7)
    for characters, tokens in ((2, 8), (2, 9), (5, 10)):
        marks.add(characters, tokens)
    places = [marks.before_character(end, "abcde") for end in (0, 1, 2, 4, 5, 99)]
    assert places == [(0, 7), (0, 7), (2, 8), (2, 8), (5, 10), (5, 10)]
    places = [marks.before_token(end, "abcde") for end in (0, 7, 8, 9, 10)]
    assert places == [(0, 7), (0, 7), (2, 8), (2, 8), (5, 10)]


def test_a_cut_within_a_piece_is_found_by_its_tokens() -> None:
    words = {1: "a", 2: "bc", 3: "d", 4: "\ufffd", 5: "</think>"}
    marks = Marks(lambda tokens: "".join(words[token] for token in tokens))
    marks.hear([1, 2, 3, 1])
    marks.add(5, 4)
    assert [marks.before_character(end, "abcda") for end in range(6)] == [
        (0, 0),
        (1, 1),
        (1, 1),
        (3, 2),
        (4, 3),
        (5, 4),
    ]
    assert [marks.before_token(end, "abcda") for end in range(5)] == [(0, 0), (1, 1), (3, 2), (4, 3), (5, 4)]
    # Half a character, and tokens that are not text: the piece is left out.
    for tokens in ([1, 4, 4], [5, 1]):
        marks = Marks(lambda tokens: "".join(words[token] for token in tokens))
        marks.hear(tokens)
        marks.add(9, len(tokens))
        assert marks.before_token(2 if tokens[0] == 1 else 1, "a\u00e9") == (0, 0)


# --- instructions ------------------------------------------------------------------------------------


def with_template(template: str, story: Callable[[EchoEngine], Awaitable[None]]) -> None:
    """Tell a story with a stand-in for the engine, whose model has this template."""

    async def run() -> None:
        engine = EchoEngine()
        vocabulary = vocabulary_of(open_echo("echo", make_options()).setup.tokenizer)
        engine.service.close()
        engine.service.model._prompts = None
        changed = msgspec.structs.replace(vocabulary, template=template)
        engine.service.engine_ready(wire.Ready(engine.service.facts, changed, []))
        try:
            await story(engine)
        finally:
            engine.service.close()

    asyncio.run(run())


async def answered(engine: EchoEngine, work: Any, turns: int = 0) -> list[wire.Command]:
    """What the engine is asked until something is done; it says yes to all of it."""
    task, seen = asyncio.create_task(work), len(engine.asked)
    first = seen
    while not task.done():
        await asyncio.sleep(0.001)
        for command in engine.asked[seen:]:
            view = wire.SessionView("ann/s", 0, None, 0)
            if isinstance(command, wire.Rewind):
                view = wire.SessionView("ann/s", 0 if command.turns == 0 else 10, None, command.turns)
            engine.says(wire.Done(command.call, view if not isinstance(command, wire.StartTurn) else None))
        seen = len(engine.asked)
    feed, made = task.result()
    view = wire.SessionView("ann/s", 100, None, turns)
    engine.says(wire.Step(ends=[msgspec.structs.replace(end(feed), view=view)]))
    made.answer = [ANSWER.said]
    return engine.asked[first:]


def asked(name: str, instructions: str) -> Asked:
    settings = AnswerSettings(instructions=instructions)
    return Asked(name, settings, settings)


def test_a_template_that_takes_a_system_message_first_alone_begins_again() -> None:
    async def story(engine: EchoEngine) -> None:
        talk = Talk(engine.service, ANN, "s", stays=False)

        def text(command: wire.Command) -> str:
            assert isinstance(command, wire.StartTurn)
            return engine.service.prompts.tokenizer.decode(command.tokens, skip_special_tokens=False)

        opened, first = await answered(engine, talk.start([ASKED], asked("t1", "one")), turns=1)
        assert isinstance(opened, wire.OpenSession)
        assert text(first) == "<|start|>system\none<|end|><|start|>user\nhello<|end|><|start|>assistant\n"
        (second,) = await answered(engine, talk.start([ASKED, ANSWER, NEXT], asked("t2", "one")), turns=2)
        assert text(second) == "<|end|><|start|>user\nnext<|end|><|start|>assistant\n"
        talk.turns[-1].answer = [LAST.said]
        items = [ASKED, ANSWER, NEXT, LAST, said("e", "more")]
        rewound, third = await answered(engine, talk.start(items, asked("t3", "two")), turns=1)
        assert isinstance(rewound, wire.Rewind) and rewound.turns == 0
        whole = "".join(f"<|start|>{item.role}\n{item.text}<|end|>" for item in items)
        assert text(third) == f"<|start|>system\ntwo<|end|>{whole}<|start|>assistant\n"
        assert len(talk.turns) == 1
        # A system item in the middle needs no new beginning: it is told as the user's.
        talk.turns[-1].answer = [(said("f", "done", "assistant")).said]
        items += [said("f", "done", "assistant"), said("g", "note", "system")]
        (fourth,) = await answered(engine, talk.start(items, asked("t4", "two")), turns=2)
        assert text(fourth) == "<|end|><|start|>user\nnote<|end|><|start|>assistant\n"

    with_template(SYSTEM_FIRST, story)


def test_a_system_item_that_the_template_refuses_is_told_as_the_users() -> None:
    async def story(engine: EchoEngine) -> None:
        talk = Talk(engine.service, ANN, "s", stays=False)
        items = [ASKED, ANSWER, said("c", "note", "system")]
        _, first = await answered(engine, talk.start(items, asked("t1", "one")), turns=1)
        assert isinstance(first, wire.StartTurn)
        text = engine.service.prompts.tokenizer.decode(first.tokens, skip_special_tokens=False)
        assert text.startswith("<|start|>system\none<|end|><|start|>user\nhello")
        assert text.endswith("<|start|>user\nnote<|end|><|start|>assistant\n")

    with_template(SYSTEM_FIRST, story)


# --- slow readers ------------------------------------------------------------------------------------


def test_what_a_slow_reader_does_not_take_waits_as_one_piece() -> None:
    words, low = 5000, 4096

    async def main() -> None:
        outbox = Outbox(bytes_low=low)
        scope = {"type": "websocket", "headers": [], "query_string": b"model=any", "subprotocols": []}

        async def unused(*_: Any) -> Any:
            raise AssertionError("nothing is read from the socket")

        talk = OpenAIConversation(WebSocket(scope, unused, unused), Engine().service, ANN, outbox)
        settings = AnswerSettings()
        response = Response(
            talk.emit, settings, None, beta=False, conversation=None, created_after=0, spell=talk._spelled
        )
        (feed,) = feeds(1)
        sending = asyncio.create_task(talk._send(response, feed))
        highest = 0
        for word in range(words):
            feed.push(wire.Delta(feed.call, word, f"{word} ", [word]))
            await asyncio.sleep(0)
            highest = max(highest, outbox.bytes)
        assert highest < 2 * low, "nothing more was queued for a reader that takes nothing"
        feed.finish(end(feed))
        pieces: list[str] = []

        async def read() -> None:
            while (text := await outbox.take()) is not None:
                pieces.append(json.loads(text).get("delta", ""))

        reading = asyncio.create_task(read())
        await asyncio.wait_for(sending, 60)
        while outbox.bytes:
            await asyncio.sleep(0)
        outbox.close(1000, "")
        await reading
        assert "".join(pieces) == "".join(f"{word} " for word in range(words))
        assert len([piece for piece in pieces if piece]) < words / 100

    asyncio.run(main())
