"""Anthropic's conversations and answers, made by hand: what templates get, and how blocks become events."""

from typing import Any

import msgspec
import pytest

from holdfast.engine.portions import finish
from holdfast.server.http.problems import Problem
from holdfast.server.link import wire
from holdfast.server.link.turn_feed import join
from holdfast.server.routes.messages_format import Answer, stop_string
from holdfast.server.routes.messages_input import Message, SystemBlock, read_conversation
from tests.server.anthropic_wire import collected
from tests.server.test_answer_formats import ROUND, SECOND, end

CALLED = {
    "role": "assistant",
    "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": {"a": "é"}}],
}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": "r"}
TOLD = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}],
}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def read(messages: list[Any], system: Any = None) -> list[dict[str, Any]]:
    given = msgspec.convert(messages, list[Message])
    return finish(read_conversation(msgspec.convert(system, str | list[SystemBlock] | None), given)).messages


# --- conversations --------------------------------------------------------------------------------


def test_results_come_directly_after_their_calls_and_text_follows_them() -> None:
    tool = {"role": "tool", "tool_call_id": "c1", "content": "r"}
    for blocks in ([RESULT, text("x")], [text("x"), RESULT]):
        assert read([user("q"), CALLED, user(blocks)]) == [user("q"), TOLD, tool, user("x")]
    assert read([user("q"), CALLED, user([RESULT])])[2:] == [tool]


def test_results_are_texts_and_say_if_they_are_errors() -> None:
    for content, error, told in (
        ([text("a"), text("b")], False, "a\nb"),
        (None, False, ""),
        ("gone", True, "Error: gone"),
    ):
        made = read([user("q"), CALLED, user([{**RESULT, "content": content, "is_error": error}])])
        assert made[2]["content"] == told


def test_consecutive_messages_of_a_role_are_one() -> None:
    said = {"role": "assistant", "content": "b"}
    again = {"role": "assistant", "content": [text("c"), CALLED["content"][0]]}
    made = read([user("a"), user([text("a"), text("a")]), said, again, user([RESULT]), user("d")])
    assert [message["content"] for message in made] == ["a\na\na", "bc", "r", "d"]
    assert made[1]["tool_calls"] == TOLD["tool_calls"]


def test_system_text_is_in_front_and_reminders_are_the_users() -> None:
    billing = text("x-anthropic-billing-header: cc_version=1;")
    later = {"role": "system", "content": [text("s3")]}
    made = read([{"role": "system", "content": "s2"}, user("a"), later], [billing, text("s0"), text("s1")])
    assert made == [
        {"role": "system", "content": "s0\ns1\ns2"},
        user("a\n<system-reminder>\ns3\n</system-reminder>"),
    ]
    after = read([user("q"), CALLED, user([RESULT]), later])
    assert after[-1] == user("<system-reminder>\ns3\n</system-reminder>")


def test_a_system_message_may_be_for_one_turn_of_the_user() -> None:
    note = {"role": "system", "content": "now", "clear_at": "next_user_message"}
    said = {"role": "assistant", "content": "b"}
    shown = user("a\n<system-reminder>\nnow\n</system-reminder>")
    assert read([user("a"), note]) == [shown]
    assert read([user("a"), note, said]) == [shown, said]
    assert read([user("a"), note, said, user("c")]) == [user("a"), said, user("c")]
    kept = {**note, "clear_at": "never"}
    assert read([user("a"), kept, said, user("c")]) == [shown, said, user("c")]
    assert read([note, user("a")]) == [user("a")]


def test_thinking_is_reasoning_and_what_another_server_redacted_is_left_out() -> None:
    thought = {"type": "thinking", "thinking": "t", "signature": "another's"}
    hidden = {"type": "redacted_thinking", "data": "?"}
    made = read(
        [user("q"), {"role": "assistant", "content": [thought, hidden, thought, text("x")]}, user("y")]
    )
    assert made[1] == {"role": "assistant", "content": "x", "reasoning_content": "tt"}


def test_problems_name_the_messages_of_the_client() -> None:
    given = msgspec.convert([user("q"), CALLED, user([RESULT, text("x")])], list[Message])
    conversation = finish(read_conversation("s", given))
    for index, place in enumerate(
        ("system", "messages[0]", "messages[1]", "messages[2].content[0]", "messages[2]")
    ):
        told = conversation.told(Problem(400, "c", f"messages[{index}].x: no", f"messages[{index}].x"))
        assert (told.param, told.message) == (f"{place}.x", f"{place}.x: no")
    told = conversation.told(Problem(400, "c", "tools[0].function.parameters: no", "tools[0].function.name"))
    assert (told.param, told.message) == ("tools[0].name", "tools[0].input_schema: no")


# --- answers --------------------------------------------------------------------------------------


def answer(**more: Any) -> Answer:
    return Answer("msg_1", "echo", max_tokens=3, stop=lambda tokens: None, **more)


@pytest.mark.parametrize("size", range(1, len(ROUND) + 1))
def test_a_stream_and_the_whole_have_the_same_blocks_for_readers_of_every_slowness(size: int) -> None:
    pieces = [join(ROUND[place : place + size]) for place in range(0, len(ROUND), size)]
    ended = end("Let me see.", wire.CallFields("call_a", "look", '{"at": 1}'), SECOND, reasoning="Hmm.")
    for more in ({}, {"eager": frozenset({"look"})}):
        streamed, whole = answer(**more), answer(**more)
        events = [event for piece in pieces for event in streamed.read(piece)]
        message = collected([*events, *streamed.last(ended)])
        for piece in pieces:
            whole.read(piece)
        assert message == whole.whole(ended)
        assert message["content"] == [
            {"type": "thinking", "thinking": "Hmm.", "signature": "holdfast"},
            {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "id": "call_a", "name": "look", "input": {"at": 1}},
            {"type": "tool_use", "id": "call_b", "name": "sing", "input": {}},
        ]
        assert message["stop_reason"] == "tool_use"


def test_an_answer_without_output_is_still_a_message() -> None:
    message = collected(answer().last(end()))
    assert message["content"] == [] and message["usage"]["input_tokens"] == 5


def test_the_stop_string_is_the_one_that_the_last_token_completes() -> None:
    def found(tokens: str, *stops: str) -> str | None:
        numbers = [ord(token) for token in tokens]
        return stop_string(numbers, stops, frozenset({0}), lambda part: "".join(map(chr, part)))

    assert found("hello", "lo", "he") == "lo"
    assert found("hello", "he") is None
    assert found("hello", "lo", "ello", "o") == "ello"
    assert found("lo\0", "lo") is None
    assert found("", "lo") is None and found("lo") is None
