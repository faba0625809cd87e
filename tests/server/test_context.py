"""A turn that is longer than the context: refused in words that clients look for, with the field at fault."""

from typing import Any

import openai
import pytest

from tests.server.openai_client import openai_client
from tests.server.serving import Server

LIMIT = 8192
WORDS = f"This model's maximum context length is {LIMIT} tokens. However, "


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", chat("x" * LIMIT), "messages"),
        ("/v1/chat/completions", chat("x" * LIMIT, max_tokens=5), "messages"),
        ("/v1/chat/completions", chat("x", max_tokens=LIMIT), "max_tokens"),
        ("/v1/chat/completions", chat("x" * 8000, max_tokens=1000), "max_tokens"),
        ("/v1/chat/completions", chat("x", max_completion_tokens=LIMIT), "max_completion_tokens"),
        ("/v1/completions", {"prompt": "x" * LIMIT}, "prompt"),
        ("/v1/completions", {"prompt": ["x", "x" * LIMIT]}, "prompt"),
        ("/v1/completions", {"prompt": "x" * 8000, "max_tokens": 1000}, "max_tokens"),
        ("/v1/sessions/{}/turns", {"input": "x" * LIMIT}, "input"),
        (
            "/v1/sessions/{}/turns",
            {"input": "x" * 8000, "sampling": {"max_tokens": 1000}},
            "sampling.max_tokens",
        ),
        ("/v1/sessions/{}/turns", {"input": [{"role": "user", "content": "x" * LIMIT}]}, "input"),
        ("/generate", {"text": "x" * LIMIT}, "text"),
        ("/generate", {"input_ids": [5] * LIMIT}, "input_ids"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_the_words_and_the_field_at_fault(echo: Server, path: str, body: dict[str, Any], param: str) -> None:
    answer = echo.post(path.format(echo.open()), body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (
        400,
        "invalid_request_error",
        "context_length_exceeded",
    ), answer.text
    assert error["message"].startswith(WORDS) and error["param"] == param, error


def test_the_figures_add_up(echo: Server) -> None:
    error = echo.post("/v1/chat/completions", chat("x" * 8000, max_tokens=1000)).json()["error"]
    said = 8000 + echo.post("/tokenize", chat("")).json()["count"]
    assert error["message"] == (
        f"{WORDS}you requested {said + 1000} tokens ({said} in the messages, 1000 in the completion). "
        "Please reduce the length of the messages or completion."
    )
    error = echo.post("/v1/completions", {"prompt": ["x", "x" * 8000], "max_tokens": 300}).json()["error"]
    assert "you requested 8300 tokens (8000 in the prompt, 300 in the completion)" in error["message"]


def test_what_a_session_holds_is_among_the_figures(echo: Server) -> None:
    session = echo.open()
    echo.say(session, "x" * 3000)
    known = echo.state(session)["tokens"]["known"]
    body = {"input": [5] * 100, "sampling": {"max_tokens": 6000}}
    error = echo.post(f"/v1/sessions/{session}/turns", body).json()["error"]
    assert f"({known} in the session, 100 in the input, 6000 in the completion)" in error["message"]
    assert error["param"] == "sampling.max_tokens" and "rewind the session" in error["message"]
    body = {"input": [5] * 4000}
    error = echo.post(f"/v1/sessions/{session}/turns", body).json()["error"]
    assert error["param"] == "input", error
    assert echo.state(session)["tokens"]["known"] == known


def test_an_openai_client_sees_the_code_and_the_field(echo: Server) -> None:
    messages: Any = [{"role": "user", "content": "x" * LIMIT}]
    with (
        openai_client(echo) as client,
        pytest.raises(openai.BadRequestError, match="maximum context length") as caught,
    ):
        client.chat.completions.create(model="echo", messages=messages)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    assert caught.value.type == "invalid_request_error"
