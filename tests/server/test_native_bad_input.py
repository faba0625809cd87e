"""Bad input on the native door, case by case: a 4xx with the field's name, never its value."""

from typing import Any

import pytest

from tests.server.bad_values import JSON, SECRET, renamed
from tests.server.native_client import NativeClient, total
from tests.server.serving import Server

BODIES: dict[str, bytes] = {
    "empty": b"",
    "truncated": b'{"text": "x"',
    "trailing garbage": b'{"text": "x"} y',
    "depth": b'{"text": ' + b"[" * 100_000,
    "depth in an extra field": b'{"text": "x", "more": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "NaN": b'{"text": "x", "sampling_params": {"temperature": NaN}, "rid": NaN, "session_id": NaN}',
    "huge number": b'{"text": "x", "timeout": ' + b"9" * 100_000 + b', "rid": 1, "session_id": 1}',
    "invalid UTF-8": b'{"text": "\xff\xfe", "rid": "\xff"}',
    "array": b"[]",
    "null": b"null",
    "lone surrogate": b'{"text": "\\ud800", "rid": "\\ud800", "session_id": "\\ud800"}',
}

PATHS = ("/generate", "/open_session", "/close_session", "/abort_request")


@pytest.fixture
def native(echo: Server) -> NativeClient:
    return NativeClient(echo)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", BODIES)
def test_bodies_that_are_not_json(echo: Server, path: str, case: str) -> None:
    answer = echo.http.post(path, content=BODIES[case], headers=JSON)
    assert answer.status_code == 400, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "code", "param"}


SAMPLING: list[tuple[str, Any]] = [
    *renamed(max_tokens="max_new_tokens", seed="sampling_seed"),
    ("min_new_tokens", 2**63),
    ("min_new_tokens", 200),
    ("stop_token_ids", [300]),
    ("stop_token_ids", "x"),
    ("no_stop_trim", 1),
    ("skip_special_tokens", "no"),
    ("n", 10**9),
    ("n", 0),
    ("json_schema", "{"),
    ("json_schema", '{"type": "no such type"}'),
    ("regex", "a("),
    ("ebnf", "root ::= x"),
    ("stop_regex", "x"),
]


@pytest.mark.parametrize(("field", "value"), SAMPLING, ids=lambda value: str(value)[:24])
def test_sampling_parameters(native: NativeClient, field: str, value: Any) -> None:
    answer = native.post("/generate", {"text": "x", "sampling_params": {field: value}})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert field in (error["param"] or ""), error
    assert field in error["message"]
    assert SECRET not in answer.text


FIELDS: list[tuple[str, Any]] = [
    ("text", 5),
    ("text", []),
    ("text", [1]),
    ("text", ["x"] * 1025),
    ("text", ""),
    ("text", ["x", ""]),
    ("text", "x" * 9000),
    ("input_ids", [1]),
    ("sampling_params", "hot"),
    ("sampling_params", [{}, {}]),
    ("rid", "../" + SECRET),
    ("rid", ""),
    ("rid", "x" * 10_000_000),
    ("rid", ["a", "b"]),
    ("rid", 5),
    ("stream", "yes"),
    ("return_logprob", 1),
    ("logprob_start_len", -2),
    ("logprob_start_len", 2**63),
    ("top_logprobs_num", 1_000_000),
    ("top_logprobs_num", -1),
    ("session_params", []),
    ("session_params", {"id": 5}),
    ("session_params", {"id": "a/../b"}),
    ("session_params", {"id": "nul\0"}),
    ("session_params", {"id": "x" * 10_000_000}),
    ("session_params", {"id": "x", "offset": 2**63}),
    ("session_params", {"id": "x", "offset": 1.5}),
    ("session_params", {"id": "x", "replace": "yes"}),
    ("session_params", {"id": "x", "rid": 5}),
    ("timeout", -1),
    ("timeout", 0),
    ("timeout", 1e300),
    ("image_data", "file"),
    ("input_embeds", [[0.5]]),
    ("lora_path", "x"),
    ("token_ids_logprob", [1]),
    ("custom_logit_processor", "x"),
]


@pytest.mark.parametrize(("field", "value"), FIELDS, ids=lambda value: str(value)[:24])
def test_fields_of_generate(native: NativeClient, field: str, value: Any) -> None:
    answer = native.post("/generate", {"text": "x", "return_logprob": True, field: value})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    named = "text" if field == "input_ids" else field
    assert (error["param"] or "").startswith(named), error
    assert SECRET not in answer.text


@pytest.mark.parametrize(
    "tokens",
    [
        [],
        [[]],
        [-1],
        [258],
        [1 << 31],
        [1 << 70],
        [1.0],
        [True],
        ["x"],
        [None],
        [[5], 5],
        [[5], [258]],
        [[5]] * 1025,
        [5] * 8192,
        [[[5]]],
        5,
    ],
    ids=lambda value: str(value)[:24],
)
def test_token_ids(native: NativeClient, tokens: Any) -> None:
    name = native.open(streaming=True)
    before = total(native.turn(name, "before"))
    for params in ({}, {"session_params": {"id": name}}):
        answer = native.post("/generate", {"input_ids": tokens, **params})
        assert answer.status_code == 400, answer.text
    assert native.turn(name, "after")["meta_info"]["cached_tokens"] == before
    assert native.close(name) == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/generate", {}, "text"),
        ("/generate", {"text": None}, "text"),
        ("/open_session", {"capacity_of_str_len": -1}, "capacity_of_str_len"),
        ("/open_session", {"capacity_of_str_len": 2**63}, "capacity_of_str_len"),
        ("/open_session", {"capacity_of_str_len": "x"}, "capacity_of_str_len"),
        ("/open_session", {"session_id": "a/b"}, "session_id"),
        ("/open_session", {"session_id": ""}, "session_id"),
        ("/open_session", {"session_id": "x" * 129}, "session_id"),
        ("/open_session", {"streaming": "yes"}, "streaming"),
        ("/open_session", {"timeout": 0}, "timeout"),
        ("/open_session", {"timeout": -1, "streaming": True}, "timeout"),
        ("/open_session", {"timeout": 1e300}, "timeout"),
        ("/open_session", {"timeout": 1e300, "streaming": True}, "timeout"),
        ("/close_session", {}, "session_id"),
        ("/close_session", {"session_id": None}, "session_id"),
        ("/close_session", {"session_id": "../x"}, "session_id"),
        ("/abort_request", {"rid": 5}, "rid"),
        ("/abort_request", {"abort_all": "yes"}, "abort_all"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_other_bodies(native: NativeClient, path: str, body: dict[str, Any], param: str) -> None:
    answer = native.post(path, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_methods_and_types(echo: Server) -> None:
    assert echo.get("/generate").status_code == 405
    assert echo.http.delete("/open_session").status_code == 405
    for path in PATHS:
        answer = echo.http.post(path, content=b"text=x", headers={"content-type": "text/plain"})
        assert answer.status_code == 415, path
