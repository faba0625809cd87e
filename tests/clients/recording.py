"""A proxy in front of the server that remembers what clients send: bodies as JSON, in order.

It passes the answers on as they come, so that streams stay streams. Standard library only.
"""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

DROPPED = {"host", "connection", "content-length", "transfer-encoding", "accept-encoding"}


class Recorder:
    """The proxy at `url`: bodies that were posted since `clear`, and answers to them that were errors.

    `begun` has those bodies whose answers have reached the client with a first piece.
    """

    def __init__(self, server: str) -> None:
        self.requests: list[dict[str, Any]] = []
        self.begun: list[dict[str, Any]] = []
        self.refused: list[str] = []
        self._target = urlsplit(server)
        self._listener = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._listener.server_address[1]}"
        self._thread = threading.Thread(target=self._listener.serve_forever, daemon=True)
        self._thread.start()

    def clear(self) -> None:
        """Forget what was sent."""
        self.requests.clear()
        self.begun.clear()
        self.refused.clear()

    def close(self) -> None:
        """Stop."""
        self._listener.shutdown()
        self._listener.server_close()
        self._thread.join()

    def tool_results(self) -> list[dict[str, Any]]:
        """The tool messages of the last request."""
        return [message for message in self.requests[-1]["messages"] if message["role"] == "tool"]

    def calls_sent_back(self) -> list[dict[str, Any]]:
        """The tool calls in the assistant's messages of the last request."""
        messages = self.requests[-1]["messages"]
        return [call for message in messages for call in message.get("tool_calls") or ()]

    def assert_loop(self, rounds: int) -> None:
        """So many calls were answered: every result names its call, and nothing was refused."""
        assert self.refused == []
        results = [result["tool_call_id"] for result in self.tool_results()]
        assert len(results) >= rounds, self.requests[-1]
        assert results == [call["id"] for call in self.calls_sent_back()]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                recorder._pass_on(self, b"")

            def do_DELETE(self) -> None:
                recorder._pass_on(self, b"")

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                if body:
                    recorder.requests.append(json.loads(body))
                recorder._pass_on(self, body)

            def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
                """Nothing: the tests say what went wrong."""

        return Handler

    def _pass_on(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        headers = {name: value for name, value in handler.headers.items() if name.lower() not in DROPPED}
        upstream = HTTPConnection(self._target.hostname or "", self._target.port, timeout=300)
        try:
            upstream.request(handler.command, handler.path, body, {**headers, "connection": "close"})
            answer = upstream.getresponse()
            handler.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in DROPPED:
                    handler.send_header(name, value)
            handler.send_header("connection", "close")
            handler.end_headers()
            kept = bytearray()
            # A client may leave in the middle of an answer; the server hears of it when `upstream` is closed.
            with suppress(ConnectionError):
                begun = False
                while chunk := answer.read1(65536):
                    handler.wfile.write(chunk)
                    if body and not begun:
                        self.begun.append(json.loads(body))
                        begun = True
                    if answer.status >= 400:
                        kept += chunk
            # Some clients get an address that is no call of the interface, to open a connection early.
            if answer.status >= 400 and handler.command == "POST":
                self.refused.append(f"{answer.status} {kept.decode(errors='replace')}")
        finally:
            upstream.close()
            handler.close_connection = True
