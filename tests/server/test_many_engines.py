"""Engines apart from API processes: any API process serves any session, and reports are of all engines."""

import signal
import threading
from typing import Any

import httpx
import pytest

from tests.plain import NO_TLS
from tests.preloaded import commands
from tests.server.apart import SMALL, Apart, until
from tests.server.serving import Server
from tests.server.talking import LONG, Talk


@pytest.fixture
def four(apart: Apart) -> tuple[Server, Server]:
    """Two API processes over two engines."""
    engines = [apart.engine("--engine-id", f"e{number}", *SMALL) for number in range(2)]
    return apart.api(*engines), apart.api(*engines)


def engine_of(server: Server, name: str) -> str:
    return str(server.state(name)["engine"])


def test_sessions_are_spread_and_any_api_process_serves_them(four: tuple[Server, Server]) -> None:
    here, there = four
    names = [here.open(f"s-{number}", metadata={"n": number}) for number in range(6)]
    assert {engine_of(there, name) for name in names} == {"e0", "e1"}
    known = dict.fromkeys(names, 0)
    for turn in range(3):
        for place, name in enumerate(names):
            server = four[(turn + place) % 2]
            answer = server.say(name, f"word {turn}")
            assert answer["text"] == f"word {turn}"
            assert answer["usage"]["cached_tokens"] >= known[name] - 1
            known[name] = answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"]
    for server in four:
        listed = server.get("/v1/sessions").json()["sessions"]
        assert {each["id"]: each["turns"] for each in listed} == dict.fromkeys(names, 3)
        assert {each["engine"] for each in listed} == {"e0", "e1"}
        assert [each["metadata"] for each in listed if each["id"] == "s-4"] == [{"n": 4}]
    there.check_clean()


def test_what_one_api_process_changes_the_other_shows(four: tuple[Server, Server]) -> None:
    here, there = four
    name = here.open("changed", system="Be brief.")
    assert (
        there.http.patch(f"/v1/sessions/{name}", json={"metadata": {"a": 1}, "pin": True}).status_code == 200
    )
    assert here.state(name)["metadata"] == {"a": 1}
    here.say(name, "one")
    there.say(name, "two")
    assert there.post(f"/v1/sessions/{name}/rewind", {"to_turn": 1}).status_code == 200
    assert here.state(name)["turns"] == 1
    fork = there.post(f"/v1/sessions/{name}/fork", {"id": "child"}).json()
    assert fork["engine"] == engine_of(here, name) == engine_of(here, "child"), "a fork stays with its parent"
    refused = here.post("/v1/sessions", {"id": "child"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "session_exists")
    assert there.http.delete(f"/v1/sessions/{name}").status_code == 200
    gone = until(lambda: here.get(f"/v1/sessions/{name}"))
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "session_not_found")
    assert here.http.delete(f"/v1/sessions/{name}").status_code == 200, "idempotent"
    assert here.open(name) == name and there.say(name, "anew")["text"] == "anew"
    here.check_clean()


def test_a_session_that_an_api_process_never_heard_of_is_asked_for(apart: Apart) -> None:
    engines = [apart.engine("--engine-id", f"e{number}", *SMALL) for number in range(2)]
    here = apart.api(*engines)
    names = [here.open(f"early-{number}") for number in range(4)]
    for name in names:
        here.say(name, "before")
    late = apart.api(*engines)
    for name in names:
        assert late.state(name)["turns"] == 1
        assert late.say(name, "after")["usage"]["cached_tokens"] > 0
    missing = late.get("/v1/sessions/nowhere")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "session_not_found")


def test_chats_that_are_sent_whole_are_placed_and_go_on(four: tuple[Server, Server]) -> None:
    here, _ = four
    chats: list[list[dict[str, str]]] = [[{"role": "user", "content": f"chat {each}"}] for each in range(4)]
    for turn in range(3):
        for chat in chats:
            body = {"model": "echo", "messages": chat}
            answer = here.post("/v1/chat/completions", body).json()
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert (cached > 0) or not turn
            chat += [answer["choices"][0]["message"], {"role": "user", "content": f"more {turn}"}]
            for message in chat:
                message.pop("refusal", None)  # type: ignore[arg-type]
    page = here.get("/metrics").text
    assert 'holdfast_conversations_total{how="new"} 4.0' in page
    assert 'holdfast_conversations_total{how="found"} 8.0' in page
    computed = [line for line in page.splitlines() if line.startswith("holdfast_generated_tokens_total{")]
    assert len(computed) == 2
    here.check_clean()


def test_reports_are_of_all_engines(four: tuple[Server, Server]) -> None:
    here, there = four
    for number in range(4):
        here.say(here.open(f"r-{number}"), "some words")
    memory = there.get("/v1/memory").json()
    (pool,) = memory["pools"]
    assert pool["units"] == 2048 and sum(pool["holders"].values()) == 2048
    assert {each["engine"] for each in memory["engines"]} == {"e0", "e1"}
    parts = [part["pools"][0]["holders"]["SESSION"] for part in memory["engines"]]
    assert sum(parts) == pool["holders"]["SESSION"] > 0 and all(parts)
    assert {each["engine"] for each in memory["top"]} == {"e0", "e1"}
    page = there.get("/metrics").text
    for engine in ("e0", "e1"):
        assert f'holdfast_engine_up{{engine="{engine}"}} 1.0' in page
        assert f'holdfast_units{{component="full",engine="{engine}",holder="FREE",tier="device"}}' in page
    top = commands.run("top", "--once", "--url", there.url, text=True)
    assert top.returncode == 0 and "e0" in top.stdout and "e1" in top.stdout
    health = there.get("/health/ready").json()
    assert health == {"status": "ready", "engines": {"e0": "up", "e1": "up"}}
    there.check_clean()


def test_abort_all_and_flush_go_to_all_engines(apart: Apart) -> None:
    room = ("--context-length", "100000", "--kv-tokens", "200000")
    engines = [apart.engine("--engine-id", f"e{number}", *room) for number in range(2)]
    server = apart.api(*engines)
    names = [server.open(f"a-{number}") for number in range(4)]
    assert {engine_of(server, name) for name in names} == {"e0", "e1"}
    body = {"input": "abc", "sampling": {"max_tokens": 90_000, "ignore_eos": True}}
    answers: list[httpx.Response] = []

    def take(name: str) -> None:
        answers.append(
            httpx.post(f"{server.url}/v1/sessions/{name}/turns", json=body, timeout=60, verify=NO_TLS)
        )

    calls = [threading.Thread(target=take, args=(name,)) for name in names]
    for call in calls:
        call.start()
    until(lambda: all(server.state(name)["state"] == "RUNNING" for name in names))
    assert server.post("/abort_request", {"abort_all": True}).status_code == 200
    for call in calls:
        call.join()
    assert [answer.json()["finish_reason"] for answer in answers] == ["abort"] * 4
    server.post("/v1/completions", {"model": "echo", "prompt": "x" * 200, "max_tokens": 1})
    server.close_all()
    server.post("/flush_cache")
    until(lambda: _held(server) == [0, 0])


def _held(server: Server) -> list[int]:
    """Units that are not free, of each engine."""
    parts: list[dict[str, Any]] = server.get("/v1/memory").json()["engines"]
    return [part["pools"][0]["units"] - part["pools"][0]["holders"]["FREE"] for part in parts]


def test_a_realtime_session_goes_on_through_another_api_process(four: tuple[Server, Server]) -> None:
    here, there = four
    with Talk(here) as talk:
        opened = talk.open("voice")
        talk.turn("one")
        before = talk.last_seq()
    with Talk(there) as talk:
        back = talk.open("voice", resume_after_seq=before)
        assert (back["resumed"], back["seq"], back["turns"]) == (True, before, 1)
        assert talk.turn("two")["turns"] == 2
        assert [message["seq"] for message in talk.heard[1:]] == list(range(before + 1, talk.last_seq() + 1))
    assert opened["id"] == back["id"] == "voice"
    there.check_clean()


def test_a_realtime_client_hears_what_it_missed_through_another_api_process(
    four: tuple[Server, Server],
) -> None:
    here, there = four
    talk = Talk(here)
    talk.open("voice")
    talk.turn("before", turn_id="zero")
    talk.commit("la ", turn_id="one", sampling=LONG)
    talk.hear("response.delta")
    last = talk.last_seq()
    talk.drop()
    with Talk(there) as again:
        opened = again.open("voice", resume_after_seq=last)
        assert (opened["resumed"], opened["seq"], opened["turns"]) == (True, last, 1)
        done = again.hear("response.done")
        assert (done["turn_id"], done["finish_reason"]) == ("one", "abort")
        assert [m["seq"] for m in again.heard[1:]] == list(range(last + 1, last + len(again.heard)))
        assert again.turn("after")["text"] == "after"
        last = again.last_seq()
    with Talk(here) as back:
        assert back.open("voice", resume_after_seq=0)["resumed"] is True, "it is handed back with all of it"
        first = back.hear("response.done")
        assert (first["turn_id"], first["text"]) == ("zero", "before")
        while back.last_seq() < last:
            back.hear("response.done")
        assert [message["seq"] for message in back.heard[1:]] == list(range(1, last + 1))
    for server in four:
        server.check_clean()


def test_a_second_connection_takes_a_session_over_from_another_api_process(
    four: tuple[Server, Server],
) -> None:
    here, there = four
    with Talk(here) as talk, Talk(there) as other:
        talk.open("voice")
        talk.commit("la ", turn_id="one", sampling=LONG)
        talk.hear("response.delta")
        other.open("voice")
        assert talk.closed_with() == 1008
        assert other.turn("mine")["text"] == "mine"
        assert other.heard[-1]["turns"] == 1, "the turn of the first connection was rolled back"
    there.check_clean()


def test_an_api_process_that_died_keeps_nobody_waiting_for_its_messages(four: tuple[Server, Server]) -> None:
    here, there = four
    with Talk(here) as talk:
        talk.open("voice")
        talk.turn("one")
        before = talk.last_seq()
        here.process.kill()
        here.process.wait()
    with Talk(there) as talk:
        back = talk.open("voice", resume_after_seq=before)
        assert (back["resumed"], back["turns"]) == (False, 1)
        assert talk.turn("two")["seq"] > before


def test_an_api_process_that_ends_leaves_what_its_clients_missed(four: tuple[Server, Server]) -> None:
    here, there = four
    with Talk(here) as talk:
        talk.open("voice")
        talk.turn("one", turn_id="t1")
    assert here.stop() == 0
    with Talk(there) as talk:
        back = talk.open("voice", resume_after_seq=1)
        assert (back["resumed"], back["turns"]) == (True, 1)
        done = talk.hear("response.done")
        assert (done["turn_id"], done["text"]) == ("t1", "one")
        assert talk.turn("two")["seq"] > done["seq"]
    there.check_clean()


def test_who_comes_to_a_stopped_api_processs_neighbour_waits_a_moment_and_goes_on(
    four: tuple[Server, Server],
) -> None:
    here, there = four
    with Talk(here) as talk:
        talk.open("voice")
        talk.turn("one")
        before = talk.last_seq()
    here.process.send_signal(signal.SIGSTOP)
    try:
        with Talk(there) as talk:
            back = talk.open("voice", resume_after_seq=before)
            assert (back["resumed"], back["turns"]) == (False, 1)
            assert talk.turn("two")["seq"] > before
    finally:
        here.process.send_signal(signal.SIGCONT)
    there.check_clean()


def test_responses_are_found_through_another_api_process(four: tuple[Server, Server]) -> None:
    here, there = four
    first = here.post("/v1/responses", {"model": "echo", "input": "one"}).json()
    second = there.post(
        "/v1/responses", {"model": "echo", "input": "two", "previous_response_id": first["id"]}
    )
    assert second.status_code == 200, second.text
    assert second.json()["usage"]["input_tokens_details"]["cached_tokens"] > 0
    assert here.get(f"/v1/responses/{second.json()['id']}").json()["status"] == "completed"
