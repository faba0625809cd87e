"""AI SDK through each of its providers: turns, tools, typed outputs, an abort, a restart."""

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

PROVIDERS = {
    "responses": ("npm:@ai-sdk/openai", "Responses"),
    "chat": ("npm:@ai-sdk/openai", "chat completions"),
    "compatible": ("npm:@ai-sdk/openai-compatible", "chat completions"),
    "anthropic": ("npm:@ai-sdk/anthropic", "Messages"),
}
TOLD = ("two turns", "tool round", "two rounds", "streamed calls", "structured output", "interruption")


def providers(*stories: str) -> list[Any]:
    """The providers as parameters, with the stories that a test shows."""
    return [pytest.param(name, marks=shows(*told, *stories)) for name, told in PROVIDERS.items()]


TRIP = {"city": "Rome", "days": 2, "cheap": True}
STREAMED = {"text-delta", "tool-input-delta", "tool-call", "tool-result", "finish-step", "finish"}


@pytest.mark.parametrize("provider", providers(*TOLD))
def test_ai_sdk(agent_recorder: Recorder, provider: str) -> None:
    told = run_script("ai_sdk.mjs", provider, agent_recorder.url, "story")
    assert told["turns"] == ["hello", "again", "after"] and agent_recorder.refused == []
    first, second, after = told["cached"]
    assert first < second < after, "each turn finds the one before it in memory"
    cut = told["interrupted"]
    assert cut["aborted"] and 0 < cut["heard"] < cut["asked"]
    for run in (told["loop"], told["streamed"]):
        assert_loop(run)
        assert run["steps"] == 3
    assert set(told["streamed"]["kinds"]) >= STREAMED
    assert told["structured"] == {"output": TRIP, "object": TRIP}


@pytest.mark.parametrize("provider", providers("restart"))
def test_ai_sdk_goes_on_after_a_restart_of_the_server(provider: str, tmp_path: Path) -> None:
    sizes = ("--kv-tokens", "32768", "--context-length", "16384", "--tool-parser", "hermes")
    messages: list[object] = []
    for text in ("hello", "again"):
        with serving(tmp_path / "errors", "echo", *sizes, "--journal", str(tmp_path / "journal")) as url:
            told = run_script("ai_sdk.mjs", provider, url, "turn", json.dumps([messages, text]))
        assert told["text"] == text
        messages = told["messages"]
    assert len(messages) == 4
