"""The attacks of `neighbours`: each is a generator that is advanced until its time is over."""

from __future__ import annotations

import itertools
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from typing import Any

from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.uri import parse_uri

__all__ = ["ATTACKS", "KEY", "NEEDS_SESSIONS", "Target", "asking", "attack_until", "post"]

KEY = "key-of-the-neighbours"
CONNECT_SECONDS_MAX = 5.0
ANSWER_SECONDS_MAX = 60.0


@dataclass(frozen=True, slots=True)
class Target:
    """The address of a server, and the API key for it."""

    url: str
    key: str = KEY

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    def connect(self, timeout: float) -> socket.socket:
        """A connection to the server."""
        return socket.create_connection(self.address, timeout=timeout)

    def head(self, method: str, path: str, *headers: str) -> bytes:
        """The head of a request with a JSON body."""
        host = self.url.removeprefix("http://")
        lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Content-Type: application/json", *headers]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    def request(self, method: str, path: str, body: Any = None) -> bytes:
        """A whole request."""
        content = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        headers = (f"Authorization: Bearer {self.key}", f"Content-Length: {len(content)}")
        return self.head(method, path, *headers) + content

    def open_websocket(self, path: str) -> socket.socket:
        """A socket after the handshake of a WebSocket; its frames are written by hand."""
        connection = self.connect(CONNECT_SECONDS_MAX)
        protocol = ClientProtocol(parse_uri(f"ws://{self.url.removeprefix('http://')}{path}"))
        protocol.send_request(protocol.connect())
        connection.sendall(b"".join(protocol.data_to_send()))
        said = b""
        while not said.endswith(b"\r\n\r\n"):
            byte = connection.recv(1)
            if not byte:
                raise ConnectionError("the server closed the connection during the handshake")
            said += byte
        if not said.startswith(b"HTTP/1.1 101"):
            raise ConnectionError(said.decode("latin-1"))
        return connection


def frame(opcode: Opcode, payload: bytes = b"", *, last: bool = True) -> bytes:
    """One WebSocket frame of a client."""
    return Frame(opcode, payload, last).serialize(mask=True)


Attack = Callable[[Target], Iterator[None]]


def asking(*requests: Callable[[Target], bytes], connections: int = 1, anew: bool = False) -> Attack:
    """Send requests on persistent connections and read the answers; `anew` makes them again each time."""

    def attack(target: Target) -> Iterator[None]:
        sent = [request(target) for request in requests]
        opened: list[socket.socket] = []
        while True:
            if anew:
                sent = [request(target) for request in requests]
            while len(opened) < connections:
                opened.append(target.connect(ANSWER_SECONDS_MAX))
            for number, each in enumerate(list(opened)):
                try:
                    each.sendall(sent[number % len(sent)])
                except OSError:
                    opened.remove(each)
            for each in list(opened):
                if not answered(each):
                    opened.remove(each)
            yield

    return attack


def answered(connection: socket.socket) -> bool:
    """Read one answer; returns whether the connection can be used again."""
    said = b""
    try:
        while b"\r\n\r\n" not in said:
            piece = connection.recv(1 << 16)
            if not piece:
                return False
            said += piece
        headers, _, body = said.partition(b"\r\n\r\n")
        if b"connection: close" in headers.lower() or b"content-length:" not in headers.lower():
            connection.close()
            return False
        left = int(headers.lower().split(b"content-length:")[1].split(b"\r\n")[0]) - len(body)
        while left > 0:
            piece = connection.recv(1 << 16)
            if not piece:
                return False
            left -= len(piece)
    except OSError:
        return False
    return True


def frames(first: bytes, repeated: bytes) -> Attack:
    """Send WebSocket frames without end; reconnects when the server closes the connection."""

    def attack(target: Target) -> Iterator[None]:
        piece = repeated * (16_384 // len(repeated))
        while True:
            with suppress(OSError), target.open_websocket("/v1/realtime") as connection:
                connection.sendall(first)
                while True:
                    connection.sendall(piece)
                    yield
            yield

    return attack


def unfinished(target: Target, size: int, count: int) -> Iterator[None]:
    """Requests that are never completed."""
    begun = target.head("POST", "/v1/sessions", "Content-Length: 16000000")
    held: list[socket.socket] = []
    while True:
        with suppress(OSError):
            held.append(target.connect(CONNECT_SECONDS_MAX))
            held[-1].sendall(begun + b" " * size)
        if len(held) > count:
            held.pop(0).close()
        yield


def leaving(target: Target) -> Iterator[None]:
    """Turns whose clients disconnect before the first token."""
    body = {"prompt": "abc" * 100, "max_tokens": 1000, "ignore_eos": True, "stream": True}
    sent = target.request("POST", "/v1/completions", body)
    while True:
        with suppress(OSError), target.connect(CONNECT_SECONDS_MAX) as connection:
            connection.sendall(sent)
        yield


def numbered(path: str, body: Callable[[int], Any]) -> Attack:
    """Send requests of which no two are the same."""

    def attack(target: Target) -> Iterator[None]:
        sent = itertools.count(int(time.time() * 1000))
        return asking(lambda target: target.request("POST", path, body(next(sent))), anew=True)(target)

    return attack


def expiring(target: Target) -> Iterator[None]:
    """Open sessions for most of a second, all of which expire at its end."""
    with target.connect(ANSWER_SECONDS_MAX) as connection:
        while True:
            left = 1.0 - time.monotonic() % 1.0
            if left > 0.1:
                connection.sendall(target.request("POST", "/v1/sessions", {"ttl": left}))
                if not answered(connection):
                    return
            else:
                time.sleep(left)
            yield


def saying(target: Target) -> Iterator[None]:
    """Say a long input over a WebSocket, piece by piece, and take it back."""
    while True:
        with suppress(OSError), target.open_websocket("/v1/realtime") as connection:
            connection.sendall(frame(Opcode.TEXT, b'{"type":"session.open"}'))
            while True:
                for _ in range(16):
                    said = json.dumps({"type": "input.append", "text": "word " * 2000}).encode()
                    connection.sendall(frame(Opcode.TEXT, said))
                    yield
                connection.sendall(frame(Opcode.TEXT, b'{"type":"input.replace","text":"","start":0}'))
                yield
        yield


def burning(_: Target) -> Iterator[None]:
    """The control: send nothing, keep a processor busy."""
    while True:
        sum(range(100_000))
        yield


SHORT = {"max_tokens": 2, "ignore_eos": True}


def chat(size: int) -> Callable[[Target], bytes]:
    """A chat with a message of so many bytes."""
    messages = [{"role": "user", "content": "word " * (size // 5)}]
    return lambda target: target.request("POST", "/v1/chat/completions", {"messages": messages, **SHORT})


def get(path: str) -> Callable[[Target], bytes]:
    """A GET request."""
    return lambda target: target.request("GET", path)


def post(path: str, body: Any) -> Callable[[Target], bytes]:
    """A POST request."""
    return lambda target: target.request("POST", path, body)


def conversation(number: int) -> Any:
    """A chat of thousands of messages that is sent whole, and has a session of its own."""
    roles = itertools.cycle(("user", "assistant"))
    said = [{"role": next(roles), "content": f"{number} {place}"} for place in range(8001)]
    return {"messages": said, **SHORT}


def schema(number: int) -> Any:
    """A chat whose answer must match a large schema."""
    properties = {f"p{number}-{place}": {"type": "string", "maxLength": 50} for place in range(400)}
    wanted = {"name": "a", "schema": {"type": "object", "properties": properties}}
    asked = {"type": "json_schema", "json_schema": wanted}
    return {"messages": [{"role": "user", "content": "abc"}], "response_format": asked, **SHORT}


BEGUN = frame(Opcode.TEXT, b"{", last=False)
ATTACKS: dict[str, Attack] = {
    "processor": burning,
    "text of 100 kB": asking(chat(100_000)),
    "text of 1 MB": asking(chat(1_000_000)),
    "text of 15 MB": asking(chat(15_000_000)),
    "system of 15 MB": asking(post("/v1/sessions", {"system": "x" * 15_000_000})),
    "response of 15 MB": asking(post("/v1/responses", {"input": "word " * 3_000_000})),
    "message of 15 MB": asking(
        post(
            "/v1/messages", {"messages": [{"role": "user", "content": "word " * 3_000_000}], "max_tokens": 1}
        )
    ),
    "whole chats": numbered("/v1/chat/completions", conversation),
    "schemas": numbered("/v1/chat/completions", schema),
    "spoken input": saying,
    "4 million token ids": asking(post("/v1/completions", {"prompt": [7] * 4_000_000})),
    "stop tokens": asking(
        post("/v1/completions", {"prompt": "x", "stop_token_ids": [7] * 3_000_000, **SHORT})
    ),
    "empty frames": frames(BEGUN, frame(Opcode.CONT, last=False)),
    "pings": frames(b"", frame(Opcode.PING)),
    "half-open": lambda target: unfinished(target, 0, 500),
    "unfinished bodies": lambda target: unfinished(target, 15_000_000, 30),
    "lists": asking(get("/v1/sessions"), connections=8),
    "memory": asking(get("/v1/memory"), connections=8),
    "choices": asking(post("/v1/completions", {"prompt": "abc", "n": 48, **SHORT})),
    "prompts": asking(post("/v1/completions", {"prompt": ["abc"] * 48, **SHORT})),
    "leaving": leaving,
    "expiring": expiring,
    "flushes": asking(
        *(post("/v1/completions", {"prompt": f"{number} " * 400, **SHORT}) for number in range(64)),
        post("/flush_cache", {}),
        connections=65,
    ),
    "strangers": asking(
        lambda target: Target(target.url, "nobody").request("GET", "/v1/models"), connections=8
    ),
}
"""What the attacker does, by name."""

NEEDS_SESSIONS = ("lists", "memory")


def attack_until(name: str, target: Target, ready: Event, go: Event, rounds: Any) -> None:
    """The attacker's process: attack until it is killed."""
    attacking = ATTACKS[name](target)
    ready.set()
    go.wait()
    for _ in attacking:
        rounds.value += 1
