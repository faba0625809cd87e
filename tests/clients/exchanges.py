"""A proxy that keeps what clients send and get, for recordings that tests replay.

Texts that clients write themselves, such as their prompts and descriptions of tools, are replaced: what
matters is where text stands, not what it says.
"""

from __future__ import annotations

import json
import re
import threading
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

__all__ = ["Proxy", "scrubbed"]

HEADERS = ("anthropic-version", "anthropic-beta", "x-api-key", "authorization", "x-app", "content-type")
TOOLS_KEPT = 6
LONG = 60


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
    stream = content.startswith((b"event: ", b"data: "))
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
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            block = event.get("type") == "content_block_delta"
            last = events[-1].get("delta", {}) if events and block else {}
            if block and last.get("type") == event["delta"]["type"]:
                for name in event["delta"].keys() - {"type"}:
                    last[name] += event["delta"][name]
            else:
                events.append(event)
    return events


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
