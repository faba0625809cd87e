"""Steering over HTTP and over our realtime: cut what speaks after what was heard, and go on, in one act."""

import threading
import time
from typing import Any

import pytest

from holdfast.client import BadArgument, Client
from tests.server.serving import Server
from tests.server.talking import LONG, Talk, spoken


def test_a_turn_steers_the_one_that_speaks(echo: Server) -> None:
    with Talk(echo) as talk:
        name = talk.open()["id"]
        talk.commit("the long one ", turn_id="one", sampling=LONG)
        while len(spoken(talk.heard, "one")) < 20:
            talk.hear("response.delta")
        talk.say("input.append", text="shorter")
        talk.say("input.commit", turn_id="two", mode="steer", keep_tokens=5)
        cut, done = talk.hear("response.done"), talk.hear("response.done")
        assert (cut["turn_id"], cut["finish_reason"], cut["abort_reason"]) == ("one", "abort", "steered")
        assert cut["usage"]["completion_tokens"] == 5
        assert (done["turn_id"], done["text"]) == ("two", "shorter")
        # Nothing of the history is computed again: the end of the answer and the new input alone.
        history = cut["usage"]["prompt_tokens"] + 5
        assert history - 1 <= done["usage"]["cached_tokens"] <= history
        assert echo.state(name)["turns"] == 2


def test_without_a_count_what_was_sent_stays(echo: Server) -> None:
    with Talk(echo) as talk:
        talk.open()
        talk.commit("the long one ", turn_id="one", sampling=LONG)
        talk.hear("response.delta")
        talk.commit("queued", turn_id="waits")
        talk.commit("shorter", turn_id="two", mode="steer")
        assert talk.hear("error")["turn_id"] == "waits"
        cut, done = talk.hear("response.done"), talk.hear("response.done")
        assert cut["turn_id"] == "one" and 0 < cut["usage"]["completion_tokens"] < 6000
        assert done["text"] == "shorter"


def test_a_steer_that_is_refused_lets_the_turn_go_on(echo: Server) -> None:
    with Talk(echo) as talk:
        talk.open()
        talk.commit("the one ", turn_id="one", sampling={"max_tokens": 400, "ignore_eos": True})
        talk.hear("response.delta")
        talk.commit("shorter", turn_id="two", mode="steer", keep_tokens=100_000)
        kinds = {"error", "response.done"}
        heard = [talk.hear(*kinds), talk.hear(*kinds)]
        refused = next(each for each in heard if each["type"] == "error")
        assert (refused["turn_id"], refused["error"]["code"]) == ("two", "nothing_to_keep")
        done = next(each for each in heard if each["type"] == "response.done")
        assert done["usage"]["completion_tokens"] == 400
        talk.commit("x", turn_id="three", keep_tokens=4)
        assert talk.refused()["param"] == "keep_tokens"


def test_a_finished_turn_is_steered_too(echo: Server) -> None:
    with Talk(echo) as talk:
        name = talk.open()["id"]
        talk.turn("hello world", turn_id="one")
        talk.commit("and then", turn_id="two", mode="steer", keep_tokens=3)
        done = talk.hear("response.done")
        assert done["text"] == "and then"
        assert echo.state(name)["turns"] == 2


def test_it_works_over_http(echo: Server) -> None:
    name = echo.open()
    where = f"/v1/sessions/{name}/turns"
    answers: list[Any] = []

    def speak() -> None:
        answers.append(
            echo.post(where, {"input": "the long one ", "turn_id": "one", "sampling": LONG}).json()
        )

    speaking = threading.Thread(target=speak)
    speaking.start()
    deadline = time.monotonic() + 60
    while echo.state(name)["tokens"]["known"] < 40:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    body = {"input": "shorter", "turn_id": "two", "mode": "steer", "keep_tokens": 4}
    done = echo.post(where, body).json()
    speaking.join(60)
    assert done["text"] == "shorter"
    assert answers[0]["usage"]["completion_tokens"] == 4
    # Repeated, it is answered again and cuts nothing.
    assert echo.post(where, body).json()["text"] == "shorter"
    assert echo.state(name)["turns"] == 2
    refused = echo.post(where, {"input": "x", "keep_tokens": 1}).json()["error"]
    assert refused["param"] == "keep_tokens"
    fresh = echo.open()
    refused = echo.post(f"/v1/sessions/{fresh}/turns", {"input": "x", "mode": "steer"}).json()["error"]
    assert refused["code"] == "turn_not_found"


def test_the_client_appends_and_steers(echo: Server) -> None:
    with Client(echo.url) as client, client.session() as session:
        assert session.append("the river runs ") == 15
        assert session.append("stands still ", start=10) == 23
        assert session.append("today") == 28
        assert session.say().text == "the river stands still today"
        first = session.say("the long one ", max_tokens=6000, ignore_eos=True)
        pieces = iter(first)
        next(pieces)
        heard = first.tokens_settled
        turn = session.steer("shorter")
        assert turn.text == "shorter"
        assert len(first.token_ids) == heard
        assert session.turns == 3
        with session.realtime() as realtime:
            realtime.append("one two")
            realtime.replace(4, "three")
            realtime.commit(mode="steer", keep_tokens=2)
            done = next(event for event in realtime if event.type == "response.done")
            assert done.text == "one three"
        with pytest.raises(BadArgument):
            session.steer("no", keep="none")
