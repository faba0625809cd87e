"""Codex by npm, without a person at the terminal: its Responses provider against a server of the echo model.

The model repeats what it is told, so the prompt is the first call, and the file that it prints is the second.
"""

from __future__ import annotations

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

CONFIG = """
model = "echo"
model_provider = "holdfast"
model_context_window = 131072

[model_providers.holdfast]
name = "Holdfast"
base_url = "{url}/v1"
wire_api = "responses"
"""
ALONE = ["--skip-git-repo-check", "--json", "--dangerously-bypass-approvals-and-sandbox"]
FIRST = calling("exec_command", cmd="cat next.txt")
SECOND = calling("exec_command", cmd="echo the end")


class Codex:
    """One user of codex, in a home of their own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        (home / "next.txt").write_text(SECOND)

    def configure(self, url: str) -> None:
        (self.home / "config.toml").write_text(CONFIG.format(url=url))

    def variables(self) -> dict[str, str]:
        return environment(self.home, CODEX_HOME=str(self.home))

    def run(self, *arguments: str) -> list[dict[str, Any]]:
        return run_command("codex", ["exec", *arguments], self.home, self.variables())


def items(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    found = [event["item"] for event in events if event["type"] == "item.completed"]
    return [item for item in found if item["type"] == kind]


def usage(events: list[dict[str, Any]]) -> dict[str, int]:
    (done,) = [event for event in events if event["type"] == "turn.completed"]
    shown: dict[str, int] = done["usage"]
    return shown


@shows(
    "npm:@openai/codex",
    "Responses",
    "two turns",
    "tool round",
    "two rounds",
    "streamed calls",
    "interruption",
)
def test_codex_runs_two_rounds_is_interrupted_and_goes_on(agent_recorder: Recorder, tmp_path: Path) -> None:
    codex = Codex(tmp_path)
    codex.configure(agent_recorder.url)
    events = codex.run(*ALONE, FIRST)
    commands = items(events, "command_execution")
    assert [command["exit_code"] for command in commands] == [0, 0], events
    assert "the end" in commands[1]["aggregated_output"]
    assert "the end" in items(events, "agent_message")[-1]["text"]
    assert len(agent_recorder.requests) == 3 and agent_recorder.refused == []
    sent = agent_recorder.requests[-1]["input"]
    calls = [item["call_id"] for item in sent if item["type"] == "function_call"]
    assert calls == [item["call_id"] for item in sent if item["type"] == "function_call_output"]
    assert len(calls) == 2
    # Two of the three requests found their history in memory.
    assert usage(events)["cached_input_tokens"] > 0.6 * usage(events)["input_tokens"]

    said = "y" * 30000
    arguments = ["exec", "resume", "--last", *ALONE, said]
    interrupt_command(
        "codex", arguments, tmp_path, codex.variables(), lambda: len(agent_recorder.requests) > 3
    )
    after = codex.run("resume", "--last", *ALONE, "after")
    assert items(after, "agent_message")[-1]["text"].strip() == "after"
    assert agent_recorder.refused == []


@shows("npm:@openai/codex", "Responses", "two turns", "restart")
def test_codex_goes_on_after_a_restart_of_the_server(tmp_path: Path) -> None:
    codex = Codex(tmp_path)
    sizes = ("--kv-tokens", "131072", "--context-length", "65536", "--tool-parser", "hermes")
    journal = ("--journal", str(tmp_path / "journal"))
    for arguments, said in ((["hello"], "hello"), (["resume", "--last", "again"], "again")):
        with serving(tmp_path / "errors", "echo", *sizes, *journal) as url:
            codex.configure(url)
            *resumed, text = arguments
            events = codex.run(*resumed, *ALONE, text)
            assert items(events, "agent_message")[-1]["text"].strip() == said
