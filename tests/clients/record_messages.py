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
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anthropic
from anthropic import beta_tool
from pydantic import BaseModel

HEADERS = ("anthropic-version", "anthropic-beta", "x-api-key", "authorization", "x-app", "content-type")
TOOLS_KEPT = 6
LONG = 60
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
CALLING = f"<think>hm</think>Let me see.\n{CALL}"
WEATHER: Any = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
COMMAND = 'First.\n<tool_call>\n{"name": "Bash", "arguments": {"command": "true"}}\n</tool_call>'


class Proxy:
    """Passes requests on and keeps each with its answer."""

    def __init__(self, server: str) -> None:
        self.kept: list[dict[str, Any]] = []
        target, kept = urlsplit(server), self.kept

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.do_POST()

            def do_GET(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                upstream = HTTPConnection(target.hostname or "", target.port, timeout=120)
                upstream.request(self.command, self.path, body, _passed(dict(self.headers.items())))
                answer = upstream.getresponse()
                content = answer.read()
                kept.append(_exchange(self, body, answer.status, content))
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                        self.send_header(name, value)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
                upstream.close()

            def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
                """Nothing."""

        self._listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._listener.server_address[1]}"
        threading.Thread(target=self._listener.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop."""
        self._listener.shutdown()
        self._listener.server_close()


def _passed(headers: dict[str, str]) -> dict[str, str]:
    dropped = ("host", "connection", "accept-encoding")
    return {name: value for name, value in headers.items() if name.lower() not in dropped}


def _exchange(handler: BaseHTTPRequestHandler, body: bytes, status: int, content: bytes) -> dict[str, Any]:
    headers = {name.lower(): value for name, value in handler.headers.items()}
    stream = content.startswith(b"event: ")
    return {
        "method": handler.command,
        "path": handler.path,
        "headers": {name: headers[name] for name in HEADERS if name in headers},
        "request": json.loads(body) if body else None,
        "status": status,
        "answer": _events(content) if stream else _json(content),
    }


def _json(content: bytes) -> Any:
    return json.loads(content) if content.startswith(b"{") else None


def _events(content: bytes) -> list[Any]:
    """The events of a stream, with adjacent deltas of a block as one."""
    events: list[Any] = []
    for line in content.decode().splitlines():
        if line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            delta, last = event.get("delta", {}), events[-1].get("delta", {}) if events else {}
            if event["type"] == "content_block_delta" and last.get("type") == delta["type"]:
                for name in delta.keys() - {"type"}:
                    last[name] += delta[name]
            else:
                events.append(event)
    return events


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


def scrubbed(value: Any, words: dict[str, str]) -> Any:
    """A value whose long texts are replaced, the same text by the same words; most tools are left out."""
    if isinstance(value, dict):
        return {
            name: scrubbed(inner[:TOOLS_KEPT] if name == "tools" else inner, words)
            for name, inner in value.items()
            if name not in ("description", "$schema") or not isinstance(inner, str)
        }
    if isinstance(value, list):
        return [scrubbed(inner, words) for inner in value]
    if not isinstance(value, str) or len(value) <= LONG or "<tool_call>" in value:
        return value
    head = re.match(r"<system-reminder>|x-anthropic-billing-header:", value)
    number = words.setdefault(value, f"text {len(words)}")
    return f"{head[0]} {number}" if head else number


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
