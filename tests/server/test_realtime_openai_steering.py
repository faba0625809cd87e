"""Steering over OpenAI's realtime events: cancel, truncate, create, respond in a row are one act."""

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.websockets import WebSocket, WebSocketState

from holdfast.server.link import wire
from holdfast.server.routes.realtime_openai.conversation import OpenAIConversation
from holdfast.server.routes.realtime_outbox import Outbox
from tests.server.joined import ANN, Joined
from tests.server.openai_talking import OpenAITalk, message
from tests.server.serving import Server

LONG = "many words that take a while to be said again " * 60


def speaking(talk: OpenAITalk, pieces: int = 5) -> tuple[str, str]:
    """Have a long answer begin; its item, and what was heard of it."""
    talk.create(message(LONG))
    talk.send({"type": "response.create"})
    item = talk.hear("response.output_item.added")["item"]["id"]
    heard = [talk.hear("response.output_text.delta")["delta"] for _ in range(pieces)]
    return item, "".join(heard)


def in_a_row(talk: OpenAITalk, *events: dict[str, Any]) -> None:
    for event in events:
        talk.send(event)


def created(text: str) -> dict[str, Any]:
    return {"type": "conversation.item.create", "item": message(text)}


def cancelled_then_done(talk: OpenAITalk) -> tuple[dict[str, Any], dict[str, Any]]:
    first, second = talk.ended(), talk.ended()
    assert [each["status"] for each in (first, second)] == ["cancelled", "completed"]
    return first, second


def text_of(response: dict[str, Any]) -> str:
    text: str = response["output"][0]["content"][0]["text"]
    return text


@pytest.mark.parametrize("cancels", [True, False], ids=["cancelled first", "truncated alone"])
def test_what_was_not_heard_is_cut_and_the_next_response_follows(echo: Server, cancels: bool) -> None:
    with OpenAITalk(echo) as talk:
        item, heard = speaking(talk)
        cancel = [{"type": "response.cancel"}] if cancels else []
        truncate = {"type": "conversation.item.truncate", "item_id": item, "text_end": 2}
        in_a_row(talk, *cancel, truncate, created("shorter"), {"type": "response.create"})
        first, second = cancelled_then_done(talk)
        assert text_of(first).startswith(heard) and text_of(second) == "shorter"
        kinds = [event["type"] for event in talk.heard]
        cut = kinds.index("conversation.item.truncated")
        assert talk.heard[cut]["text_end"] == 2
        assert kinds.index("response.done") < cut < len(kinds) - kinds[::-1].index("response.created") - 1
        shown = talk.told(
            {"type": "conversation.item.retrieve", "item_id": item}, "conversation.item.retrieved"
        )
        assert shown["item"]["content"][0]["text"] == heard[:2]
        # The history has two tokens of the answer: nothing before them was computed again.
        before = first["usage"]["input_tokens"] + 2
        cached = second["usage"]["input_token_details"]["cached_tokens"]
        assert before - 1 <= cached <= before < second["usage"]["input_tokens"] < before + 40
        state = echo.state(talk.session["id"])
        assert state["turns"] == 2
        # The list and the session agree: the next response continues in place.
        third = talk.ask("and on")
        assert third["usage"]["input_token_details"]["cached_tokens"] >= second["usage"]["input_tokens"]
        assert text_of(third) == "and on"


def test_without_a_cut_what_was_sent_stays(echo: Server) -> None:
    with OpenAITalk(echo) as talk:
        _, heard = speaking(talk)
        in_a_row(talk, {"type": "response.cancel"}, created("shorter"), {"type": "response.create"})
        first, second = cancelled_then_done(talk)
        assert text_of(first).startswith(heard) and text_of(second) == "shorter"
        tokens = first["usage"]["output_tokens"]
        assert tokens >= 5
        assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"] + 5
        assert text_of(talk.ask("and on")) == "and on"
        assert echo.state(talk.session["id"])["turns"] == 3


def test_what_steers_may_be_cancelled_and_steered_itself(echo: Server) -> None:
    with OpenAITalk(echo) as talk:
        speaking(talk)
        for word in ("one " * 300, "two " * 300, "three"):
            in_a_row(talk, {"type": "response.cancel"}, created(word), {"type": "response.create"})
        ended = [talk.ended() for _ in range(4)]
        statuses = [each["status"] for each in ended]
        assert statuses[0] == "cancelled" and statuses[-1] == "completed"
        assert set(statuses[1:-1]) <= {"cancelled", "completed"}
        assert text_of(ended[-1]).endswith("three")
        assert text_of(talk.ask("and on")) == "and on"


def test_a_conversation_that_was_changed_is_not_steered_but_answered(echo: Server) -> None:
    """Items before the answer were deleted: the history is computed again, and the response is the same."""
    with OpenAITalk(echo) as talk:
        talk.create(message("gone", id="gone"))
        speaking(talk)
        in_a_row(
            talk,
            {"type": "response.cancel"},
            {"type": "conversation.item.delete", "item_id": "gone"},
            created("shorter"),
            {"type": "response.create"},
        )
        _, second = cancelled_then_done(talk)
        assert text_of(second).endswith("shorter")


def test_wrong_use_is_told_and_changes_nothing(echo: Server) -> None:
    with OpenAITalk(echo) as talk:
        item, _ = speaking(talk)
        error = talk.refused({"type": "response.create"})
        assert error["code"] == "conversation_already_has_active_response"
        truncate = {"type": "conversation.item.truncate", "item_id": item}
        assert talk.refused({**truncate, "audio_end_ms": 700})["param"] == "audio_end_ms"
        assert talk.refused({**truncate, "content_index": 1})["param"] == "content_index"
        assert talk.refused({**truncate, "item_id": "nobody"})["param"] == "item_id"
        talk.send({"type": "response.cancel"})
        assert talk.ended()["status"] == "cancelled"
        assert talk.refused({"type": "response.cancel"})["code"] == "response_cancel_not_active"


# --- one act ------------------------------------------------------------------------------------------


class Client:
    """A client of one conversation in process; the engine makes a step when the test says."""

    def __init__(self, engine: Joined) -> None:
        self.engine = engine
        self.outbox = Outbox()
        self._events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        state = SimpleNamespace(draining=lambda: False)
        scope = {
            "type": "websocket",
            "headers": [],
            "query_string": b"model=any",
            "subprotocols": [],
            "app": SimpleNamespace(state=state),
        }
        socket = WebSocket(scope, self._events.get, self._unused)
        socket.client_state = WebSocketState.CONNECTED
        self.talk = OpenAIConversation(socket, engine.service, ANN, self.outbox)
        self.listening = asyncio.ensure_future(self.talk.listen(None))

    async def _unused(self, _message: Any) -> None:
        raise AssertionError("messages go to the outbox")

    def send(self, *events: dict[str, Any]) -> None:
        for event in events:
            self._events.put_nowait({"type": "websocket.receive", "text": json.dumps(event)})

    def sent(self, kind: type[wire.Command]) -> list[Any]:
        return [command for command in self.engine.sent if isinstance(command, kind)]

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0)

    async def close(self) -> None:
        self._events.put_nowait({"type": "websocket.disconnect"})
        await self.listening
        self.talk.leave()
        await self.talk.finish()


@pytest.mark.parametrize("cut", [None, 2], ids=["as sent", "cut"])
def test_the_next_turn_is_sent_before_the_end_of_the_one_that_it_cuts(cut: int | None) -> None:
    async def story(engine: Joined) -> None:
        client = Client(engine)
        registry = engine.loop.scheduler.registry
        pumping = asyncio.ensure_future(engine.pump())
        client.send(created("a long one " * 50), {"type": "response.create"})
        await client.until(lambda: client.talk.active is not None and client.talk.active.sent >= 5)
        pumping.cancel()
        response = client.talk.active
        assert response is not None and response.feed is not None
        truncate = {"type": "conversation.item.truncate", "item_id": response.items[0].id, "tokens": cut}
        cuts = [] if cut is None else [truncate]
        follow = (created("shorter"), {"type": "response.create"})
        client.send({"type": "response.cancel"}, *cuts, *follow)
        await client.until(lambda: len(client.sent(wire.StartTurn)) == 2)
        assert response.feed.end is None, "the engine has made no step meanwhile"
        (stop,) = client.sent(wire.EndTurn)
        second = client.sent(wire.StartTurn)[1]
        assert (stop.keep, second.steers) == (response.sent, response.sent if cut is None else cut)
        assert not client.sent(wire.Interrupt) and not client.sent(wire.Rewind)
        steps = registry.ledger.step
        while (turn := registry.find(second.session).turn) is None or turn.request.turn_id != second.name:
            engine.commands.retry()
            engine.loop.step()
        assert registry.ledger.step - steps <= 1
        pumping = asyncio.ensure_future(engine.pump())
        await client.until(lambda: client.talk.active is None)
        assert client.talk.items[-1].text == "shorter" and len(client.talk.items) == 4
        await client.close()
        pumping.cancel()

    async def main() -> None:
        engine = Joined("echo", None, 0)
        try:
            await asyncio.wait_for(story(engine), 60)
        finally:
            engine.service.close()

    asyncio.run(main())
