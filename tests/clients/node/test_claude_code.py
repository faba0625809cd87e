"""Claude Code by npm, in print mode, against a server of the echo model.

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

TRIED_FIRST = ("thinking.display", "defer_loading")
"""Fields of requests that it repeats without them: a way to show thinking, and tools that are looked up."""
BRIEF = ["--tools", "Bash", "--system-prompt", "Be brief."]
"""Its own prompt and tools are long, and the model of the tests reads them letter by letter."""
ALONE = ["--output-format", "stream-json", "--verbose", "--allowedTools", "Bash", *BRIEF]


class Claude:
    """One user of Claude Code, in a home of their own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        (home / "next.txt").write_text(calling("Bash", command="echo the end"))

    def variables(self, url: str) -> dict[str, str]:
        return environment(
            self.home,
            ANTHROPIC_BASE_URL=url,
            ANTHROPIC_API_KEY="none",
            ANTHROPIC_MODEL="echo",
            ANTHROPIC_DEFAULT_HAIKU_MODEL="echo",
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
            DISABLE_AUTOUPDATER="1",
        )

    def run(self, url: str, *arguments: str) -> list[dict[str, Any]]:
        return run_command("claude", [*arguments, *ALONE], self.home, self.variables(url))


def result_of(events: list[dict[str, Any]]) -> str:
    """What the command answers at its end."""
    assert events[-1]["type"] == "result" and not events[-1]["is_error"], events[-1]
    said: str = events[-1]["result"]
    return said


def blocks(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    messages = [event["message"] for event in events if event["type"] in ("assistant", "user")]
    lists = [message["content"] for message in messages if isinstance(message["content"], list)]
    return [block for content in lists for block in content if block["type"] == kind]


def assert_negotiated(recorder: Recorder) -> None:
    """It was refused nothing but what it tries first and goes on without."""
    assert all(any(name in each for name in TRIED_FIRST) for each in recorder.refused), recorder.refused


def conversations(recorder: Recorder) -> list[dict[str, Any]]:
    """The requests of the agent itself, without counts and small questions beside it."""
    return [request for request in recorder.requests if request.get("tools") and request.get("stream")]


@shows(
    "npm:@anthropic-ai/claude-code",
    "Messages",
    "two turns",
    "tool round",
    "two rounds",
    "streamed calls",
    "interruption",
)
def test_claude_code_runs_two_rounds_is_interrupted_and_goes_on(
    agent_recorder: Recorder, tmp_path: Path
) -> None:
    claude, url = Claude(tmp_path), agent_recorder.url
    events = claude.run(url, "-p", calling("Bash", command="cat next.txt"))
    calls = blocks(events, "tool_use")
    assert [call["input"]["command"] for call in calls] == ["cat next.txt", "echo the end"], events
    results = blocks(events, "tool_result")
    assert [result["tool_use_id"] for result in results] == [call["id"] for call in calls]
    assert "the end" in result_of(events)
    assert_negotiated(agent_recorder)
    usage = events[-1]["usage"]
    assert usage["cache_read_input_tokens"] > usage["input_tokens"]

    before = len(conversations(agent_recorder))
    interrupt_command(
        "claude",
        ["-c", "-p", "y" * 30000, *ALONE],
        tmp_path,
        claude.variables(url),
        lambda: len(conversations(agent_recorder)) > before,
    )
    assert "after" in result_of(claude.run(url, "-c", "-p", "after"))
    assert_negotiated(agent_recorder)


@shows("npm:@anthropic-ai/claude-code", "Messages", "two turns", "restart")
def test_claude_code_goes_on_after_a_restart_of_the_server(tmp_path: Path) -> None:
    claude = Claude(tmp_path)
    sizes = ("--kv-tokens", "524288", "--context-length", "131072", "--tool-parser", "hermes")
    journal = ("--journal", str(tmp_path / "journal"))
    for arguments, said in ((["-p", "hello"], "hello"), (["-c", "-p", "again"], "again")):
        with serving(tmp_path / "errors", "echo", *sizes, *journal) as url:
            assert said in result_of(claude.run(url, *arguments))
