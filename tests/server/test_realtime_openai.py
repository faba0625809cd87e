"""Which protocol a connection to `/v1/realtime` speaks, and the errors for messages that cannot be read."""

import asyncio
import json
from typing import Any, get_args

import openai
import pytest

from holdfast.server.routes.realtime import Said
from holdfast.server.routes.realtime_openai.client_events import ClientEvent
from holdfast.server.routes.realtime_openai.protocol import HOLDFAST_MESSAGES, OPENAI_EVENTS
from tests.plain import NO_TLS
from tests.server.bad_values import SECRET
from tests.server.conftest import Serve
from tests.server.openai_talking import OpenAITalk, message
from tests.server.serving import Server
from tests.server.talking import Body, Talk


def told(talk: Talk) -> Body:
    """The next message, which is an error in OpenAI's form."""
    message: Body = json.loads(talk.connection.recv(timeout=60))
    assert message["type"] == "error" and message["event_id"].startswith("event-")
    assert set(message["error"]) == {"message", "type", "code", "param", "event_id"}
    assert SECRET not in json.dumps(message)
    return message


def test_openai_s_client_talks_unchanged(echo: Server) -> None:
    async def main() -> None:
        async with (
            openai.AsyncOpenAI(
                base_url=f"{echo.url}/v1",
                api_key="none",
                http_client=openai.DefaultAsyncHttpxClient(verify=NO_TLS),
            ) as client,
            client.realtime.connect(model="gpt-realtime") as connection,
        ):
            first = await asyncio.wait_for(connection.recv(), 60)
            assert first.type == "session.created"
            await connection.session.update(session={"type": "realtime", "output_modalities": ["text"]})
            second = await asyncio.wait_for(connection.recv(), 60)
            assert second.type == "session.updated" and second.event_id != first.event_id
            content: Any = [{"type": "input_text", "text": "hello"}]
            await connection.conversation.item.create(
                item={"type": "message", "role": "user", "content": content}
            )
            await connection.response.create()
            async for event in connection:
                assert event.type != "error", event
                if event.type == "response.done":
                    assert event.response.output is not None
                    assert event.response.output[0].content[0].text == "hello"  # type: ignore[union-attr, index]
                    break

    asyncio.run(main())


@pytest.mark.parametrize(
    "options",
    [
        {"additional_headers": {"OpenAI-Beta": "realtime=v1"}},
        {"subprotocols": ["realtime", "openai-insecure-api-key.none", "openai-beta.realtime-v1"]},
        {"subprotocols": ["openai-insecure-api-key.none", "realtime"]},
        {"query": "?intent=conversation"},
    ],
    ids=["header", "subprotocols", "key first", "query"],
)
def test_a_connection_that_openai_s_clients_make_is_spoken_to_first(
    echo: Server, options: dict[str, Any]
) -> None:
    with OpenAITalk(echo, **{"query": "", **options}) as talk:
        beta = "beta" in json.dumps(options).lower()
        assert ("modalities" in talk.session) == beta
        if "subprotocols" in options:
            assert talk.connection.subprotocol == "realtime", "a browser breaks a connection off without"
        assert talk.ask("hello")["output"][0]["content"][0]["text"] == "hello"


@pytest.mark.parametrize("query", ["", "?model=any"])
def test_the_first_message_may_choose_holdfast_s_protocol(echo: Server, query: str) -> None:
    with OpenAITalk(echo, query=query) as talk:
        talk.send({"type": "session.open"})
        assert talk.hear("session.opened")["turns"] == 0
        # From then on the connection stays in that protocol.
        talk.send({"type": "response.create", "event_id": "mine"})
        error = talk.hear("error")["error"]
        assert (error["code"], error["param"], error["event_id"]) == ("unsupported_protocol", "type", "mine")
        talk.send({"type": "input.append", "text": "hello"})
        talk.send({"type": "input.commit"})
        assert talk.hear("response.done")["text"] == "hello"


def test_the_first_event_may_choose_openai_s_protocol(echo: Server) -> None:
    with Talk(echo) as talk:
        talk.connection.send('{"type": "hello"}')
        assert told(talk)["error"]["param"] == "type"
        talk.connection.send('{"type": "session.update", "session": {"instructions": "Be brief."}}')
        assert talk.hear("session.created", "error")["session"]["instructions"] == ""
        assert talk.hear("session.updated", "error")["session"]["instructions"] == "Be brief."
        talk.say("session.open")
        assert told(talk)["error"]["code"] == "unsupported_protocol"


def test_the_subprotocol_holdfast_is_never_left(echo: Server) -> None:
    with Talk(echo, subprotocols=["holdfast", "realtime"]) as talk:
        assert talk.connection.subprotocol == "holdfast"
        talk.connection.send('{"type": "session.update", "session": {}, "event_id": "e"}')
        error = told(talk)["error"]
        assert (error["code"], error["event_id"]) == ("unsupported_protocol", "e")
        assert talk.open()["turns"] == 0


def test_the_key_of_a_browser_and_an_engine_that_is_lost(serve: Serve) -> None:
    server = serve("echo", environment={"HOLDFAST_API_KEYS": "ann:secret-of-ann"})
    with pytest.raises(Exception, match="401"):
        OpenAITalk(server, query="?model=any", subprotocols=["realtime", "openai-insecure-api-key.wrong"])
    names = ["realtime", "openai-insecure-api-key.secret-of-ann"]
    with OpenAITalk(server, query="?model=any", subprotocols=names) as talk:
        assert talk.ask("hello")["status"] == "completed"
        headers = {"authorization": "Bearer secret-of-ann"}
        (session,) = server.get("/v1/sessions", headers=headers).json()["sessions"]
        assert session["id"] == talk.session["id"]
        talk.send({"type": "conversation.item.create", "item": message("x" * 20_000, id="long")})
        talk.send({"type": "response.create"})
        answer = talk.hear("response.output_item.added")["item"]["id"]
        server.kill_engine()
        response = talk.ended()
        assert response["status"] == "failed"
        assert response["status_details"]["error"]["code"] == "engine_lost"
        assert talk.hear("conversation.item.deleted")["item_id"] == answer
        talk.told({"type": "conversation.item.delete", "item_id": "long"}, "conversation.item.deleted")
        server.wait_ready()
        # The session is gone; its conversation is sent again.
        again = talk.ask("again")
        assert again["status"] == "completed" and again["usage"]["input_tokens"] > len("hellohelloagain")


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
    assert tuple(kind.__struct_config__.tag for kind in get_args(Said)) == HOLDFAST_MESSAGES
    assert tuple(kind.__struct_config__.tag for kind in get_args(ClientEvent)) == OPENAI_EVENTS


def test_our_own_clients_are_not_spoken_to_first(echo: Server) -> None:
    for options in ({}, {"subprotocols": ["holdfast"]}):
        with Talk(echo, **options) as talk:
            talk.say("session.open")
            talk.hear("session.opened")
            assert len(talk.heard) == 1
            talk.say("input.append")
            error = talk.refused()
            assert (error["param"], talk.heard[-1].get("event_id")) == ("text", None)
