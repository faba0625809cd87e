"""`/v1/sessions` over a socket: names that are checked before they are kept, errors that repeat nothing, and
turns that show what stands of them."""

from typing import Any

import pytest

from tests.server.serving import Server


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
