"""`/v1/sessions` over a socket: names that are checked before they are kept, errors that repeat nothing, and
turns that show what stands of them."""

from typing import Any

import pytest

from holdfast.core.errors import Refused
from holdfast.server.problems import STATUS_OF_CODE, from_refusal
from tests.server.bad_values import SECRET
from tests.server.serving import Server
from tests.server.talking import LONG


def refusal(server: Server, path: str, body: Any) -> tuple[int, str, str | None]:
    """Status, code and field of an answer that refuses."""
    answer = server.post(path, body)
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


@pytest.mark.parametrize("name", ["", "a b", "a/b", "x" * 129, "x" * 1_000_000], ids=lambda name: name[:4])
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
    assert echo.post(f"{path}/rewind", {"to_turn": 1, "request_id": SECRET}).status_code == 200
    refused = [
        ("/v1/sessions", {"id": name}, 409, "session_exists"),
        (f"{path}/turns", {"input": "two", "turn_id": f"turn-{SECRET}"}, 409, "turn_conflict"),
        (f"{path}/rewind", {"to_turn": 0, "request_id": SECRET}, 409, "request_conflict"),
        (f"{path}/rewind", {"to_turn": 7}, 404, "turn_not_found"),
        (f"{path}/fork", {"id": name}, 409, "session_exists"),
        (f"{path}/interrupt", {"turn_id": f"no-{SECRET}", "keep": "all"}, 404, "turn_not_found"),
        (f"{path}/interrupt", {"keep_tokens": 123_456_789}, 400, "nothing_to_keep"),
    ]
    for where, body, status, code in refused:
        answer = echo.post(where, body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text
        for value in (SECRET, "public", "123456789"):
            assert value not in answer.text, answer.text


def test_a_busy_session_is_refused_without_names(echo: Server) -> None:
    name = f"name-{SECRET}"
    path = f"/v1/sessions/{echo.open(name)}"
    body = {"input": "x" * 50, "turn_id": f"turn-{SECRET}", "stream": True, "sampling": LONG}
    with echo.http.stream("POST", f"{path}/turns", json=body) as stream:
        next(stream.iter_lines())
        answer = echo.post(f"{path}/turns", {"input": "y"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "session_busy"), answer.text
        assert SECRET not in answer.text and "public" not in answer.text


FIGURES_ALONE = {
    "too_many_sessions",
    "queue_full",
    "over_quota",
    "empty_turn",
    "session_full",
    "context_length_exceeded",
    "insufficient_memory",
}
"""Refusals whose own words hold nothing of the client's."""


def test_every_refusal_of_the_core_has_words_for_clients() -> None:
    refusals = Refused.__subclasses__()
    assert len(refusals) > 15
    for refusal in refusals:
        assert refusal.code in STATUS_OF_CODE, refusal
        said = from_refusal(refusal.code, SECRET, refusal.param).message
        assert (said == SECRET) == (refusal.code in FIGURES_ALONE), refusal
