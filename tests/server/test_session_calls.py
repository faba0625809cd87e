"""`/v1/sessions` over a socket: names that are checked before they are kept, errors that repeat nothing, and
turns that show what stands of them."""

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from holdfast.core.errors import Refused
from holdfast.engine.constraints import Fault, GrammarError
from holdfast.engine.grammars import GrammarRefused
from holdfast.server.http.problems import STATUS_OF_CODE, from_refusal
from tests.server.bad_values import JSON, SECRET
from tests.server.serving import Server
from tests.server.talking import LONG, Talk


def refusal(server: Server, path: str, body: Any) -> tuple[int, str, str | None]:
    """Status, code and field of an answer that refuses."""
    answer = server.post(path, body)
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait for something that comes by itself."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


@pytest.mark.parametrize("name", [".", ".."])
def test_a_session_has_no_name_that_a_path_means_otherwise(echo: Server, name: str) -> None:
    assert refusal(echo, "/v1/sessions", {"id": name}) == (400, "bad_name", "id")
    assert echo.open(id=f"{name}a") == f"{name}a"
    assert echo.state(f"{name}a")["id"] == f"{name}a"


@pytest.mark.parametrize(
    "name", ["", "a b", "a/b", "..", "x" * 129, "x" * 1_000_000], ids=lambda name: name[:4]
)
@pytest.mark.parametrize(
    ("call", "body", "field"),
    [
        ("rewind", {"to_turn": 0}, "request_id"),
        ("fork", {}, "request_id"),
        ("interrupt", {"keep": "all"}, "turn_id"),
        ("turns", {"input": "x"}, "turn_id"),
    ],
)
def test_a_name_of_the_clients_own_has_a_form(
    echo: Server, call: str, body: dict[str, Any], field: str, name: str
) -> None:
    session = echo.open()
    echo.say(session, "before")
    before = echo.state(session)["tokens"]["known"]
    path = f"/v1/sessions/{session}/{call}"
    assert refusal(echo, path, {**body, field: name}) == (400, "bad_name", field)
    assert echo.state(session)["tokens"]["known"] == before
    assert len(echo.get("/v1/sessions").json()["sessions"]) == 1


@pytest.mark.parametrize(
    ("call", "body", "allowed"),
    [
        ("turns", {"input": "x", "on_abort": SECRET * 1000}, "keep, rollback"),
        ("interrupt", {"keep": SECRET * 1000}, "all, none"),
        ("spill", {"tier": SECRET * 1000}, "disk, host"),
        ("spill", {"tier": f"Object contains unknown field `{SECRET}`"}, "disk, host"),
        ("spill", {"tier": f"x' - at `$.{SECRET}`"}, "disk, host"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_value_that_is_none_of_those_allowed_is_not_repeated(
    echo: Server, call: str, body: dict[str, Any], allowed: str
) -> None:
    session = echo.open()
    answer = echo.post(f"/v1/sessions/{session}/{call}", body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] in body
    assert error["message"] == f"{error['param']}: must be one of {allowed}"
    assert SECRET not in answer.text


def test_what_the_engine_refuses_is_said_without_names(echo: Server) -> None:
    name = f"name-{SECRET}"
    path = f"/v1/sessions/{echo.open(name)}"
    echo.say(name, "one", turn_id=f"turn-{SECRET}")
    assert echo.post(f"{path}/fork", {"request_id": SECRET}).status_code == 201
    refused = [
        (f"{path}/interrupt", {"keep_tokens": 123_456_789}, 400, "nothing_to_keep"),
        ("/v1/sessions", {"id": name}, 409, "session_exists"),
        (f"{path}/turns", {"input": "two", "turn_id": f"turn-{SECRET}"}, 409, "turn_conflict"),
        (f"{path}/fork", {"at_turn": 0, "request_id": SECRET}, 409, "request_conflict"),
        (f"{path}/rewind", {"to_turn": 7}, 404, "turn_not_found"),
        (f"{path}/fork", {"id": name}, 409, "session_exists"),
        (f"{path}/interrupt", {"turn_id": f"no-{SECRET}", "keep": "all"}, 404, "turn_not_found"),
    ]
    for where, body, status, code in refused:
        answer = echo.post(where, body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text
        for value in (SECRET, "public", "123456789"):
            assert value not in answer.text, answer.text


FIGURES_ALONE = {
    "unknown_position",
    "invalid_value",
    "too_many_sessions",
    "queue_full",
    "over_quota",
    "empty_turn",
    "session_full",
    "context_length_exceeded",
    "insufficient_memory",
    "bad_text",
    "history_changed",
    "notes_too_large",
    "unknown_format",
}
"""Refusals whose own words hold nothing of the client's."""


def kinds_of(refusal: type[Refused]) -> list[type[Refused]]:
    """The refusals below one; itself, if there are none."""
    return [kind for below in refusal.__subclasses__() for kind in kinds_of(below)] or [refusal]


def test_every_fault_of_a_grammar_has_a_status() -> None:
    for fault in Fault:
        refusal = GrammarRefused(GrammarError(fault, "too long", "/properties/a"))
        problem = from_refusal(refusal.code, str(refusal), refusal.param)
        assert refusal.code in STATUS_OF_CODE and problem.param == "grammar"
        assert "too long" in problem.message
        assert (problem.status >= 500) == (fault is Fault.BUSY), fault


def test_every_refusal_of_the_core_has_words_for_clients() -> None:
    refusals = kinds_of(Refused)
    assert len(refusals) > 15
    for refusal in refusals:
        if refusal is GrammarRefused:
            continue  # The client's own grammar is at fault, and the words say where.
        assert refusal.code in STATUS_OF_CODE, refusal
        said = from_refusal(refusal.code, SECRET, refusal.param).message
        assert (said == SECRET) == (refusal.code in FIGURES_ALONE), refusal


def take_back_by_interrupting(server: Server, session: str) -> None:
    assert server.post(f"/v1/sessions/{session}/interrupt", {"keep": "none"}).status_code == 200


def take_back_by_closing(server: Server, session: str) -> None:
    assert server.http.delete(f"/v1/sessions/{session}").status_code == 200


@pytest.mark.parametrize("take_back", [take_back_by_interrupting, take_back_by_closing])
@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_that_was_taken_back_says_nothing(
    echo: Server, take_back: Callable[[Server, str], None], stream: bool
) -> None:
    session = echo.open()
    echo.say(session, "before")
    known = echo.state(session)["tokens"]["known"]
    body = {"input": "x" * 50, "stream": stream, "sampling": {**LONG, "logprobs": 1}}
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(echo.post, f"/v1/sessions/{session}/turns", body)
        wait_until(lambda: echo.state(session)["tokens"]["known"] > known + 60)
        take_back(echo, session)
        answer = asked.result()
    assert answer.status_code == 200
    turn = json.loads(answer.text.rpartition("data: ")[2]) if stream else answer.json()
    assert (turn["finish_reason"], turn["text"], turn["token_ids"]) == ("abort", "", [])
    assert turn["usage"]["completion_tokens"] == 0 and "logprobs" not in turn
    if take_back is take_back_by_interrupting:
        assert echo.state(session)["tokens"]["known"] == known


def test_a_turn_that_is_taken_back_at_its_deadline_says_nothing(echo: Server) -> None:
    session = echo.open()
    turn = echo.say(session, "x" * 50, timeout=0.05, sampling={**LONG})
    assert (turn["finish_reason"], turn["text"], turn["token_ids"]) == ("abort", "", [])
    assert echo.state(session)["turns"] == 0
    for timeout in (0.5, 2.0, 8.0):  # On a slow machine the deadline may come before the first token.
        turn = echo.say(session, "x" * 50, timeout=timeout, sampling={**LONG}, on_abort="keep")
        if turn["usage"]["completion_tokens"]:
            break
        session = echo.open()
    shown = echo.state(session)
    assert turn["finish_reason"] == "abort" and shown["turns"] == 1
    assert shown["tokens"]["known"] == turn["usage"]["prompt_tokens"] + len(turn["token_ids"])


def test_what_stays_of_an_interrupted_turn_is_shown(echo: Server) -> None:
    session = echo.open()
    body = {"input": "x" * 50, "turn_id": "t", "sampling": LONG}
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(echo.post, f"/v1/sessions/{session}/turns", body)
        wait_until(lambda: echo.state(session)["tokens"]["known"] > 100)
        assert echo.post(f"/v1/sessions/{session}/interrupt", {"keep_tokens": 5}).status_code == 200
        turn = asked.result().json()
    assert (turn["finish_reason"], turn["text"], len(turn["token_ids"])) == ("abort", "xxxxx", 5)
    assert echo.post(f"/v1/sessions/{session}/rewind", {"to_turn": 0}).status_code == 200
    again = echo.post(f"/v1/sessions/{session}/turns", body).json()
    assert (again["finish_reason"], again["token_ids"]) == ("abort", turn["token_ids"])


def test_a_turn_that_was_rewound_is_answered_again_as_it_ended(echo: Server) -> None:
    session = echo.open()
    body = {"turn_id": "t", "sampling": {"max_tokens": 5, "logprobs": 1}}
    first = echo.say(session, "hello", **body)
    assert len(first["logprobs"]) == len(first["token_ids"])
    assert echo.post(f"/v1/sessions/{session}/rewind", {"to_turn": 0}).status_code == 200
    again = echo.say(session, "hello", **body)
    for name in ("text", "token_ids", "finish_reason", "usage"):
        assert again[name] == first[name]
    assert "logprobs" not in again
    assert echo.state(session)["turns"] == 0
    assert "logprobs" in echo.say(session, "hello", **{**body, "turn_id": "another"})
    assert echo.state(session)["turns"] == 1


def test_log_probabilities_have_the_bounds_that_are_documented(echo: Server) -> None:
    session = echo.open()
    assert echo.say(session, "x", sampling={"max_tokens": 1, "logprobs": 100})["logprobs"]
    turn = {"input": "x", "sampling": {"logprobs": 101}}
    assert refusal(echo, f"/v1/sessions/{session}/turns", turn)[0] == 400
    native = {"text": "x", "return_logprob": True, "sampling_params": {"max_new_tokens": 1}}
    assert echo.post("/generate", {**native, "top_logprobs_num": 100}).status_code == 200
    assert refusal(echo, "/generate", {**native, "top_logprobs_num": 101})[2] == "top_logprobs_num"
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "logprobs": True}
    assert echo.post("/v1/chat/completions", {**chat, "top_logprobs": 20}).status_code == 200
    assert refusal(echo, "/v1/chat/completions", {**chat, "top_logprobs": 21})[2] == "top_logprobs"


@pytest.mark.parametrize(
    ("call", "body", "field"),
    [
        ("turns", {"input": [{"role": "user", "content": "x", "extra": 1}]}, "input[0].extra"),
        (
            "turns",
            {"input": [{"role": "user", "content": [{"type": "text", "text": "x", "more": 1}]}]},
            "more",
        ),
        ("restore", {"extra": 1}, "extra"),
        ("restore", [], None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_fields_that_are_not_there_are_refused_everywhere(
    echo: Server, call: str, body: Any, field: str | None
) -> None:
    session = echo.open()
    status, code, param = refusal(echo, f"/v1/sessions/{session}/{call}", body)
    assert (status, code) == (400, "invalid_value")
    assert (param or "").endswith(field or "")
    assert echo.state(session)["turns"] == 0


def test_messages_with_all_their_fields_are_taken(echo: Server) -> None:
    session = echo.open()
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    said = [{"role": "user", "content": parts, "name": "ann", "reasoning_content": None}]
    assert echo.say(session, said)["text"] == "hello"


@pytest.mark.parametrize("body", [None, b"", b"{}"])
def test_a_session_is_brought_back_with_or_without_a_body(echo: Server, body: bytes | None) -> None:
    session = echo.open()
    answer = echo.http.post(f"/v1/sessions/{session}/restore", content=body, headers=JSON if body else None)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "cannot_restore")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/v1/sessions", "GET, POST"),
        ("PUT", "/v1/sessions/a", "DELETE, GET, PATCH"),
        ("GET", "/v1/sessions/a/turns", "POST"),
        ("DELETE", "/flush_cache", "GET, POST"),
        ("PUT", "/v1/storm", "DELETE, GET, POST"),
    ],
)
def test_a_wrong_method_is_told_all_that_are_right(
    echo: Server, method: str, path: str, allowed: str
) -> None:
    answer = echo.http.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)


@pytest.mark.parametrize("name", ["..%2fx", "%2E%2E%2Fx", "a%2fturns", "a%2Fb/turns"])
def test_a_slash_within_a_name_is_refused(echo: Server, name: str) -> None:
    answer = echo.get(f"/v1/sessions/{name}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_name"), answer.text
    assert answer.json()["error"]["param"] == "session_id"


def test_a_name_is_of_one_session_whatever_its_kind(echo: Server) -> None:
    assert echo.post("/open_session", {"capacity_of_str_len": 100, "session_id": "one"}).json() == "one"
    assert refusal(echo, "/v1/sessions", {"id": "one"}) == (409, "session_exists", "id")
    other = echo.open("other")
    assert refusal(echo, f"/v1/sessions/{other}/fork", {"id": "one"}) == (409, "session_exists", "id")
    with Talk(echo) as talk:
        talk.say("session.open", id="one")
        assert talk.refused()["code"] == "session_exists"
    assert echo.get("/v1/sessions/one").status_code == 404
    assert echo.post("/close_session", {"session_id": "one"}).status_code == 200
    echo.open("one")
