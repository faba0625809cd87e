"""Bad input on Anthropic's routes: the right 4xx with the field's name, never its value, and nothing held."""

from typing import Any

import pytest

from holdfast.server.dialects.refused import ANTHROPIC_FIELDS
from holdfast.server.dialects.tables import MESSAGES
from tests.server.anthropic_wire import WEATHER, body, result, text, user
from tests.server.bad_values import JSON, ODD, SAMPLING, SECRET, replaced
from tests.server.conftest import Serve
from tests.server.serving import Server
from tests.server.test_bad_input import BODIES

PATHS = ("/v1/messages", "/v1/messages/count_tokens")
CALL = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Bern"}}
CALLED = {"role": "assistant", "content": [CALL]}
NAMES = {row.field: row.written for row in MESSAGES.sampling.rows}


def refused(server: Server, path: str, sent: Any, param: str, code: str | None = None) -> None:
    answer = server.post(path, sent)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"] or "") == param, error
    assert error["message"].startswith((param, "prompt is too long")), error
    assert error["type"] == "invalid_request_error" and SECRET not in answer.text
    assert code is None or error["code"] == code


@pytest.mark.parametrize("path", PATHS)
def test_bodies_that_are_not_json(echo: Server, path: str) -> None:
    for case, content in BODIES.items():
        answer = echo.http.post(path, content=content, headers=JSON)
        assert answer.status_code == 400, (case, answer.text)
        assert set(answer.json()["error"]) == {"type", "message", "code", "param"}
    assert echo.http.post(path, data={"messages": "x"}).status_code == 415


def test_sampling_fields(echo: Server) -> None:
    for field, value in [*SAMPLING, ("max_tokens", None), ("stop", "x")]:
        name = NAMES.get(field, field)
        answer = echo.post("/v1/messages", body(user("x"), **{name: value}))
        error = answer.json()["error"]
        assert answer.status_code == 400, (name, value, answer.text)
        assert name in (error["param"] or "") and name in error["message"], (name, value, error)
        assert SECRET not in answer.text


FIELDS: list[tuple[str, Any, str]] = [
    ("messages", None, "messages"),
    ("messages", [], "messages"),
    ("messages", "x", "messages"),
    ("messages", [{"role": SECRET, "content": "x"}], "messages[0].role"),
    ("messages", [{"role": "tool", "content": "x"}], "messages[0].role"),
    ("messages", [{"role": "user"}], "messages[0].content"),
    ("messages", [{"role": "user", "content": 5}], "messages[0].content"),
    ("messages", [user([])], "messages[0].content"),
    ("messages", [user([{"text": "x"}])], "messages[0].content[0].type"),
    ("messages", [user([{"type": SECRET}])], "messages[0].content[0].type"),
    ("messages", [user([{"type": "text"}])], "messages[0].content[0].text"),
    ("messages", [user([text("x"), {"type": "image", "source": {}}])], "messages[0].content[1].type"),
    ("messages", [user([{"type": "document", "source": {}}])], "messages[0].content[0].type"),
    ("messages", [user([CALL])], "messages[0].content[0].type"),
    ("messages", [user([result("c1", "x")])], "messages[0].content[0].tool_use_id"),
    ("messages", [user("x"), CALLED, user([result("c2", "x")])], "messages[2].content[0].tool_use_id"),
    ("messages", [user("x"), CALLED, user([{"type": "tool_result"}])], "messages[2].content[0].tool_use_id"),
    (
        "messages",
        [user("x"), CALLED, user([result("c1", [{"type": "image"}])])],
        "messages[2].content[0].content[0].type",
    ),
    ("messages", [user("x"), CALLED], "messages[1].content"),
    ("messages", [user("x"), {"role": "assistant", "content": [CALL, CALL]}], "messages[1].content[1].id"),
    (
        "messages",
        [user("x"), {"role": "assistant", "content": [{**CALL, "input": None}]}],
        "messages[1].content[0].input",
    ),
    (
        "messages",
        [user("x"), {"role": "assistant", "content": [{"type": "server_tool_use"}]}],
        "messages[1].content[0].type",
    ),
    (
        "messages",
        [user("x"), {"role": "assistant", "content": [{"type": "thinking", "thinking": ""}]}, user("y")],
        "",
    ),
    (
        "messages",
        [
            user("x"),
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "", "signature": "holdfast.*"}],
            },
        ],
        "messages[1].content[0].signature",
    ),
    ("messages", [{"role": "system", "content": "x"}], "messages"),
    ("messages", [user("x"), {"role": "system", "content": [CALL]}], "messages[1].content[0].type"),
    (
        "messages",
        [user([text("x", cache_control={"type": SECRET})])],
        "messages[0].content[0].cache_control.type",
    ),
    ("system", 5, "system"),
    ("system", [{"type": "image"}], "system[0].type"),
    ("system", [{"type": "text"}], "system[0].text"),
    ("system", [text("x", cache_control={"type": "ephemeral", "ttl": "2d"})], "system[0].cache_control.ttl"),
    ("cache_control", {"type": SECRET}, "cache_control.type"),
    ("tools", {}, "tools"),
    ("tools", [{}], "tools[0].name"),
    ("tools", [{"name": "weather"}], "tools[0].input_schema"),
    ("tools", [{"name": "web_search", "type": "web_search_20260318"}], "tools[0].type"),
    ("tools", [{"name": "bash", "type": "bash_20250124"}], "tools[0].type"),
    ("tools", [{**WEATHER, "name": "a b"}], "tools[0].name"),
    ("tools", [WEATHER, WEATHER], "tools[1].name"),
    ("tools", [{**WEATHER, "input_schema": {"type": "array"}}], "tools[0].input_schema.type"),
    ("tools", [{**WEATHER, "input_schema": [SECRET]}], "tools[0].input_schema"),
    ("tools", [{**WEATHER, "defer_loading": True}], "tools[0].defer_loading"),
    ("tools", [{**WEATHER, "allowed_callers": ["code_execution_20260120"]}], "tools[0].allowed_callers"),
    ("tool_choice", "auto", "tool_choice"),
    ("tool_choice", {"type": SECRET}, "tool_choice.type"),
    ("tool_choice", {"type": "tool"}, "tool_choice.name"),
    ("tool_choice", {"type": "any"}, "tool_choice"),
    ("thinking", True, "thinking"),
    ("thinking", {"type": SECRET}, "thinking.type"),
    ("thinking", {"type": "enabled"}, "thinking.budget_tokens"),
    ("thinking", {"type": "enabled", "budget_tokens": 0}, "thinking.budget_tokens"),
    ("thinking", {"type": "between_tools"}, "thinking.type"),
    ("thinking", {"type": "adaptive", "display": SECRET}, "thinking.display"),
    ("output_config", {"effort": SECRET}, "output_config.effort"),
    ("output_config", {"task_budget": {"type": "tokens", "total": 5}}, "output_config.task_budget"),
    ("output_config", {"format": {"type": "xml"}}, "output_config.format.type"),
    ("output_config", {"format": {"type": "json_schema"}}, "output_config.format.schema"),
    (
        "output_config",
        {"format": {"type": "json_schema", "schema": {"not": {}}}},
        "output_config.format.schema",
    ),
    ("output_format", {"type": "json_schema"}, "output_format.schema"),
    ("context_management", {"edits": [{"type": "clear_tool_uses_20250919"}]}, "context_management"),
    (
        "context_management",
        {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}]},
        "context_management",
    ),
    ("context_management", {"edits": [5]}, "context_management"),
    ("context_management", {"edits": 5}, "context_management"),
    ("model", 5, "model"),
]


@pytest.mark.parametrize("path", PATHS)
def test_fields_are_refused_with_their_place(echo: Server, path: str) -> None:
    for field, value, param in FIELDS:
        sent = body(user("x"), **{field: value})
        if param:
            refused(echo, path, sent, param)
        else:
            assert echo.post(path, sent).status_code == 200


@pytest.mark.parametrize("path", PATHS)
def test_any_value_of_a_request_may_be_another_without_an_error_of_the_server(
    echo: Server, path: str
) -> None:
    called = {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "s"}, CALL]}
    sent = body(
        user([text("x", cache_control={"type": "ephemeral"})]),
        called,
        user([result("c1", [text("y")], is_error=True), text("z")]),
        system=[text("s")],
        tools=[{**WEATHER, "strict": True}],
        tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 5, "display": "omitted"},
        output_config={"effort": "low"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        metadata={"user_id": "u"},
        max_tokens=1,
    )
    places, statuses = replaced(sent, -1, None)[1], set()
    for number in range(1, places):
        for step in (0, 5, 10):
            changed, _ = replaced(sent, number, ODD[(number + step) % len(ODD)])
            answer = echo.post(path, changed)
            assert answer.status_code in (200, 400, 404), (changed, answer.text)
            statuses.add(answer.status_code)
    assert places > 70 and statuses >= {200, 400}


def test_the_stream_field_is_a_switch(echo: Server) -> None:
    refused(echo, "/v1/messages", body(user("x"), stream="x"), "stream")


@pytest.mark.parametrize("path", PATHS)
def test_anthropics_fields_that_are_not_built_are_refused_unless_they_ask_for_nothing(
    echo: Server, path: str
) -> None:
    for field, nothing in ANTHROPIC_FIELDS.items():
        refused(echo, path, body(user("x"), **{field: {"a": SECRET}}), field, "unsupported")
        for value in (None, *nothing):
            assert echo.post(path, body(user("x"), **{field: value})).status_code == 200, (field, value)
    for edits in ([], [{"type": "clear_thinking_20251015", "keep": "all"}]):
        sent = body(user("x"), context_management={"edits": edits}, metadata={"user_id": "u"})
        assert echo.post(path, sent).status_code == 200


def test_problems_of_rendering_name_the_clients_messages(echo: Server) -> None:
    """One message of the user may be several of the template, and the system text is none of them."""
    name = {**CALL, "name": "x" * 2000}
    sent = body(user("x"), {"role": "assistant", "content": [name]}, user([result("c1", "y")]), system="s")
    answer = echo.post("/v1/messages", sent)
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("messages[1]"), (
        answer.text
    )


def test_keys_bodies_and_models(serve: Serve) -> None:
    server = serve(
        "echo",
        *("--kv-tokens", "4096", "--context-length", "2048", "--body-limit", "100000"),
        environment={"HOLDFAST_API_KEYS": "ann:secret"},
    )
    sent = body(user("x"))
    for headers, status, kind in (
        ({}, 401, "authentication_error"),
        ({"x-api-key": "wrong"}, 401, "authentication_error"),
        ({"x-api-key": "secret"}, 200, None),
        ({"authorization": "Bearer secret"}, 200, None),
    ):
        answer = server.post("/v1/messages", sent, headers=headers)
        assert answer.status_code == status, answer.text
        assert kind is None or answer.json()["error"]["type"] == kind
        assert answer.headers["request-id"] == answer.headers["x-request-id"]
    key = {"x-api-key": "secret"}
    large = server.post("/v1/messages", body(user("x" * 200_000)), headers=key)
    assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")
    assert server.post("/v1/messages", body(user("x"), model="default"), headers=key).status_code == 200
    assert server.post("/v1/messages", body(user("x"), model="opus"), headers=key).status_code == 404
