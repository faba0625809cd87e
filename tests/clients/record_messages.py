"""Records Anthropic's clients: requests and answers that `tests/server/test_messages_recorded.py` replays.

Run by hand, against a server that says what it was told, in an environment that has the `anthropic` package:

    holdfast serve echo --tool-parser hermes --reasoning-parser think --context-length 131072
    python -m tests.clients.record_messages http://127.0.0.1:8000 tests/server/recorded [path of claude]

Clients talk to a proxy that keeps what passes. Texts that clients write themselves, such as Claude Code's
prompts and its descriptions of tools, are replaced: what matters is where text stands, not what it says.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
from anthropic import beta_tool
from pydantic import BaseModel

from tests.clients.exchanges import Proxy, scrubbed

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
CALLING = f"<think>hm</think>Let me see.\n{CALL}"
WEATHER: Any = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
COMMAND = 'First.\n<tool_call>\n{"name": "Bash", "arguments": {"command": "true"}}\n</tool_call>'


# --- the anthropic package ------------------------------------------------------------------------


class City(BaseModel):
    """What a parsed answer is."""

    city: str


def run_package(url: str) -> None:
    """Two turns, a tool round in each form, structured output, counting, and an error."""
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    plain: Any = {"model": "echo", "max_tokens": 400}
    system: Any = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    first = client.messages.create(messages=messages, system=system, **plain)
    messages += [first.to_param(), {"role": "user", "content": CALLING}]
    with client.messages.stream(messages=messages, system=system, tools=[WEATHER], **plain) as stream:
        called = stream.get_final_message()
    (call,) = [block for block in called.content if block.type == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]}
    messages += [
        called.to_param(),
        {"role": "user", "content": [result, {"type": "text", "text": "and then?"}]},
    ]
    client.messages.create(messages=messages, system=system, tools=[WEATHER], **plain)
    client.messages.count_tokens(model="echo", messages=messages, system=system, tools=[WEATHER])
    written: Any = [{"role": "user", "content": '{"city": "Bern"}'}]
    client.messages.parse(messages=written, output_format=City, **plain)
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    client.messages.create(messages=messages[:1], thinking=thinking, stop_sequences=["lo"], **plain)

    @beta_tool
    def weather(city: str) -> str:
        """The weather of a city."""
        return f"rain in {city}"

    runner = client.beta.messages.tool_runner(
        messages=[{"role": "user", "content": CALLING}], tools=[weather], **plain
    )
    runner.until_done()
    try:
        client.messages.create(messages=messages, **{**plain, "model": "another"})
    except anthropic.NotFoundError:
        return
    raise AssertionError("another model was served")


# --- Claude Code ----------------------------------------------------------------------------------


def run_claude(binary: str, url: str) -> None:
    """Two turns of one conversation, the first with a tool, and a count of the context."""
    with tempfile.TemporaryDirectory() as home:
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": home,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": "none",
            "ANTHROPIC_MODEL": "echo",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "echo",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }
        for arguments in (
            ["-p", COMMAND],
            ["-c", "-p", "Second."],
            ["-c", "-p", "/context"],
        ):
            command = [binary, *arguments, "--allowedTools", "Bash"]
            subprocess.run(
                command, env=environment, cwd=home, stdin=subprocess.DEVNULL, check=True, timeout=120
            )


def main() -> None:
    """Record each client into a file of its own."""
    server, folder, *claude = sys.argv[1:]
    clients: list[tuple[str, Callable[[str], None]]] = [(f"anthropic-{anthropic.__version__}", run_package)]
    if claude:
        said = subprocess.run([claude[0], "--version"], capture_output=True, text=True, check=True).stdout
        clients.append((f"claude-code-{said.split()[0]}", lambda url: run_claude(claude[0], url)))
    for name, run in clients:
        proxy = Proxy(server)
        try:
            run(proxy.url)
        finally:
            proxy.close()
        words: dict[str, str] = {}
        kept = [scrubbed(each, words) for each in proxy.kept if each["method"] == "POST"]
        path = Path(folder) / f"{name}.json"
        path.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
        print(path, len(kept))


if __name__ == "__main__":
    main()
