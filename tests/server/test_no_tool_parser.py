"""`--tool-parser none`: tools are shown to the model, what it writes is text, and no call can be required."""

from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.engine.engine import Engine
from holdfast.engine.tools.request import ToolsRefused
from tests.server.agents import BERN, TOOLS, calling
from tests.server.serving import Server

CALL = calling("weather", BERN)
NAMED = {"type": "function", "function": {"name": "weather"}}
ALLOWED = {
    "type": "allowed_tools",
    "allowed_tools": {"mode": "required", "tools": [NAMED]},
}


@pytest.fixture(scope="module")
def reader_of_none() -> Iterator[Server]:
    server = Server("echo", "--tool-parser", "none", "--audit", "strict", "--kv-tokens", "8192")
    yield server
    server.check_clean()
    assert server.stop() == 0


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "echo", "messages": [{"role": "user", "content": CALL}], "tools": TOOLS, **fields}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tool_choice": "auto"},
        {"tool_choice": "none"},
        {"parallel_tool_calls": False},
        {"tools": [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}]},
    ],
    ids=["default", "auto", "none", "one call", "strict"],
)
def test_a_call_arrives_as_text(reader_of_none: Server, fields: dict[str, Any]) -> None:
    answer = reader_of_none.post("/v1/chat/completions", chat(**fields)).json()["choices"][0]
    assert (answer["message"]["content"], answer["finish_reason"]) == (CALL, "stop")
    assert not answer["message"].get("tool_calls")


@pytest.mark.parametrize("choice", ["required", NAMED, ALLOWED], ids=["required", "named", "allowed"])
def test_a_call_that_must_be_made_is_refused_with_the_reason(reader_of_none: Server, choice: Any) -> None:
    refused = reader_of_none.post("/v1/chat/completions", chat(tool_choice=choice))
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "tool_choice")
    assert "--tool-parser none" in error["message"] and "send 'auto' or 'none'" in error["message"]


def test_a_session_has_tools_and_no_calls(reader_of_none: Server) -> None:
    name = reader_of_none.open(tools=TOOLS)
    said = reader_of_none.say(name, CALL)
    assert (said["text"], said["finish_reason"]) == (CALL, "stop") and not said.get("tool_calls")
    refused = reader_of_none.post(f"/v1/sessions/{name}/turns", {"input": "hi", "tool_choice": "required"})
    assert refused.status_code == 400 and "--tool-parser none" in refused.text
    assert reader_of_none.state(name)["turns"] == 1


def test_a_constraint_is_that_of_the_whole_text(reader_of_none: Server) -> None:
    answer = reader_of_none.post("/v1/chat/completions", chat(regex="(yes|no)")).json()["choices"][0]
    assert answer["message"]["content"] in ("yes", "no")


def test_the_same_in_process() -> None:
    with Engine("echo", tool_parser="none", kv_tokens=4096) as engine, engine.session(tools=TOOLS) as session:
        turn = session.say(CALL)
        assert (turn.text, turn.calls) == (CALL, ())
        with pytest.raises(ToolsRefused, match="--tool-parser none"):
            session.say("hi", tool_choice="required")
