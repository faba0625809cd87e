"""Connections without manners: bytes on a socket, frames that no library would send."""

from __future__ import annotations

import http.client
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tests.hostile.demands import ANSWER_SECONDS

TEXT, BINARY, CLOSE, PING, PONG, CONTINUATION = 0x1, 0x2, 0x8, 0x9, 0xA, 0x0

STILL_OPEN = 0
"""In place of a close code: the connection is as it was."""

GONE = (ConnectionError, TimeoutError, http.client.HTTPException)
"""What a connection raises that the server has closed, or never answers."""


class Listening(Protocol):
    """Whoever has an address."""

    @property
    def url(self) -> str:
        """Where it listens, such as http://127.0.0.1:8000."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back: the status (0 if nothing did), the headers and the body."""

    status: int
    headers: dict[str, str]
    body: str


NOTHING = Answer(0, {}, "")


def address_of(server: Listening) -> tuple[str, int]:
    """Where a server listens."""
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    return host, int(port)


def connect(server: Listening, timeout: float = ANSWER_SECONDS) -> socket.socket:
    """A connection to the server."""
    return socket.create_connection(address_of(server), timeout=timeout)


def head(server: Listening, method: str, path: str, *headers: str, host: str | None = None) -> bytes:
    """The head of a request, with the right Host unless told otherwise ("" for none)."""
    named = ":".join(map(str, address_of(server))) if host is None else host
    lines = [f"{method} {path} HTTP/1.1", *([f"Host: {named}"] if named else []), *headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def answer_of(connection: socket.socket) -> Answer:
    """The next answer on a connection; `NOTHING` if it is closed or stays silent."""
    response = http.client.HTTPResponse(connection)
    try:
        response.begin()
        body = b"" if response.status == 101 else response.read()
    except (*GONE, OSError):
        return NOTHING
    headers = {name.lower(): value for name, value in response.getheaders()}
    return Answer(response.status, headers, body.decode("utf-8", "replace"))


def ask(server: Listening, sent: bytes, timeout: float = ANSWER_SECONDS, *, is_all: bool = False) -> Answer:
    """Send bytes on a connection of their own, and hear what is answered; `is_all` says that no more come."""
    with connect(server, timeout) as connection:
        try:
            connection.sendall(sent)
            if is_all:
                connection.shutdown(socket.SHUT_WR)
        except OSError:
            return answer_of(connection)  # Refused before all of it was read.
        return answer_of(connection)


def closed_by_server(connection: socket.socket) -> bool:
    """Whether the server has closed a connection; an answer that came before is read away."""
    connection.setblocking(False)
    try:
        while connection.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


# --- WebSockets ---------------------------------------------------------------------------------------


def handshake(server: Listening, path: str, *headers: str, host: str | None = None) -> bytes:
    """The request that opens a WebSocket."""
    return head(
        server,
        "GET",
        path,
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
        *headers,
        host=host,
    )


def open_socket(server: Listening, path: str) -> socket.socket:
    """A WebSocket whose frames are written by hand."""
    connection = connect(server)
    connection.sendall(handshake(server, path))
    said = b""
    while not said.endswith(b"\r\n\r\n"):
        byte = connection.recv(1)
        assert byte, said
        said += byte
    assert said.startswith(b"HTTP/1.1 101"), said
    return connection


def frame(opcode: int, payload: bytes = b"", *, last: bool = True) -> bytes:
    """One frame as a client sends it: masked, with a mask of zeros."""
    first = (0x80 if last else 0) | opcode
    size = len(payload)
    if size < 126:
        length = bytes([0x80 | size])
    elif size < 1 << 16:
        length = bytes([0x80 | 126]) + struct.pack(">H", size)
    else:
        length = bytes([0x80 | 127]) + struct.pack(">Q", size)
    return bytes([first]) + length + bytes(4) + payload


def close_code(connection: socket.socket) -> int | None:
    """The code that the server closed a WebSocket with; None if the connection broke without one.

    `STILL_OPEN` if nothing of that happens.
    """
    said = bytearray()
    try:
        while piece := connection.recv(1 << 20):
            said += piece
            code = _close_in(said)
            if code is not None:
                return code
    except TimeoutError:
        return STILL_OPEN
    except OSError:
        return None
    return _close_in(said)


def _close_in(said: bytearray) -> int | None:
    """The code of a close frame among frames of a server; whole frames before it are dropped."""
    while len(said) >= 2:
        opcode, size, start = said[0] & 0xF, said[1] & 0x7F, 2
        if size == 126:
            size, start = int.from_bytes(said[2:4]), 4
        elif size == 127:
            size, start = int.from_bytes(said[2:10]), 10
        if len(said) < start + size:
            return None
        if opcode == CLOSE:
            return int.from_bytes(said[start : start + 2]) if size >= 2 else 1005
        del said[: start + size]
    return None


# --- what the system knows of a server ------------------------------------------------------------


def family_of(pid: int) -> list[int]:
    """A process and everything that it started."""
    found = [pid]
    for parent in found:
        try:
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += [int(child) for child in (task / "children").read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue  # It has just ended.
    return found
