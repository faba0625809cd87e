"""Rich requests in which one inner value after the other is odd: they are answered or refused, never a 5xx.

`test_messages_bad_input` does the same for Anthropic's routes, `test_schema` for what the server's own schema
allows.
"""

import json
from typing import Any

import pytest
from websockets.sync.client import connect

from tests.server.agents import BERN, TOOLS
from tests.server.bad_values import ODD, replaced
from tests.server.openai_talking import OpenAITalk
from tests.server.serving import Server

FLAT: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]
CALLED = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": json.dumps(BERN)}}
FORMAT = {"name": "n", "schema": {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}}
TEXT = {"type": "json_schema", **FORMAT}
ITEMS: list[Any] = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
    {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}", "namespace": "n"},
    {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "i"},
    {"type": "local_shell_call", "call_id": "c3", "action": {"type": "exec", "command": ["ls"], "env": {}}},
    {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "y"}]},
    {"type": "custom_tool_call_output", "call_id": "c2", "output": "y"},
    {"type": "local_shell_call_output", "call_id": "c3", "output": "y"},
    {
        "role": "assistant",
        "content": [{"type": "output_text", "text": "z", "annotations": [], "logprobs": []}],
    },
    {"role": "user", "content": "on"},
]
RESPONSE: dict[str, Any] = {
    "model": "echo",
    "input": ITEMS,
    "instructions": "Be brief.",
    "tools": [
        {**FLAT[0], "strict": True, "allowed_callers": ["direct"], "async": False},
        {
            "type": "custom",
            "name": "patch",
            "format": {"type": "grammar", "syntax": "lark", "definition": "x"},
        },
        {"type": "namespace", "name": "files", "description": "d", "tools": [FLAT[1]]},
        {"type": "local_shell"},
    ],
    "tool_choice": {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "weather"}],
    },
    "parallel_tool_calls": False,
    "reasoning": {"effort": "low", "summary": "auto", "mode": "standard", "context": "auto"},
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_options": {"prewarm": False, "ttl": "1h"},
    "metadata": {"a": "b"},
    "truncation": "auto",
    "max_output_tokens": 1,
    "max_tool_calls": 1,
    "temperature": 0.5,
    "top_p": 0.5,
    "conversation": None,
    "stream_options": {"include_obfuscation": False},
    "store": False,
}
CHAT: dict[str, Any] = {
    "model": "echo",
    "messages": [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}], "name": "n"},
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [CALLED], "reasoning_content": "t"},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "y"}]},
        {"role": "user", "content": "on"},
    ],
    "tools": TOOLS,
    "tool_choice": {"type": "function", "function": {"name": "weather"}},
    "parallel_tool_calls": False,
    "max_completion_tokens": 1,
    "logit_bias": {"3": 1.0},
    "stop": ["q"],
    "stream_options": {"include_usage": True},
    "reasoning_effort": "low",
    "chat_template_kwargs": {"a": 1},
    "metadata": {"a": "b"},
    "n": 1,
}
FORMATTED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "x"}],
    "max_tokens": 1,
    "response_format": {"type": "json_schema", "json_schema": {**FORMAT, "strict": True}},
    "logprobs": True,
    "top_logprobs": 1,
}
SESSION_TURN: dict[str, Any] = {
    "input": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
    "sampling": {"max_tokens": 1, "stop": ["q"], "logit_bias": {"3": 1.0}},
    "grammar": {"kind": "regex", "value": "[a-z]+"},
    "tools": TOOLS,
    "thinking_tokens": 3,
    "expect_return_seconds": 1.5,
    "timeout": 5.0,
}
COMPACTION: dict[str, Any] = {
    "from_turn": 1,
    "to_turn": 1,
    "messages": [{"role": "user", "content": "x"}],
    "request_id": None,
}
CHANGE: dict[str, Any] = {
    "ttl": 60.5,
    "pin": False,
    "priority": 1,
    "keep_reasoning": True,
    "metadata": {"a": "b"},
}

BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "chat, format": ("/v1/chat/completions", FORMATTED),
    "responses": ("/v1/responses", RESPONSE),
    "responses, format": ("/v1/responses", {"input": "x", "max_output_tokens": 1, "text": {"format": TEXT}}),
    "conversations": ("/v1/conversations", {"items": ITEMS, "metadata": {"a": "b"}}),
    "conversation items": ("/v1/conversations/{conversation}/items", {"items": ITEMS[:3]}),
    "conversation": ("/v1/conversations/{conversation}", {"metadata": {"a": "b"}}),
    "session turn": ("/v1/sessions/{session}/turns", SESSION_TURN),
    "compaction": ("/v1/sessions/{session}/compact", COMPACTION),
}
ALLOWED = {200, 201, 400, 404, 409, 422, 429}

WAYS = [pytest.param((0,), id="one"), pytest.param(range(len(ODD)), id="all", marks=pytest.mark.soak)]
"""Each place gets one odd value, or all of them."""


def each_odd(sent: dict[str, Any], steps: Any) -> list[dict[str, Any]]:
    """The request with each inner value replaced, by as many values as there are steps."""
    places = replaced(sent, -1, None)[1]
    assert places > 2
    return [
        replaced(sent, place, ODD[(7 * place + step) % len(ODD)])[0]
        for place in range(1, places)
        for step in steps
    ]


@pytest.fixture
def names(responder: Server) -> dict[str, str]:
    """A conversation, and a session with two turns."""
    session = responder.open(tools=TOOLS)
    for said in ("one", "two"):
        turn = {"input": said, "tool_choice": "none", "sampling": {"max_tokens": 1}}
        assert responder.post(f"/v1/sessions/{session}/turns", turn).status_code == 200
    return {"conversation": responder.post("/v1/conversations", {}).json()["id"], "session": session}


@pytest.mark.parametrize("steps", WAYS)
@pytest.mark.parametrize("case", BODIES)
def test_any_value_may_be_another(responder: Server, names: dict[str, str], case: str, steps: Any) -> None:
    path, sent = BODIES[case]
    path = path.format(**names)
    assert responder.post(path, sent).status_code in (200, 201), "the request itself is right"
    statuses = set()
    for changed in each_odd(sent, steps):
        answer = responder.post(path, changed)
        assert answer.status_code in ALLOWED, (changed, answer.text)
        statuses.add(answer.status_code)
    assert statuses & {400, 404}, statuses
    assert responder.http.delete(f"/v1/sessions/{names['session']}").status_code == 200


def test_the_settings_of_a_session_may_be_odd(responder: Server, names: dict[str, str]) -> None:
    path = f"/v1/sessions/{names['session']}"
    assert responder.http.patch(path, json=CHANGE).status_code == 200
    for changed in each_odd(CHANGE, range(len(ODD))):
        assert responder.http.patch(path, json=changed).status_code in ALLOWED, changed
    assert responder.http.delete(path).status_code == 200


@pytest.mark.parametrize("steps", WAYS)
def test_any_value_of_a_message_on_a_responses_socket_may_be_another(responder: Server, steps: Any) -> None:
    """Each message is answered by an error or a response that ends, and the connection stays."""
    sent = {"type": "response.create", **RESPONSE, "stream_id": "s"}
    url = responder.url.replace("http://", "ws://") + "/v1/responses"
    with connect(url) as connection:

        def answered(message: dict[str, Any]) -> str:
            connection.send(json.dumps(message))
            while True:
                event = json.loads(connection.recv(timeout=60))
                if event["type"] in ("error", "response.completed", "response.incomplete", "response.failed"):
                    assert event.get("status", 400) < 500, (message, event)
                    return str(event["type"])

        assert answered(sent) != "error"
        ends = {answered(changed) for changed in each_odd(sent, steps)}
        assert {"error", "response.incomplete"} <= ends
        assert answered(sent) != "error"


def realtime_events() -> dict[str, dict[str, Any]]:
    """Events of each kind with all of their fields."""
    settings: dict[str, Any] = {
        "type": "realtime",
        "instructions": "Be brief.",
        "output_modalities": ["text"],
        "tools": [FLAT[0]],
        "tool_choice": {"type": "function", "name": "weather"},
        "parallel_tool_calls": False,
        "max_output_tokens": 1,
        "reasoning": {"effort": "low"},
        "audio": {"input": {"turn_detection": {"type": "server_vad"}}, "output": {"voice": "v"}},
    }
    answer = {name: settings[name] for name in settings if name not in ("type", "audio")}
    content = [{"type": "input_text", "text": "x"}]
    item = {"type": "message", "role": "user", "content": content, "id": "item"}
    return {
        "settings": {"type": "session.update", "session": settings},
        "item": {"type": "conversation.item.create", "item": item, "previous_item_id": None},
        "call": {
            "type": "conversation.item.create",
            "item": {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
        },
        "cut": {
            "type": "conversation.item.truncate",
            "item_id": "none",
            "content_index": 0,
            "audio_end_ms": 0,
            "text_end": 1,
        },
        "response": {
            "type": "response.create",
            "response": {**answer, "conversation": "none", "input": [item], "metadata": {"a": "b"}},
        },
    }


@pytest.mark.parametrize("steps", WAYS)
@pytest.mark.parametrize("kind", realtime_events())
def test_any_value_of_a_realtime_event_may_be_another(caller: Server, kind: str, steps: Any) -> None:
    """Each event is answered, and the connection stays: a mark that is refused comes back after it."""
    event = realtime_events()[kind]
    with OpenAITalk(caller) as talk:
        for number, changed in enumerate(each_odd(event, steps)):
            talk.send(changed)
            if changed.get("type") == "response.create":
                talk.hear("response.done", "error")
            mark = f"mark-{number}"
            talk.send({"type": "conversation.item.delete", "item_id": "nowhere", "event_id": mark})
            while talk.hear("error")["error"]["event_id"] != mark:
                pass
        problems = [each["error"] for each in talk.heard if each["type"] == "error"]
        assert all(problem["type"] != "server_error" for problem in problems), problems
        assert len(problems) > len(each_odd(event, steps))
