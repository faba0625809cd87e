"""Clients of another protocol on `/v1/realtime`: an error at once, in the form that they read."""

import asyncio
import json
from typing import Any, get_args

import openai
import pytest

from holdfast.server.routes.realtime import Said
from holdfast.server.routes.realtime_openai import MESSAGES
from tests.server.bad_values import SECRET
from tests.server.serving import Server
from tests.server.talking import Body, Talk

OPENAI_MESSAGES: list[dict[str, Any]] = [
    {"type": "session.update", "session": {"type": "realtime", "instructions": SECRET}},
    {"type": "conversation.item.create", "item": {"type": "message", "role": "user", "content": []}},
    {"type": "conversation.item.truncate", "item_id": "i", "content_index": 0, "audio_end_ms": 1},
    {"type": "conversation.item.delete", "item_id": "i"},
    {"type": "conversation.item.retrieve", "item_id": "i"},
    {"type": "input_audio_buffer.append", "audio": "A" * 100_000},
    {"type": "input_audio_buffer.commit"},
    {"type": "input_audio_buffer.clear"},
    {"type": "output_audio_buffer.clear"},
    {"type": "response.create"},
    {"type": "response.cancel"},
    {"type": "transcription_session.update"},
]


def told(talk: Talk) -> Body:
    """The next message, which is an error in OpenAI's form."""
    message: Body = json.loads(talk.connection.recv(timeout=60))
    assert message["type"] == "error" and message["event_id"].startswith("event-")
    assert set(message["error"]) == {"message", "type", "code", "param", "event_id"}
    assert SECRET not in json.dumps(message)
    return message


def test_openai_s_client_is_told_at_once_what_is_spoken_here(echo: Server) -> None:
    async def main() -> None:
        async with (
            openai.AsyncOpenAI(base_url=f"{echo.url}/v1", api_key="none") as client,
            client.realtime.connect(model="gpt-realtime") as connection,
        ):
            first = await asyncio.wait_for(connection.recv(), 60)
            assert first.type == "error" and first.error.event_id is None
            assert first.error.code == "unsupported_protocol"
            assert first.error.type == "invalid_request_error"
            assert "docs/realtime.md" in first.error.message and "session.open" in first.error.message
            await connection.session.update(session={"type": "realtime"}, event_id="mine-1")
            second = await asyncio.wait_for(connection.recv(), 60)
            assert second.type == "error" and second.error.event_id == "mine-1"
            assert second.event_id != first.event_id
            await connection.response.create()
            third = await asyncio.wait_for(connection.recv(), 60)
            assert third.type == "error" and third.error.event_id is None

    asyncio.run(main())


@pytest.mark.parametrize(
    "options",
    [
        {"additional_headers": {"OpenAI-Beta": "realtime=v1"}},
        {"subprotocols": ["realtime", "openai-insecure-api-key.none", "openai-beta.realtime-v1"]},
        {"subprotocols": ["openai-insecure-api-key.none", "realtime"]},
    ],
    ids=["header", "subprotocols", "key first"],
)
def test_a_connection_that_openai_s_clients_make_is_spoken_to_first(
    echo: Server, options: dict[str, Any]
) -> None:
    with Talk(echo, **options) as talk:
        assert told(talk)["error"]["code"] == "unsupported_protocol"
        if "subprotocols" in options:
            assert talk.connection.subprotocol == "realtime", "a browser breaks a connection off without"
        # Whoever knows this protocol too may go on in it.
        assert talk.open()["turns"] == 0
        assert talk.turn("hello")["text"] == "hello"


@pytest.mark.parametrize("inside", [False, True], ids=["without a session", "in a session"])
def test_every_message_of_openai_s_is_answered(echo: Server, inside: bool) -> None:
    with Talk(echo) as talk:
        if inside:
            talk.open()
        for number, message in enumerate(OPENAI_MESSAGES):
            event_id = {"event_id": f"e-{number}"} if number % 2 else {}
            talk.connection.send(json.dumps({**message, **event_id}))
            error = told(talk)["error"]
            assert (error["code"], error["param"]) == ("unsupported_protocol", "type"), message["type"]
            assert error["event_id"] == event_id.get("event_id")


@pytest.mark.parametrize(
    ("text", "param", "event_id"),
    [
        ('{"type": "hello", "event_id": "e"}', "type", "e"),
        ('{"type": 7, "event_id": "e"}', "type", "e"),
        ('{"event_id": "e"}', "type", "e"),
        ('{"type": "session.open", "event_id": "e"}', "event_id", "e"),
        ('{"type": "session.open", "id": 7, "event_id": "e"}', "id", "e"),
        ('{"type": "session.opened", "event_id": 7}', "type", None),
        ('{"type": "hello", "event_id": ["e"]}', "type", None),
        ('{"type": "hello", "event_id": ""}', "type", None),
        ('{"type": "hello", "event_id": "' + "e" * 513 + '"}', "type", None),
        ('{"type": "hello", "event_id": "' + "e" * 512 + '"}', "type", "e" * 512),
        ('{"type": "hello", "event_id": "' + "\\u00e9" * 512 + '"}', "type", "\u00e9" * 512),
        ('{"type": "' + SECRET + '"}', "type", None),
        ("{", None, None),
        ('"hello"', None, None),
        ('{"type": "hello", "event_id": "\\ud800"}', "type", None),
        ('{"type": "hello", "event_id": ' + "[" * 20_000 + "]" * 20_000 + "}", "type", None),
        ('{"type": "hello!", "event_id": ' + "[" * 100_000 + "]" * 100_000 + "}", None, None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_every_message_that_is_not_understood_is_answered_with_its_event_id(
    echo: Server, text: str, param: str | None, event_id: str | None
) -> None:
    with Talk(echo) as talk:
        talk.connection.send(text)
        error = told(talk)["error"]
        assert (error["param"], error["event_id"]) == (param, event_id)
        assert talk.open()["turns"] == 0


def test_all_messages_that_there_are_are_named() -> None:
    assert tuple(kind.__struct_config__.tag for kind in get_args(Said)) == MESSAGES


def test_our_own_clients_are_not_spoken_to_first(echo: Server) -> None:
    for options in ({}, {"subprotocols": ["holdfast"]}):
        with Talk(echo, **options) as talk:
            talk.say("session.open")
            talk.hear("session.opened")
            assert len(talk.heard) == 1
            talk.say("input.append")
            error = talk.refused()
            assert (error["param"], talk.heard[-1].get("event_id")) == ("text", None)
