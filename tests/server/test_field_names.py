"""What is wrong is named as the client wrote it, whoever finds it: the decoder, the door, or the engine."""

from typing import Any

import pytest

from tests.server.serving import Server

CHAT = {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/sessions/{}/turns", {"input": "x", "sampling": {"temperature": -1}}, "sampling.temperature"),
        ("/v1/sessions/{}/turns", {"input": "x", "sampling": {"temperature": "x"}}, "sampling.temperature"),
        ("/v1/sessions/{}/turns", {"input": "x", "sampling": {"max_tokens": 9000}}, "sampling.max_tokens"),
        (
            "/v1/sessions/{}/turns",
            {"input": "x", "sampling": {"logit_bias": {"x": 1}}},
            "sampling.logit_bias",
        ),
        (
            "/v1/sessions/{}/turns",
            {"input": "x", "sampling": {"logit_bias": {"99999": 1}}},
            "sampling.logit_bias",
        ),
        ("/v1/sessions/{}/turns", {"input": [99999]}, "input"),
        ("/v1/sessions/{}/rewind", {"to_turn": 100}, "to_turn"),
        ("/v1/sessions/{}/fork", {"at_turn": 100}, "at_turn"),
        ("/v1/chat/completions", {**CHAT, "max_tokens": -1}, "max_tokens"),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 9000}, "max_tokens"),
        ("/v1/chat/completions", {**CHAT, "max_completion_tokens": -1}, "max_completion_tokens"),
        ("/v1/chat/completions", {**CHAT, "max_completion_tokens": 9000}, "max_completion_tokens"),
        ("/v1/chat/completions", {**CHAT, "temperature": -1}, "temperature"),
        ("/v1/completions", {"prompt": [99999]}, "prompt"),
        ("/v1/completions", {"prompt": [1] * 9000}, "prompt"),
        ("/generate", {"text": "x", "sampling_params": {"stop": [""]}}, "sampling_params.stop"),
        (
            "/generate",
            {"text": "x", "sampling_params": {"logit_bias": {"x": 1}}},
            "sampling_params.logit_bias",
        ),
        (
            "/generate",
            {"text": "x", "sampling_params": {"logit_bias": {"99999": 1}}},
            "sampling_params.logit_bias",
        ),
        (
            "/generate",
            {"text": "x", "sampling_params": {"stop_token_ids": [99999]}},
            "sampling_params.stop_token_ids",
        ),
        ("/generate", {"text": "x", "session_params": {"id": "nobody"}}, "session_params.id"),
        ("/generate", {"input_ids": [1], "session_params": {"id": "a/b"}}, "session_params.id"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_field_is_named_as_the_client_wrote_it(
    echo: Server, path: str, body: dict[str, Any], field: str
) -> None:
    session = echo.open()
    answer = echo.post(path.format(session), body)
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.json()["error"]["param"] == field, answer.text


def test_a_message_begins_with_the_name_of_its_field(echo: Server) -> None:
    session = echo.open()
    for said, value in (
        ("sampling.temperature must be between", -1),
        ("sampling.temperature: expected", "x"),
    ):
        body = {"input": "x", "sampling": {"temperature": value}}
        answer = echo.post(f"/v1/sessions/{session}/turns", body)
        assert answer.json()["error"]["message"].startswith(said), answer.text
