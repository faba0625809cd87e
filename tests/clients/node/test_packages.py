"""The openai and @anthropic-ai/sdk packages of npm: turns, tools, typed outputs, an abort, a restart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import serving
from tests.clients.node.running import assert_loop, require_node, run_script
from tests.clients.recording import Recorder
from tests.clients.shown import shows

require_node()

SCRIPTS = {
    "chat": ["openai.mjs", "chat"],
    "responses": ["openai.mjs", "responses"],
    "messages": ["anthropic.mjs"],
}
TOLD = ("two turns", "tool round", "two rounds", "streamed calls", "structured output", "interruption")
OPENAI, ANTHROPIC = "npm:openai", "npm:@anthropic-ai/sdk"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("chat", marks=shows(OPENAI, "chat completions", *TOLD)),
        pytest.param("responses", marks=shows(OPENAI, "Responses", *TOLD)),
        pytest.param("messages", marks=shows(ANTHROPIC, "Messages", *TOLD)),
    ],
)
def test_package(agent_recorder: Recorder, name: str) -> None:
    told = run_script(*SCRIPTS[name], agent_recorder.url, "story")
    assert told["turns"] == ["hello", "again", "after"] and agent_recorder.refused == []
    first, second, after = told["cached"]
    assert first < second < after, "each turn finds the one before it in memory"
    cut = told["interrupted"]
    assert cut["aborted"] and 0 < cut["heard"] < cut["asked"]
    assert told.get("unheard", True), "a request that is aborted before its answer ends for the client"
    assert_loop(told["loop"])
    assert_loop(told["streamed"])
    assert told["structured"] == {"city": "Rome", "days": 2, "cheap": True}


@pytest.mark.parametrize(
    ("name", "fresh"),
    [
        pytest.param("chat", [], marks=shows(OPENAI, "chat completions", "restart")),
        pytest.param("responses", None, marks=shows(OPENAI, "Responses", "restart")),
        pytest.param("messages", [], marks=shows(ANTHROPIC, "Messages", "restart")),
    ],
)
def test_package_goes_on_after_a_restart_of_the_server(name: str, fresh: Any, tmp_path: Path) -> None:
    sizes = ("--kv-tokens", "32768", "--context-length", "16384", "--tool-parser", "hermes")
    state = fresh
    for text in ("hello", "again"):
        with serving(tmp_path / "errors", "echo", *sizes, "--journal", str(tmp_path / "journal")) as url:
            told = run_script(*SCRIPTS[name], url, "turn", json.dumps([state, text]))
        assert told["text"] == text
        state = told["state"]
