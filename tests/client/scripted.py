"""A server on a real socket that answers as a script says: for what a sound server never does on demand.

Each answer is given once, in order. `broken` answers end in the middle of their body, `silent` ones before
their first byte; what was asked is written down.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, ClassVar


@dataclass(frozen=True)
class Answer:
    """What to answer: a body in chunks; `broken` leaves the rest of it out, `silent` everything."""

    status: int = 200
    chunks: tuple[bytes, ...] = ()
    headers: dict[str, str] = field(default_factory=dict)
    broken: bool = False
    silent: bool = False


@dataclass(frozen=True)
class Asked:
    """What a client has asked."""

    method: str
    path: str
    body: Any
    headers: dict[str, str]


def answer(body: object, status: int = 200, **headers: str) -> Answer:
    """A JSON answer."""
    return Answer(
        status, (json.dumps(body).encode(),), {name.replace("_", "-"): v for name, v in headers.items()}
    )


def refusal(status: int, code: str, **headers: str) -> Answer:
    error = {"message": f"it is {code}", "type": "a_type", "code": code, "param": "a_param"}
    return answer({"error": error}, status, **headers)


def spoken(event: str, /, **body: object) -> bytes:
    """An event of a turn's stream."""
    return f"event: {event}\ndata: {json.dumps({'turn_id': 't-1', **body}, ensure_ascii=False)}\n\n".encode()


def delta(text: str, *tokens: int, index: int = 0) -> bytes:
    body = {"turn_id": "t-1", "index": index, "text": text, "token_ids": list(tokens)}
    return f"event: delta\ndata: {json.dumps(body, ensure_ascii=False)}\n\n".encode()


def result(text: str, *tokens: int, finish_reason: str = "stop") -> dict[str, object]:
    usage = {"prompt_tokens": 9, "cached_tokens": 4, "computed_tokens": 5, "completion_tokens": len(tokens)}
    timing = {"queue_ms": 0.5, "ttft_ms": 2.0, "total_ms": 3.0}
    return {
        "turn_id": "t-1", "text": text, "token_ids": list(tokens), "finish_reason": finish_reason,
        "usage": usage, "timing": timing,
    }  # fmt: skip


def done(text: str, *tokens: int, finish_reason: str = "stop") -> bytes:
    body = json.dumps(result(text, *tokens, finish_reason=finish_reason))
    return f"event: done\ndata: {body}\n\n".encode()


def stream(*chunks: bytes, broken: bool = False) -> Answer:
    return Answer(200, chunks, {"content-type": "text/event-stream"}, broken)


class Scripted:
    """The server; in a `with` block, on a port of its own."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.asked: list[Asked] = []
        script = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            owner: ClassVar[Scripted] = script

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                """Say nothing."""

            def do_GET(self) -> None:
                self.owner.handle(self)

            do_POST = do_DELETE = do_GET  # noqa: N815

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> Scripted:
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        length = int(handler.headers.get("content-length", 0))
        body = json.loads(handler.rfile.read(length)) if length else None
        headers = {name.lower(): value for name, value in handler.headers.items()}
        self.asked.append(Asked(handler.command, handler.path, body, headers))
        given = self.answers.pop(0)
        handler.close_connection = given.broken or given.silent
        if given.silent:
            return
        handler.send_response(given.status)
        for name, value in given.headers.items():
            handler.send_header(name, value)
        handler.send_header("transfer-encoding", "chunked")
        handler.end_headers()
        for chunk in given.chunks:
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
            handler.wfile.flush()
        if not given.broken:
            handler.wfile.write(b"0\r\n\r\n")
