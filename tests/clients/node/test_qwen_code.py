"""Qwen Code by npm, without a person at the terminal: its chat completions against the echo model.

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
from tests.clients.node.test_claude_code import blocks, result_of
from tests.clients.recording import Recorder
from tests.clients.shown import shows

require_node()

BRIEF = ["--bare", "--core-tools", "run_shell_command", "--system-prompt", "Be brief."]
"""Its own prompt and tools are long, and the model of the tests reads them letter by letter."""
ALONE = ["--auth-type", "openai", "--yolo", "--output-format", "stream-json", *BRIEF]
FIRST = calling("run_shell_command", command="cat next.txt", is_background=False)
CUT = "y" * 4000
"""It sends the text of a turn that was cut again, before the next one, and the model repeats both."""
SECOND = calling("run_shell_command", command="echo the end", is_background=False)


class Qwen:
    """One user of Qwen Code, in a home of their own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        (home / "next.txt").write_text(SECOND)

    def variables(self, url: str) -> dict[str, str]:
        return environment(
            self.home,
            OPENAI_BASE_URL=f"{url}/v1",
            OPENAI_API_KEY="none",
            OPENAI_MODEL="echo",
            QWEN_CODE_SUPPRESS_YOLO_WARNING="1",
        )

    def run(self, url: str, *arguments: str) -> list[dict[str, Any]]:
        return run_command("qwen", [*ALONE, *arguments], self.home, self.variables(url))


@shows(
    "npm:@qwen-code/qwen-code",
    "chat completions",
    "two turns",
    "tool round",
    "two rounds",
    "streamed calls",
)
def test_qwen_code_runs_two_rounds_and_goes_on(agent_recorder: Recorder, tmp_path: Path) -> None:
    qwen, url = Qwen(tmp_path), agent_recorder.url
    events = qwen.run(url, FIRST)
    calls = blocks(events, "tool_use")
    assert [call["input"]["command"] for call in calls] == ["cat next.txt", "echo the end"], events
    results = blocks(events, "tool_result")
    assert [result["tool_use_id"] for result in results] == [call["id"] for call in calls]
    assert "the end" in result_of(events) and agent_recorder.refused == []
    usage = events[-1]["usage"]
    assert usage["cache_read_input_tokens"] > 0.6 * usage["input_tokens"]
    assert result_of(qwen.run(url, "--continue", "again")).endswith("again")
    assert agent_recorder.refused == []


@shows("npm:@qwen-code/qwen-code", "chat completions", "interruption")
def test_qwen_code_goes_on_after_an_interruption(agent_recorder: Recorder, tmp_path: Path) -> None:
    qwen, url = Qwen(tmp_path), agent_recorder.url
    assert result_of(qwen.run(url, "hello")).endswith("hello")
    before = len(agent_recorder.begun)
    interrupt_command(
        "qwen",
        [*ALONE, "--continue", CUT],
        tmp_path,
        qwen.variables(url),
        lambda: len(agent_recorder.begun) > before,
    )
    assert result_of(qwen.run(url, "--continue", "after")).endswith("after")
    assert agent_recorder.refused == []


@shows("npm:@qwen-code/qwen-code", "chat completions", "two turns", "restart")
def test_qwen_code_goes_on_after_a_restart_of_the_server(tmp_path: Path) -> None:
    qwen = Qwen(tmp_path)
    sizes = ("--kv-tokens", "131072", "--context-length", "65536", "--tool-parser", "hermes")
    journal = ("--journal", str(tmp_path / "journal"))
    for text, arguments in (("hello", []), ("again", ["--continue"])):
        with serving(tmp_path / "errors", "echo", *sizes, *journal) as url:
            assert result_of(qwen.run(url, *arguments, text)).endswith(text)
