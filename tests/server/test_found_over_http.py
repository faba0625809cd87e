"""Chats that find their session, over HTTP: the answers are those of requests of their own."""

from typing import Any

from tests.server.serving import Server
from tests.server.test_repeated_history import assistant, system, user

CHAT = "/v1/chat/completions"


def counted(server: Server) -> dict[str, float]:
    """What `/metrics` says of conversations."""
    lines = server.get("/metrics").text.splitlines()
    return {
        line.split(" ")[0].removeprefix("holdfast_"): float(line.split(" ")[1])
        for line in lines
        if line.startswith(("holdfast_conversations_total", "holdfast_found_sessions"))
    }


def without_ids(body: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key not in ("id", "created")}


def test_an_answer_has_the_form_of_a_request_of_its_own(echo: Server) -> None:
    messages = [system("x"), user("one"), assistant("one"), user("two")]
    assert echo.post(CHAT, {"messages": messages[:2]}).status_code == 200
    before = counted(echo)
    # With prompt log-probabilities left out, two choices are requests of their own, and one is not.
    found, own = (echo.post(CHAT, {"messages": messages, "n": n, "logprobs": True}).json() for n in (1, 2))
    assert found["choices"] == own["choices"][:1] and set(found) == set(own)
    assert found["usage"]["prompt_tokens"] == own["usage"]["prompt_tokens"]
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == found["usage"]["prompt_tokens"] - 21
    after = counted(echo)
    assert after['conversations_total{how="found"}'] == before.get('conversations_total{how="found"}', 0) + 1
    assert after["found_sessions"] == before["found_sessions"]
    with echo.http.stream("POST", CHAT, json={"messages": messages, "stream": True}) as answer:
        said = "".join(answer.iter_text())
    assert said.endswith("data: [DONE]\n\n") and '"finish_reason":"stop"' in said.replace(" ", "")
    assert echo.get("/v1/sessions").json()["sessions"] == []
    assert "~" not in answer.headers.get("openai-request-id", "")


def test_a_header_may_name_the_session(echo: Server) -> None:
    session = echo.open()
    header = {"x-session-id": session}
    assert echo.post(CHAT, {"messages": [user("one")]}, headers=header).status_code == 200
    whole = [user("one"), assistant("one"), user("two")]
    assert echo.post(CHAT, {"messages": whole}, headers=header).status_code == 200
    assert echo.state(session)["turns"] == 2
    refused = echo.post(CHAT, {"messages": [user("eins"), *whole[1:]]}, headers=header)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "history_differs")
    for other in ("unknown", "a/b", ""):
        assert echo.post(CHAT, {"messages": whole}, headers={"x-session-id": other}).status_code == 200
    assert echo.state(session)["turns"] == 2


def test_flushing_the_cache_closes_hidden_sessions(echo: Server) -> None:
    messages = [user("one two three " * 10)]
    first = echo.post(CHAT, {"messages": messages}).json()
    assert counted(echo)["found_sessions"] >= 1
    assert echo.post("/flush_cache").status_code == 200
    assert counted(echo)["found_sessions"] == 0
    echo.settle()
    again = echo.post(CHAT, {"messages": messages}).json()
    assert without_ids(again) == without_ids(first)
