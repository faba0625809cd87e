"""Realtime conversations over a real WebSocket: duplex, interruptions, order, coming back after a drop."""

import asyncio
import json
import os
import signal
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus

from holdfast.server.routes.realtime_outbox import Outbox
from tests.server.conftest import Serve
from tests.server.serving import Server
from tests.server.talking import LONG, Talk, spoken


def test_a_turn_is_started_spoken_and_done(echo: Server) -> None:
    with Talk(echo) as talk:
        opened = talk.open("plain", system="Be brief.", metadata={"who": "me"}, ttl=600)
        assert (opened["id"], opened["turns"], opened["seq"], opened["resumed"]) == ("plain", 0, 0, False)
        assert (opened["ttl"], opened["metadata"]) == (600, {"who": "me"})
        done = talk.turn("straße 東京 🙂", turn_id="one")
        assert done["text"] == spoken(talk.heard, "one") == "straße 東京 🙂"
        assert done["finish_reason"] == "stop"
        assert done["usage"]["cached_tokens"] == 0
        assert [message["seq"] for message in talk.heard] == list(range(len(talk.heard)))
        deltas = [message for message in talk.heard if message["type"] == "response.delta"]
        place = 0
        for delta in deltas:
            assert delta["index"] == place
            place += len(delta["token_ids"])
        assert place == done["usage"]["completion_tokens"]
        again = talk.turn("second", turn_id="two")
        assert again["usage"]["cached_tokens"] == done["usage"]["prompt_tokens"] + place
    assert echo.state("plain")["turns"] == 2


def test_pieces_of_input_make_one_turn_and_token_ids_are_taken_as_they_are(echo: Server) -> None:
    with Talk(echo) as talk:
        talk.open()
        for piece in ("one ", "two ", "three"):
            talk.say("input.append", text=piece)
        talk.say("input.commit")
        assert talk.hear("response.done")["text"] == "one two three"
        ids = echo.post("/tokenize", {"prompt": "bare", "model": "echo"}).json()["tokens"]
        talk.say("input.append", token_ids=ids[:2])
        talk.say("input.append", token_ids=ids[2:])
        talk.say("input.commit")
        assert talk.hear("response.done")["text"] == "bare"


def test_input_may_be_appended_and_committed_while_the_model_speaks(echo: Server) -> None:
    with Talk(echo) as talk:
        talk.open()
        talk.commit("first ", turn_id="one", sampling={"max_tokens": 800, "ignore_eos": True})
        talk.hear("response.delta")
        talk.commit("second", turn_id="two", mode="after")
        talk.commit("third", turn_id="three")
        done = [talk.hear("response.done") for _ in range(3)]
        assert [end["turn_id"] for end in done] == ["one", "two", "three"]
        assert [end["usage"]["completion_tokens"] for end in done] == [800, 7, 6]
        starts = [m["turn_id"] for m in talk.heard if m["type"] in ("response.started", "response.done")]
        assert starts == ["one", "one", "two", "two", "three", "three"]


def test_cutting_in_keeps_exactly_what_was_sent_and_takes_back_what_waits(echo: Server) -> None:
    with Talk(echo) as talk:
        name = talk.open()["id"]
        talk.commit("the long one ", turn_id="one", sampling=LONG)
        talk.hear("response.delta")
        talk.commit("never begun", turn_id="two")
        talk.commit("cut in", turn_id="three", mode="interrupt")
        taken_back = talk.hear("error")
        assert (taken_back["turn_id"], taken_back["error"]["code"]) == ("two", "turn_cancelled")
        cut = talk.hear("response.done")
        assert (cut["turn_id"], cut["finish_reason"], cut["abort_reason"]) == ("one", "abort", "interrupt")
        assert cut["text"] == spoken(talk.heard, "one")
        assert 0 < cut["usage"]["completion_tokens"] < 6000
        done = talk.hear("response.done")
        assert (done["turn_id"], done["text"]) == ("three", "cut in")
        kept = cut["usage"]["prompt_tokens"] + cut["usage"]["completion_tokens"]
        assert done["usage"]["cached_tokens"] == kept
    assert echo.state(name)["turns"] == 2


@pytest.mark.parametrize("keep", [{"keep_tokens": 3}, {"keep": "all"}, {"keep": "none"}])
def test_an_interruption_keeps_what_it_asks_for(echo: Server, keep: dict[str, Any]) -> None:
    with Talk(echo) as talk:
        name = talk.open()["id"]
        talk.commit("abcdefgh", turn_id="one", sampling=LONG)
        heard = 0
        while heard < 3:
            heard += len(talk.hear("response.delta")["token_ids"])
        talk.say("response.interrupt", turn_id="one", **keep)
        done = talk.hear("response.done")
        assert done["finish_reason"] == "abort"
        kept = done["usage"]["completion_tokens"]
        if "keep_tokens" in keep:
            assert (kept, done["text"]) == (3, "abc")
        elif keep["keep"] == "all":
            assert 3 <= kept < 6000
        else:
            assert kept == 0
        assert echo.state(name)["turns"] == (0 if keep == {"keep": "none"} else 1)
        assert talk.turn("go on")["text"] == "go on"


def test_a_finished_turn_can_still_be_cut(echo: Server) -> None:
    with Talk(echo) as talk:
        talk.open()
        done = talk.turn("all of this", turn_id="one")
        talk.say("response.interrupt", turn_id="one", keep_tokens=3)
        stands = talk.hear("session.rewound", "error")
        assert stands["turn_id"] == "one"
        assert stands["tokens"]["known"] == done["usage"]["prompt_tokens"] + 3


def test_rewinding_and_forking_take_their_place_in_the_order(echo: Server) -> None:
    with Talk(echo) as talk:
        name = talk.open()["id"]
        talk.commit("one")
        talk.commit("two")
        talk.say("session.fork", id="branch", request_id="f")
        talk.say("session.rewind", to_turn=1, request_id="r")
        talk.commit("three")
        forked, rewound = talk.hear("session.forked"), talk.hear("session.rewound")
        assert (forked["id"], forked["parent"], forked["turns"]) == ("branch", name, 2)
        assert (rewound["id"], rewound["turns"]) == (name, 1)
        assert (forked["request_id"], rewound["request_id"]) == ("f", "r")
        assert talk.hear("response.done")["text"] == "three"
        talk.say("session.rewind", to_turn=9)
        assert talk.refused()["param"] == "to_turn"
    with Talk(echo) as other:
        assert other.open("branch")["turns"] == 2
        assert other.turn("from here")["text"] == "from here"


def test_closing_rolls_back_the_turn_in_flight_and_the_connection_opens_another(echo: Server) -> None:
    with Talk(echo) as talk:
        talk.open("short-lived")
        talk.commit("for ever ", turn_id="one", sampling=LONG)
        talk.hear("response.delta")
        talk.say("session.close")
        talk.hear("session.closed")
        ends = [message["type"] for message in talk.heard if message["type"] in ("response.done", "error")]
        assert ends == ["response.done"]
        talk.commit("too late")
        assert talk.refused()["code"] == "session_not_open"
        assert talk.refused()["code"] == "session_not_open"
        assert talk.open("another")["turns"] == 0
        assert talk.turn("fresh")["text"] == "fresh"
    assert echo.get("/v1/sessions/short-lived").status_code == 404


@pytest.mark.parametrize("name", ["again", "the-next"])
def test_a_session_may_be_opened_right_behind_the_close_of_one_that_speaks(echo: Server, name: str) -> None:
    with Talk(echo) as talk:
        talk.open("again")
        talk.turn("before")
        talk.commit("for ever ", turn_id="cut", sampling=LONG)
        talk.hear("response.delta")
        talk.say("session.close")
        talk.say("session.open", id=name)
        talk.commit("fresh", turn_id="fresh")
        opened = talk.hear("session.opened")
        assert (opened["id"], opened["turns"]) == (name, 0)
        assert talk.hear("response.done")["text"] == "fresh"
        kinds = [message["type"] for message in talk.heard]
        assert kinds.index("session.closed") < kinds.index("session.opened", 1)
        assert "error" not in kinds


def test_a_session_that_others_close_says_so(echo: Server) -> None:
    with Talk(echo) as talk:
        talk.open("shared")
        echo.http.delete("/v1/sessions/shared")
        closed = talk.hear("session.closed")
        assert (closed["id"], closed["reason"]) == ("shared", "closed")


def test_an_expired_session_says_so(echo: Server) -> None:
    with Talk(echo) as talk:
        talk.open("brief", ttl=0.2)
        assert talk.hear("session.closed")["reason"] == "expired"


# --- coming back ------------------------------------------------------------------------------------


def test_a_client_that_was_cut_off_hears_what_it_missed_and_how_the_turn_ended(echo: Server) -> None:
    talk = Talk(echo)
    name = talk.open()["id"]
    talk.turn("before", turn_id="zero")
    talk.commit("la ", turn_id="one", sampling=LONG)
    talk.hear("response.delta")
    last = talk.last_seq()
    talk.drop()
    echo_idle(echo, name)
    with Talk(echo) as again:
        opened = again.open(name, resume_after_seq=last)
        assert (opened["resumed"], opened["seq"], opened["turns"]) == (True, last, 1)
        done = again.hear("response.done")
        assert (done["turn_id"], done["finish_reason"], done["text"]) == ("one", "abort", "")
        assert [m["seq"] for m in again.heard[1:]] == list(range(last + 1, last + len(again.heard)))
        assert again.turn("after")["text"] == "after"


def test_a_turn_that_keeps_on_abort_is_kept(echo: Server) -> None:
    talk = Talk(echo)
    name = talk.open()["id"]
    talk.commit("la ", turn_id="one", sampling=LONG, on_abort="keep")
    talk.hear("response.delta")
    last = talk.last_seq()
    talk.drop()
    state = echo_idle(echo, name)
    assert state["turns"] == 1
    with Talk(echo) as again:
        again.open(name, resume_after_seq=last)
        done = again.hear("response.done")
        assert done["usage"]["prompt_tokens"] + done["usage"]["completion_tokens"] == state["tokens"]["known"]


def echo_idle(echo: Server, name: str) -> dict[str, Any]:
    """The session, once its turn has ended."""
    for _ in range(2000):
        state = echo.state(name)
        if state["state"] == "IDLE":
            return state
    raise AssertionError(f"the turn goes on: {state}")


def test_a_finished_turn_that_is_committed_again_is_answered_again_and_not_run(echo: Server) -> None:
    talk = Talk(echo)
    name = talk.open()["id"]
    first = talk.turn("once", turn_id="one")
    talk.drop()
    with Talk(echo) as again:
        again.open(name, resume_after_seq=0)
        again.commit("once", turn_id="one")
        replayed, repeated = again.hear("response.done"), again.hear("response.done")
        assert replayed["seq"] == first["seq"]
        assert repeated["text"] == "once"
        assert repeated["token_ids"] == first["token_ids"]
        again.commit("something else", turn_id="one")
        refused = again.hear("error")
        assert (refused["turn_id"], refused["error"]["code"]) == ("one", "turn_conflict")
    assert echo.state(name)["turns"] == 1


def test_a_turn_that_is_under_way_is_not_started_twice(echo: Server) -> None:
    with Talk(echo) as talk:
        talk.open()
        sampling = {"max_tokens": 600, "ignore_eos": True}
        talk.commit("la ", turn_id="one", sampling=sampling)
        talk.commit("la ", turn_id="one", sampling=sampling)
        talk.commit("end", turn_id="two")
        while talk.hear("response.done")["turn_id"] != "two":
            pass
        started = [message["turn_id"] for message in talk.heard if message["type"] == "response.started"]
        assert started == ["one", "two"]


def test_another_connection_takes_over_and_hears_the_turn_go_on(echo: Server) -> None:
    with Talk(echo) as old, Talk(echo) as new:
        name = old.open()["id"]
        old.commit("on ", turn_id="one", sampling={"max_tokens": 3000, "ignore_eos": True})
        old.hear("response.delta")
        new.open(name, resume_after_seq=0)
        done = new.hear("response.done")
        assert (done["finish_reason"], done["usage"]["completion_tokens"]) == ("length", 3000)
        assert spoken(new.heard, "one") == done["text"]
        assert old.closed_with() == 1008


def test_what_is_no_longer_there_is_said_to_be_missing(echo: Server) -> None:
    name = echo.open()
    with Talk(echo) as talk:
        opened = talk.open(name, resume_after_seq=400)
        assert (opened["resumed"], opened["seq"]) == (False, 400)
        assert talk.turn("on")["seq"] > 400
        talk.say("session.close")
        talk.hear("session.closed")
        talk.say("session.open", id=name, resume_after_seq=5)
        refused = talk.refused()
        assert (refused["code"], refused["param"]) == ("session_not_found", "id")
        talk.say("session.open", id="never-was", resume_after_seq=5)
        refused = talk.refused()
        assert (refused["code"], refused["param"]) == ("session_not_found", "id")
        talk.say("session.open", resume_after_seq=5)
        assert talk.refused()["param"] == "resume_after_seq"


def test_a_number_that_no_message_can_have_leaves_the_numbers_as_they_are(echo: Server) -> None:
    """Numbers go on from it otherwise, and soon no client can name the last message that it got."""
    with Talk(echo) as talk:
        name = talk.open()["id"]
        last = talk.turn("before")["seq"]
    with Talk(echo) as again:
        again.say("session.open", id=name, resume_after_seq=1 << 53)
        refused = again.refused()
        assert (refused["code"], refused["param"]) == ("invalid_value", "resume_after_seq")
        assert again.open(name, resume_after_seq=last)["resumed"]
    with Talk(echo) as far:
        assert (far.open(name, resume_after_seq=1 << 52)["resumed"], far.turn("on")["text"]) == (False, "on")
    with Talk(echo) as behind:
        opened = behind.open(name, resume_after_seq=far.last_seq())
        assert (opened["resumed"], opened["seq"]) == (True, far.last_seq()), "what was sent may be named"


def test_no_more_than_a_bound_is_kept_for_those_who_come_back(echo: Server) -> None:
    talk = Talk(echo)
    name = talk.open()["id"]
    # A reader slower than the engine is told a turn in fewer and larger pieces: it may take several turns.
    for number in range(10):
        if number:
            talk.say("session.rewind", to_turn=0)
            talk.hear("session.rewound")
        talk.commit("la ", turn_id=f"turn-{number}", sampling=LONG)
        done = talk.hear("response.done")
        spoken_bytes = sum(len(json.dumps(message)) for message in talk.heard)
        if spoken_bytes > 300 << 10:
            break
    talk.drop()
    assert spoken_bytes > 256 << 10, "more than is kept"
    with Talk(echo) as again:
        opened = again.open(name, resume_after_seq=0)
        assert (opened["resumed"], opened["seq"], opened["turns"]) == (False, done["seq"], 1)
        assert again.turn("next")["text"] == "next"


def test_an_engine_that_dies_under_a_turn_is_told_and_the_connection_stays(serve: Serve) -> None:
    server = serve("echo", "--context-length", "8192")
    with Talk(server) as talk:
        talk.open("doomed")
        talk.commit("la ", turn_id="one", sampling=LONG)
        talk.hear("response.delta")
        os.kill(server.engine_pid(), signal.SIGKILL)
        lost = talk.hear("error")
        assert (lost["turn_id"], lost["error"]["code"]) == ("one", "engine_lost")
        assert talk.hear("session.closed")["reason"] == "lost"
        server.wait_ready()
        talk.open("risen")
        assert talk.turn("alive")["text"] == "alive"


# --- keys, origins, back-pressure -------------------------------------------------------------------


def test_keys_come_in_a_header_or_as_a_subprotocol(serve: Serve) -> None:
    server = serve("echo", environment={"HOLDFAST_API_KEYS": "ann:secret-a,bob:secret-b"})
    for options in ({}, {"subprotocols": ["holdfast", "holdfast.key.wrong"]}):
        with pytest.raises(InvalidStatus) as refused:
            Talk(server, **options)
        assert refused.value.response.status_code == 401
    with (
        Talk(server, additional_headers={"Authorization": "Bearer secret-a"}) as ann,
        Talk(server, subprotocols=["holdfast", "holdfast.key.secret-b"]) as bob,
    ):
        assert bob.connection.subprotocol == "holdfast"
        ann.open("same-name")
        assert bob.open("same-name")["turns"] == 0
        ann.turn("mine")
        assert bob.turn("yours")["usage"]["cached_tokens"] == 0
        for talk in (ann, bob):
            talk.say("session.close")
            talk.hear("session.closed")


def test_pages_of_other_sites_may_not_connect(echo: Server) -> None:
    with pytest.raises(InvalidStatus) as refused:
        Talk(echo, origin="https://elsewhere.example")
    assert refused.value.response.status_code == 403
    with Talk(echo, origin=echo.url) as talk:
        assert talk.open()["turns"] == 0


def test_a_reader_that_never_reads_is_closed(echo: Server) -> None:
    with Talk(echo, max_queue=1, compression=None) as talk:
        talk.open("flooded")
        wrong = json.dumps({"type": "response.interrupt", "turn_id": "x" * 128})
        for _ in range(100_000):  # Several times what the sockets between the two can hold.
            talk.connection.send(wrong)
        assert talk.closed_with() == 1008
    with Talk(echo) as talk:
        assert talk.open("flooded")["turns"] == 0


def test_who_speaks_waits_for_a_slow_reader_and_gives_up_on_one_that_stands_still() -> None:
    async def story() -> None:
        box = Outbox(bytes_max=100, bytes_low=10, stall_seconds=0.01)
        box.put("a" * 20)
        waiting = asyncio.create_task(box.room())
        assert await box.take() == "a" * 20
        await waiting
        assert box.closing is None
        box.put("b" * 20)
        await box.room()
        assert box.closing is not None
        assert box.closing[0] == 1008
        assert await box.take() is None
        full = Outbox(bytes_max=100)
        for _ in range(11):
            full.put("c" * 10)
        assert full.closing == box.closing

    asyncio.run(story())


def test_a_message_longer_than_what_may_pile_up_is_sent_all_the_same() -> None:
    async def story() -> None:
        box = Outbox(bytes_max=100, bytes_low=10)
        said = ["a" * 10, "b" * 1000, "c" * 10]
        for text in said:
            box.put(text)
        assert [await box.take() for _ in said] == said
        assert (box.bytes, box.closing) == (0, None)
        for _ in range(5):
            box.put("d" * 1000)
        assert box.closing is not None

    asyncio.run(story())
