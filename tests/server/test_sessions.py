"""Sessions over HTTP: what the calls answer, and that only what is new is ever computed."""

import json
import threading
import time
from typing import Any

import httpx
import pytest

from tests.plain import NO_TLS
from tests.server.conftest import Serve
from tests.server.serving import Server


def events_of(response: httpx.Response) -> list[tuple[str, dict[str, Any]]]:
    """The server-sent events of a whole stream."""
    events: list[tuple[str, dict[str, Any]]] = []
    name = ""
    for line in response.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            events.append((name, json.loads(line.removeprefix("data: "))))
    return events


def test_a_session_has_the_fields_of_the_interface(echo: Server) -> None:
    name = echo.open("fields", ttl=600, metadata={"who": "me"}, system="Be brief.")
    shown = echo.state(name)
    assert set(shown) >= {
        "id", "state", "tier", "turns", "tokens", "idle_seconds", "ttl", "created", "metadata", "memory",
    }  # fmt: skip
    assert (shown["id"], shown["state"], shown["tier"], shown["ttl"]) == ("fields", "IDLE", "device", 600)
    assert shown["metadata"] == {"who": "me"}
    assert set(shown["memory"]) == {"full", "window", "state", "leased", "checkpoints"}
    assert [each["id"] for each in echo.get("/v1/sessions").json()["sessions"]] == ["fields"]


def test_a_turn_computes_only_its_own_tokens(echo: Server) -> None:
    name = echo.open(system="Be brief.")
    known = 0
    for number in range(6):
        turn = echo.say(name, f"word {number}")
        usage = turn["usage"]
        assert turn["text"] == f"word {number}"
        assert turn["finish_reason"] == "stop"
        assert usage["cached_tokens"] == known
        assert usage["computed_tokens"] == usage["prompt_tokens"] - known
        known = usage["prompt_tokens"] + usage["completion_tokens"]
        assert echo.state(name)["tokens"]["known"] == known


def test_a_stream_says_what_the_whole_says(echo: Server) -> None:
    name = echo.open()
    with echo.http.stream(
        "POST",
        f"/v1/sessions/{name}/turns",
        json={"input": "straße 東京 🙂", "stream": True, "turn_id": "one"},
    ) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = events_of(response)
    kind, done = events[-1]
    deltas = [body for kind, body in events if kind == "delta"]
    assert kind == "done"
    assert "".join(delta["text"] for delta in deltas) == done["text"] == "straße 東京 🙂"
    assert [token for delta in deltas for token in delta["token_ids"]] == done["token_ids"]
    index = 0
    for delta in deltas:
        assert delta["index"] == index
        assert delta["turn_id"] == "one"
        index += len(delta["token_ids"])
    assert set(done["timing"]) == {"queue_ms", "ttft_ms", "total_ms"}


def test_messages_and_tokens_are_inputs_too(echo: Server) -> None:
    name = echo.open()
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "first"}]
    assert echo.say(name, messages)["text"] == "first"
    parts = [{"role": "user", "content": [{"type": "text", "text": "sec"}, {"type": "text", "text": "ond"}]}]
    assert echo.say(name, parts)["text"] == "second"
    assert echo.say(name, [65, 66, 67], sampling={"max_tokens": 3})["token_ids"] == [65, 66, 67]


def test_the_whole_equals_the_template_applied_to_the_conversation(echo: Server) -> None:
    """What a session has been told, turn by turn, is what the template renders of all of it at once."""
    name = echo.open(system="Be brief.")
    messages: list[dict[str, str]] = [{"role": "system", "content": "Be brief."}]
    for said in ("one", "two", "three"):
        messages.append({"role": "user", "content": said})
        whole = echo.post("/tokenize", {"messages": messages}).json()["tokens"]
        turn = echo.say(name, said)
        assert turn["usage"]["prompt_tokens"] == len(whole)
        messages.append({"role": "assistant", "content": turn["text"]})


def test_a_turn_that_never_began_has_computed_nothing(echo: Server) -> None:
    name = echo.open()
    said = echo.say(name, "first words")["usage"]
    late = echo.say(name, "x" * 150, timeout=1e-6)
    assert (late["finish_reason"], late["abort_reason"], late["text"]) == ("abort", "deadline", "")
    assert late["usage"]["prompt_tokens"] > said["prompt_tokens"] + 150
    assert (late["usage"]["cached_tokens"], late["usage"]["computed_tokens"]) == (0, 0)


def test_a_finished_turn_is_answered_again_and_not_run_again(echo: Server) -> None:
    name = echo.open()
    first = echo.say(name, "once", turn_id="t-1")
    known = echo.state(name)["tokens"]["known"]
    again = echo.say(name, "once", turn_id="t-1")
    assert {key: again[key] for key in again if key != "timing"} == {
        key: first[key] for key in first if key != "timing"
    }
    assert echo.state(name)["tokens"]["known"] == known
    other = echo.post(f"/v1/sessions/{name}/turns", {"input": "twice", "turn_id": "t-1"})
    assert (other.status_code, other.json()["error"]["code"]) == (409, "turn_conflict")
    assert echo.state(name)["turns"] == 1


def test_interrupt_cuts_the_last_turn_and_the_next_goes_on_from_there(echo: Server) -> None:
    name = echo.open()
    turn = echo.say(name, "abcdefghij")
    cut = echo.post(f"/v1/sessions/{name}/interrupt", {"keep_tokens": 4})
    assert cut.status_code == 200
    kept = turn["usage"]["prompt_tokens"] + 4
    assert cut.json()["tokens"]["known"] == kept
    after = echo.say(name, [65], sampling={"max_tokens": 1})
    assert after["usage"]["cached_tokens"] == kept
    assert after["usage"]["computed_tokens"] == 1
    assert echo.post(f"/v1/sessions/{name}/interrupt", {"keep": "none"}).json()["tokens"]["known"] == kept
    too_many = echo.post(f"/v1/sessions/{name}/interrupt", {"keep_tokens": 99})
    assert too_many.status_code in (400, 404)


ENDLESS = ("--context-length", "80000", "--kv-tokens", "160000")
"""Options of a server that speaks for so long that a slow machine, too, can cut in."""
UNENDING = {"max_tokens": 79_000, "ignore_eos": True}


def long_turn(echo: Server, name: str, turn_id: str, said: str = "abc", **fields: Any) -> threading.Thread:
    """A turn that goes on until somebody ends it, in a thread; its answer is the thread's `answer`."""
    body = {"input": said, "turn_id": turn_id, "sampling": {"max_tokens": 7000, "ignore_eos": True}, **fields}

    class Call(threading.Thread):
        answer: httpx.Response

        def run(self) -> None:
            self.answer = httpx.post(
                f"{echo.url}/v1/sessions/{name}/turns", json=body, timeout=60, verify=NO_TLS
            )

    call = Call()
    call.start()
    wait_state(echo, name, "RUNNING")
    return call


def wait_known(echo: Server, name: str, tokens: int) -> None:
    """Wait until a session has so many tokens, those of the turn in flight among them."""
    deadline = time.monotonic() + 60
    while echo.state(name)["tokens"]["known"] < tokens:
        assert time.monotonic() < deadline, echo.state(name)
        time.sleep(0.005)


def wait_state(echo: Server, name: str, *states: str) -> None:
    deadline = time.monotonic() + 60
    while echo.state(name)["state"] not in states:
        assert time.monotonic() < deadline, echo.state(name)["state"]
        time.sleep(0.002)


def test_interrupt_of_a_running_turn_keeps_what_was_heard(echo: Server) -> None:
    name = echo.open()
    call: Any = long_turn(echo, name, "long")
    before = echo.state(name)["tokens"]["known"]
    answer = echo.post(f"/v1/sessions/{name}/interrupt", {"turn_id": "long", "keep_tokens": 5})
    call.join()
    turn = call.answer.json()
    assert answer.status_code == 200 and before > 0
    assert (turn["finish_reason"], turn["usage"]["completion_tokens"]) == ("abort", 5)
    known = turn["usage"]["prompt_tokens"] + 5
    assert echo.state(name)["tokens"]["known"] == known
    assert echo.say(name, [65], sampling={"max_tokens": 1})["usage"]["cached_tokens"] <= known


def test_fifty_interrupts_in_a_row_compute_no_history(echo: Server) -> None:
    name = echo.open()
    known = 0
    for number in range(50):
        turn = echo.say(name, "abcdefgh")
        assert turn["usage"]["cached_tokens"] == known, number
        assert echo.post(f"/v1/sessions/{name}/interrupt", {"keep_tokens": 3}).status_code == 200
        known = turn["usage"]["prompt_tokens"] + 3


def test_rewind_and_fork(echo: Server) -> None:
    name = echo.open()
    lengths = [0]
    for said in ("one", "two", "three"):
        usage = echo.say(name, said)["usage"]
        lengths.append(usage["prompt_tokens"] + usage["completion_tokens"])
    fork = echo.post(f"/v1/sessions/{name}/fork", {"id": "branch", "at_turn": 2, "request_id": "f-1"})
    again = echo.post(f"/v1/sessions/{name}/fork", {"id": "branch2", "at_turn": 2, "request_id": "f-1"})
    assert (fork.status_code, again.status_code) == (201, 201)
    assert fork.json()["id"] == again.json()["id"] == "branch"
    assert fork.json()["tokens"]["known"] == lengths[2]
    rewound = echo.post(f"/v1/sessions/{name}/rewind", {"to_turn": 1}).json()
    assert (rewound["turns"], rewound["tokens"]["known"]) == (1, lengths[1])
    assert echo.say("branch", "more")["usage"]["cached_tokens"] == lengths[2]
    assert echo.say(name, "more")["usage"]["cached_tokens"] == lengths[1]
    assert echo.post(f"/v1/sessions/{name}/rewind", {"to_turn": 9}).status_code == 404


def test_a_fork_that_is_asked_for_again_after_its_end_is_refused_and_the_parent_stays(echo: Server) -> None:
    parent = echo.open()
    echo.say(parent, "one")
    asked = {"id": "once", "request_id": "f1"}
    for _ in range(2):
        assert echo.post(f"/v1/sessions/{parent}/fork", asked).json()["id"] == "once"
    assert echo.http.delete("/v1/sessions/once").status_code == 200
    refused = echo.post(f"/v1/sessions/{parent}/fork", asked)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "request_conflict")
    assert echo.say(parent, "two")["text"] == "two"
    assert [each["id"] for each in echo.get("/v1/sessions").json()["sessions"]] == [parent]


def test_close_is_final_and_may_be_repeated(echo: Server) -> None:
    name = echo.open("gone")
    echo.say(name, "hello")
    assert echo.http.delete(f"/v1/sessions/{name}").status_code == 200
    assert echo.http.delete(f"/v1/sessions/{name}").status_code == 200
    assert echo.get(f"/v1/sessions/{name}").status_code == 404
    assert echo.http.delete("/v1/sessions/never").status_code == 404
    echo.open("gone")


def test_a_session_expires_after_its_last_turn_and_says_so(echo: Server) -> None:
    name = echo.open(ttl=4.0)
    echo.say(name, "hello")
    deadline = time.monotonic() + 20
    while (answer := echo.get(f"/v1/sessions/{name}")).status_code == 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert (answer.status_code, answer.json()["error"]["code"]) == (410, "session_expired")


def test_a_deadline_ends_a_turn_by_its_own_policy(echo: Server) -> None:
    name = echo.open()
    first = echo.say(name, "hello")
    known = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
    endless = {"max_tokens": 7000, "ignore_eos": True}
    turn = echo.say(name, "go on", timeout=0.2, sampling=endless)
    assert (turn["finish_reason"], turn["abort_reason"]) == ("abort", "deadline")
    assert echo.state(name)["tokens"]["known"] == known
    for timeout in (0.2, 0.5, 1.0, 2.0):  # A slow machine says nothing for a while.
        name = echo.open()
        kept = echo.say(name, "go on", timeout=timeout, sampling=endless, on_abort="keep")
        if kept["usage"]["completion_tokens"]:
            break
    assert (kept["finish_reason"], kept["abort_reason"]) == ("abort", "deadline")
    assert kept["usage"]["completion_tokens"] > 0
    now = kept["usage"]["prompt_tokens"] + kept["usage"]["completion_tokens"]
    assert echo.state(name)["tokens"]["known"] == now


@pytest.mark.parametrize("model", ["echo-window", "echo-hybrid"])
def test_other_layouts_keep_their_promises_over_http(serve: Serve, model: str) -> None:
    server = serve(
        model, "--audit", "strict", "--kv-tokens", "16384", "--window-tokens", "16384", "--state-slots", "64"
    )
    name = server.open()
    known = 0
    for number in range(5):
        usage = server.say(name, f"word {number}")["usage"]
        assert usage["cached_tokens"] == known
        known = usage["prompt_tokens"] + usage["completion_tokens"]
    assert server.post(f"/v1/sessions/{name}/rewind", {"to_turn": 4}).status_code == 200
    assert server.post(f"/v1/sessions/{name}/fork", {"id": "b"}).status_code == 201
    assert server.say("b", "x")["text"] == "x"
    server.check_clean()
