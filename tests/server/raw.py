"""Requests and frames written by hand, for what no client library would send."""

import base64
import contextlib
import os
import socket
import struct
from collections.abc import Iterator

from tests.server.serving import Server

TEXT, CONTINUATION, PING, CLOSE = 1, 0, 9, 8


def address(server: Server) -> tuple[str, int]:
    host, port = server.url.removeprefix("http://").rsplit(":", 1)
    return host, int(port)


@contextlib.contextmanager
def connected(server: Server) -> Iterator[socket.socket]:
    with socket.create_connection(address(server), timeout=60) as connection:
        yield connection


def rest(connection: socket.socket) -> bytes:
    """All that comes until the server closes."""
    answer = b""
    with contextlib.suppress(ConnectionError):
        while more := connection.recv(65536):
            answer += more
    return answer


def exchange(server: Server, request: str | bytes) -> bytes:
    """Send a request as it is, then close the sending half; all that is answered."""
    with connected(server) as connection:
        connection.sendall(request.encode("latin-1") if isinstance(request, str) else request)
        connection.shutdown(socket.SHUT_WR)
        return rest(connection)


def status(answer: bytes) -> int:
    """The status of the first answer; 0 if there is none."""
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0


def upgrade(path: str = "/v1/realtime", method: str = "GET", host: str = "localhost", more: str = "") -> str:
    """A request that asks for a WebSocket."""
    key = base64.b64encode(os.urandom(16)).decode()
    return (
        f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n{more}\r\n"
    )


def frame(opcode: int, payload: bytes = b"", *, final: bool = True) -> bytes:
    """A frame as a client sends it, masked with zeros."""
    size = len(payload)
    if size < 126:
        length = bytes([0x80 | size])
    elif size < 1 << 16:
        length = bytes([0x80 | 126]) + struct.pack("!H", size)
    else:
        length = bytes([0x80 | 127]) + struct.pack("!Q", size)
    return bytes([(0x80 if final else 0) | opcode]) + length + bytes(4) + payload


@contextlib.contextmanager
def opened_socket(server: Server) -> Iterator[socket.socket]:
    """A WebSocket to the realtime door, its handshake done."""
    with connected(server) as connection:
        connection.sendall(upgrade().encode())
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += connection.recv(1)
        assert head.startswith(b"HTTP/1.1 101 "), head
        yield connection


def frames_of(received: bytes) -> list[tuple[int, bytes]]:
    """The frames that a server has sent, as opcode and payload; an unfinished last one is left out."""
    found, at = [], 0
    while len(received) - at >= 2:
        opcode, size, at = received[at] & 15, received[at + 1] & 127, at + 2
        if size >= 126:
            width = 2 if size == 126 else 8
            size, at = int.from_bytes(received[at : at + width], "big"), at + width
        if len(received) - at < size:
            break
        found.append((opcode, received[at : at + size]))
        at += size
    return found
