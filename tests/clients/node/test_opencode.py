"""opencode by npm, in its run mode: its provider for OpenAI-compatible servers, against the echo model.

The model repeats what it is told, so the prompt is the first call, and the file that it prints is the second.
Prompts come from standard input: opencode puts an argument with spaces between quotation marks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.clients.conftest import serving
from tests.clients.node.running import (
    calling,
    environment,
    interrupt_command,
    require_node,
    run_command,
)
from tests.clients.recording import Recorder
from tests.clients.shown import shows

require_node()

ALONE = ["run", "--format", "json", "--pure"]
FIRST = calling("bash", command="cat next.txt", description="read")
SECOND = calling("bash", command="echo the end", description="say")


class Opencode:
    """One user of opencode, in a home of their own, with a short prompt and one tool."""

    def __init__(self, home: Path) -> None:
        self.home = home
        (home / "next.txt").write_text(SECOND)

    def configure(self, url: str) -> None:
        models = {"echo": {"name": "echo", "limit": {"context": 131072, "output": 32000}}}
        options = {"baseURL": f"{url}/v1", "apiKey": "none"}
        provider = {"npm": "@ai-sdk/openai-compatible", "name": "Holdfast", "options": options}
        settings = {
            "model": "holdfast/echo",
            "small_model": "holdfast/echo",
            "autoupdate": False,
            "share": "disabled",
            "provider": {"holdfast": {**provider, "models": models}},
            "permission": "allow",
            "tools": {"*": False, "bash": True},
            "agent": {"build": {"prompt": "Be brief."}},
        }
        (self.home / "opencode.json").write_text(json.dumps(settings))

    def variables(self) -> dict[str, str]:
        return environment(
            self.home,
            OPENCODE_DISABLE_AUTOUPDATE="1",
            OPENCODE_DISABLE_MODELS_FETCH="1",
            OPENCODE_DISABLE_LSP_DOWNLOAD="1",
            OPENCODE_DISABLE_DEFAULT_PLUGINS="1",
        )

    def run(self, text: str, *arguments: str) -> list[dict[str, Any]]:
        return run_command("opencode", [*ALONE, *arguments], self.home, self.variables(), text)


def parts(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event["part"] for event in events if event["type"] == kind]


def last_text(events: list[dict[str, Any]]) -> str:
    said: str = parts(events, "text")[-1]["text"]
    return said.strip()


def of_the_agent(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The requests of the agent itself, without those for a title."""
    return [request for request in requests if request.get("tools")]


@shows(
    "npm:opencode-ai",
    "chat completions",
    "two turns",
    "tool round",
    "two rounds",
    "streamed calls",
    "interruption",
)
def test_opencode_runs_two_rounds_is_interrupted_and_goes_on(
    agent_recorder: Recorder, tmp_path: Path
) -> None:
    opencode = Opencode(tmp_path)
    opencode.configure(agent_recorder.url)
    events = opencode.run(FIRST)
    states = [part["state"] for part in parts(events, "tool_use")]
    assert [state["input"]["command"] for state in states] == ["cat next.txt", "echo the end"], events
    assert "the end" in last_text(events) and agent_recorder.refused == []
    sent = of_the_agent(agent_recorder.requests)[-1]["messages"]
    calls = [call["id"] for message in sent for call in message.get("tool_calls") or ()]
    assert calls == [message["tool_call_id"] for message in sent if message["role"] == "tool"]
    assert len(calls) == 2
    counts = [part["tokens"] for part in parts(events, "step_finish")]
    assert all(count["cache"]["read"] > count["input"] for count in counts[1:]), counts

    before = len(of_the_agent(agent_recorder.begun))
    interrupt_command(
        "opencode",
        [*ALONE, "--continue"],
        tmp_path,
        opencode.variables(),
        lambda: len(of_the_agent(agent_recorder.begun)) > before,
        "y" * 8000,
    )
    assert last_text(opencode.run("after", "--continue")) == "after"
    assert agent_recorder.refused == []


@shows("npm:opencode-ai", "chat completions", "two turns", "restart")
def test_opencode_goes_on_after_a_restart_of_the_server(tmp_path: Path) -> None:
    opencode = Opencode(tmp_path)
    sizes = ("--kv-tokens", "131072", "--context-length", "65536", "--tool-parser", "hermes")
    journal = ("--journal", str(tmp_path / "journal"))
    for text, arguments in (("hello", []), ("again", ["--continue"])):
        with serving(tmp_path / "errors", "echo", *sizes, *journal) as url:
            opencode.configure(url)
            assert last_text(opencode.run(text, *arguments)) == text
