"""Fields that other servers honour and this one does not: refused by name, in every dialect."""

from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.server.dialects.refused import FIELDS, MESSAGE_FIELDS
from holdfast.server.dialects.tables import CHAT, COMPLETIONS, GENERATE
from tests.server.bad_values import JSON, SECRET
from tests.server.serving import Server
from tests.server.talking import Talk

Body = dict[str, Any]

USER = {"role": "user", "content": "x"}
BRIEF = {"max_tokens": 1}
DIALECTS: dict[str, tuple[str, Body, str, dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": [USER], **BRIEF},
        "",
        {
            "session_id": None,
            "add_special_tokens": False,
            "continue_final_message": False,
            "add_generation_prompt": True,
            "prompt_logprobs": None,
        },
    ),
    "completions": (
        "/v1/completions",
        {"prompt": "x", **BRIEF},
        "",
        {
            "session_id": None,
            "best_of": 1,
            "add_special_tokens": True,
            "echo": False,
            "prompt_logprobs": None,
        },
    ),
    "messages": (
        "/v1/messages",
        {"messages": [USER], **BRIEF},
        "",
        {"session_id": None, "add_special_tokens": None},
    ),
    "stream options": (
        "/v1/chat/completions",
        {"messages": [USER], "stream": True, **BRIEF},
        "stream_options.",
        {},
    ),
    "generate": (
        "/generate",
        {"text": "x", "sampling_params": {"max_new_tokens": 1}},
        "",
        {"input_ids": None, "session_params": None, "rid": None, "add_special_tokens": True},
    ),
    "native sampling": ("/generate", {"text": "x"}, "sampling_params.", {"no_stop_trim": False}),
    "tokenize": ("/tokenize", {"prompt": "x"}, "", {"add_special_tokens": True}),
}
"""Path, a body that is answered, where the field goes, and what to send of those that are different there."""

BUILT = {
    "chat": {
        "session_id",
        "prompt_logprobs",
        *(row.written for table in (CHAT.turn, CHAT.answer) for row in table.rows),
    },
    "completions": {
        "session_id",
        "best_of",
        "echo",
        "prompt_logprobs",
        *(row.written for row in COMPLETIONS.answer.rows),
    },
    "messages": {"tools", "tool_choice", "thinking"},
    "stream options": set[str](),
    "generate": {"input_ids", "session_params", "rid"},
    "native sampling": {"no_stop_trim", *(row.written for row in GENERATE.answer.rows)},
    "tokenize": {"add_special_tokens", "tools", "chat_template_kwargs"},
}

NAMED = [
    "audio",
    "best_of",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "custom_logit_processor",
    "ebnf",
    "echo",
    "function_call",
    "functions",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "input_ids",
    "json_schema",
    "logits_processors",
    "lora_path",
    "modalities",
    "prompt_logprobs",
    "reasoning_effort",
    "regex",
    "response_format",
    "session_params",
    "stop_regex",
    "structured_outputs",
    "suffix",
    "tool_choice",
    "tools",
    "truncate_prompt_tokens",
    "use_beam_search",
]
"""Fields that clients are known to send, and that must not leave the table before they are built."""

ASKING: list[Any] = [{"a": SECRET}, [SECRET], SECRET, True, 7, [{"type": "function"}], "x" * 100]
"""Values that ask for something, of every kind."""


def placed(body: Body, prefix: str, field: str, value: Any) -> Body:
    if not prefix:
        return {**body, field: value}
    inner = prefix.rstrip(".")
    return {**body, inner: {**body.get(inner, {}), field: value}}


def test_fields_that_clients_are_known_to_send_are_in_the_table() -> None:
    assert sorted(set(NAMED) - set(FIELDS)) == []
    assert {"function_call", "audio", "thinking"} <= set(MESSAGE_FIELDS)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_fields_that_are_not_built_are_refused_by_name(echo: Server, dialect: str) -> None:
    path, body, prefix, _ = DIALECTS[dialect]
    for number, (field, nothing) in enumerate(FIELDS.items()):
        if field in BUILT[dialect]:
            continue
        values = [ASKING[(number + step) % len(ASKING)] for step in (0, 3)]
        for value in values:
            if value in nothing or (field.startswith("add_") and value is True):
                continue  # That asks for nothing, or does in some dialects.
            answer = echo.post(path, placed(body, prefix, field, value))
            assert answer.status_code == 400, (field, value, answer.text[:200])
            error = answer.json()["error"]
            assert (error["param"], error["code"]) == (f"{prefix}{field}", "unsupported"), (field, value)
            assert error["message"].startswith(f"{prefix}{field}: is not supported ")
            assert SECRET not in answer.text


@pytest.mark.parametrize("dialect", DIALECTS)
def test_values_that_ask_for_nothing_are_allowed(echo: Server, dialect: str) -> None:
    path, body, prefix, own = DIALECTS[dialect]
    longest = max(len(nothing) for nothing in FIELDS.values())
    for number in range(longest + 1):
        given = body
        for field, nothing in FIELDS.items():
            value = None if number >= len(nothing) or field in BUILT[dialect] else nothing[number]
            given = placed(given, prefix, field, own.get(field, value))
        answer = echo.post(path, given)
        assert answer.status_code == 200, answer.text


def test_a_value_that_asks_for_nothing_may_be_written_with_spaces(echo: Server) -> None:
    for value in ('{ "type" : "text" }', " { } ", " null "):
        text = '{"prompt": "x", "max_tokens": 1, "response_format":' + value + "}"
        assert echo.http.post("/v1/completions", content=text, headers=JSON).status_code == 200, value


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_fields_of_messages_that_are_not_built_are_refused_with_their_place(echo: Server, path: str) -> None:
    for field, nothing in MESSAGE_FIELDS.items():
        for value in [None, *nothing]:
            answer = echo.post(path, {"messages": [USER, {**USER, field: value}]})
            assert answer.status_code == 200, (field, value, answer.text)
        for value in ASKING:
            answer = echo.post(path, {"messages": [USER, {**USER, field: value}]})
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["code"] == "unsupported", (field, value)
            assert error["param"] == f"messages[1].{field}" and SECRET not in answer.text


@pytest.fixture
def talk(echo: Server) -> Iterator[Talk]:
    with Talk(echo) as talk:
        talk.open()
        yield talk


def test_sessions_and_realtime_refuse_every_field_that_they_do_not_know(echo: Server, talk: Talk) -> None:
    session = echo.open()
    for field in {**FIELDS, **MESSAGE_FIELDS}:
        for body, param in (
            ({"input": "x", field: [SECRET]}, field),
            ({"input": "x", "sampling": {field: [SECRET]}}, f"sampling.{field}"),
            ({"input": [{**USER, field: [SECRET]}]}, field),
        ):
            answer = echo.post(f"/v1/sessions/{session}/turns", body)
            assert answer.status_code == 400, (field, answer.text)
            named = answer.json()["error"]["param"].removesuffix("[0]")
            assert named.endswith(param) and SECRET not in answer.text
        talk.say("input.commit", **{field: [SECRET]})
        assert talk.refused()["param"].removesuffix("[0]") == field
        talk.say("input.commit", sampling={field: [SECRET]})
        assert talk.refused()["param"] == f"sampling.{field}"
    assert echo.state(session)["turns"] == 0
