"""Input that is computed while it is said: over our realtime, OpenAI's, and HTTP."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.server.listening import SAID_SECONDS, Listening
from tests.server.openai_talking import OpenAITalk, message
from tests.server.serving import Server
from tests.server.talking import LONG, Talk

WORDS = "the river runs cold and deep under old stones today and again tomorrow "


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def listens(server: Server, session: str) -> bool:
    return bool(server.state(session)["state"] == "LISTENING")


def held(server: Server) -> int:
    """Pages of turns in flight."""
    pools = server.get("/v1/memory").json()["pools"]
    return sum(int(pool["holders"]["TURN"]) for pool in pools)


def test_appended_text_is_computed_before_it_is_committed(echo: Server) -> None:
    with Talk(echo) as talk:
        name = talk.open()["id"]
        first = talk.turn("hello", turn_id="one")
        assert "ahead_tokens" not in first["usage"]
        talk.say("input.append", text=WORDS)
        until(lambda: listens(echo, name))
        talk.say("input.append", text="and so on ")
        state = echo.state(name)
        assert state["turns"] == 1
        assert (
            state["tokens"]["known"] == first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
        )
        talk.say("input.append", text="for ever")
        until(lambda: held(echo) > 0)
        talk.say("input.commit", turn_id="two")
        done = talk.hear("response.done")
        assert done["text"] == f"{WORDS}and so on for ever"
        usage = done["usage"]
        assert 40 < usage["ahead_tokens"] < usage["computed_tokens"]
        assert echo.state(name)["turns"] == 2


def test_a_revision_is_what_was_said(echo: Server) -> None:
    with Talk(echo) as talk:
        name = talk.open()["id"]
        talk.say("input.append", text=WORDS)
        until(lambda: listens(echo, name))
        talk.say("input.replace", start=10, text="stands still and ")
        talk.say("input.append", text="waits")
        talk.say("input.commit")
        assert talk.hear("response.done")["text"] == f"{WORDS[:10]}stands still and waits"
        talk.say("input.replace", start=1, text="x")
        assert talk.refused()["code"] == "unknown_position"
        talk.say("input.append", token_ids=[5, 6])
        talk.say("input.replace", start=0, text="x")
        assert talk.refused()["param"] == "text"
        talk.say("input.replace", text="x")
        assert talk.refused()["param"] == "start"


@pytest.mark.parametrize("way", ["emptied", "closed", "dropped"])
def test_what_is_not_committed_was_never_said(echo: Server, way: str) -> None:
    with Talk(echo) as talk:
        name = talk.open()["id"]
        talk.turn("hello", turn_id="one")
        known = echo.state(name)["tokens"]["known"]
        talk.say("input.append", text=WORDS)
        until(lambda: listens(echo, name))
        if way == "emptied":
            talk.say("input.replace", start=0, text="")
        elif way == "closed":
            talk.say("session.close")
            talk.hear("session.closed")
            until(lambda: held(echo) == 0)
            return
        else:
            talk.drop()
        until(lambda: echo.state(name)["state"] == "IDLE")
        assert (echo.state(name)["tokens"]["known"], echo.state(name)["turns"]) == (known, 1)
        assert held(echo) == 0


def test_other_calls_on_the_session_take_it_back(echo: Server) -> None:
    with Talk(echo) as talk:
        name = talk.open()["id"]
        talk.turn("hello", turn_id="one")
        talk.say("input.append", text=WORDS)
        until(lambda: listens(echo, name))
        forked = echo.post(f"/v1/sessions/{name}/fork", {})
        assert forked.status_code == 201, forked.text
        assert forked.json()["tokens"]["known"] == echo.state(name)["tokens"]["known"]
        talk.say("input.commit", turn_id="two")
        assert talk.hear("response.done")["text"].strip() == WORDS.strip()


def test_input_that_comes_while_the_model_speaks_is_computed_after_it(echo: Server) -> None:
    with Talk(echo) as talk:
        name = talk.open()["id"]
        talk.commit("the long one ", turn_id="one", sampling=LONG)
        talk.hear("response.delta")
        talk.say("input.append", text=WORDS)
        time.sleep(0.1)
        talk.say("response.interrupt", turn_id="one", keep="all")
        talk.hear("response.done")
        until(lambda: listens(echo, name))
        talk.say("input.commit", turn_id="two")
        assert talk.hear("response.done")["usage"]["ahead_tokens"] > 40


def post_turn(echo: Server, name: str, **body: Any) -> Any:
    return echo.post(f"/v1/sessions/{name}/turns", body)


def test_input_over_http_waits_for_its_turn(echo: Server) -> None:
    name = echo.open()
    where = f"/v1/sessions/{name}/input"
    assert post_turn(echo, name).json()["error"]["code"] == "empty_turn"
    assert echo.post(where, {"text": WORDS}).json() == {"id": name, "characters": len(WORDS)}
    until(lambda: listens(echo, name))
    assert echo.post(where, {"text": "stands ", "start": 10}).json()["characters"] == 17
    refused = echo.post(where, {"text": "x", "start": 18}).json()["error"]
    assert (refused["code"], refused["param"]) == ("unknown_position", "start")
    echo.post(where, {"text": "still"})
    done = post_turn(echo, name, turn_id="one").json()
    assert done["text"] == f"{WORDS[:10]}stands still"
    assert post_turn(echo, name, turn_id="one").json()["text"] == done["text"]
    assert echo.state(name)["turns"] == 1
    assert post_turn(echo, name, turn_id="two").json()["error"]["code"] == "empty_turn"
    # A turn with an input of its own replaces what was said.
    echo.post(where, {"text": WORDS})
    until(lambda: listens(echo, name))
    assert post_turn(echo, name, input="the river stops").json()["text"] == "the river stops"


def test_items_of_openai_s_clients_are_computed_before_their_response(echo: Server) -> None:
    with OpenAITalk(echo) as talk:
        name = talk.session["id"]
        talk.told({"type": "conversation.item.create", "item": message(WORDS)}, "conversation.item.done")
        until(lambda: echo.get(f"/v1/sessions/{name}").status_code == 200 and listens(echo, name))
        talk.told({"type": "conversation.item.create", "item": message("more")}, "conversation.item.done")
        talk.send({"type": "response.create"})
        done = talk.hear("response.done")["response"]
        assert done["status"] == "completed"
        assert done["output"][0]["content"][0]["text"] == "more"
        assert echo.state(name)["turns"] == 1
        talk.told({"type": "conversation.item.create", "item": message(WORDS)}, "conversation.item.done")
        until(lambda: listens(echo, name))
        assert echo.state(name)["turns"] == 1


def test_input_over_http_is_forgotten_a_while_after_its_last_piece() -> None:
    now = [0.0]
    listening = Listening(None, None, lambda: now[0])  # type: ignore[arg-type]
    first, second, third = (SimpleNamespace(tenant="t", name=name) for name in "abc")
    for record in (first, second):
        listening.said(record).text = "said"  # type: ignore[arg-type]
    now[0] = SAID_SECONDS - 1
    assert listening.said(first).text == "said"  # type: ignore[arg-type]
    now[0] = SAID_SECONDS + 1
    listening.said(third)  # type: ignore[arg-type]
    assert [key.partition("/")[2] for key in listening._said] == ["a", "c"]
    assert listening.said(second).text == ""  # type: ignore[arg-type]
    assert listening.take(first, "t-1") == "said"  # type: ignore[arg-type]
