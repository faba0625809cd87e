"""Frames without measure on a WebSocket: the connection that sends them is closed, all others go on."""

import socket

import pytest

from tests.hostile import demands
from tests.hostile.neighbours import Watch
from tests.hostile.raw import (
    BINARY,
    CONTINUATION,
    PING,
    PONG,
    TEXT,
    close_code,
    frame,
    open_socket,
)
from tests.hostile.test_hosts import SOCKETS
from tests.server.serving import Server

pytestmark = pytest.mark.soak

BEGUN = frame(TEXT, b'{"type": "', last=False)
FLOODS = {
    "empty continuations": (BEGUN, frame(CONTINUATION, last=False)),
    "continuations of a byte": (BEGUN, frame(CONTINUATION, b"a", last=False)),
    "empty continuations of binary": (frame(BINARY, b"", last=False), frame(CONTINUATION, last=False)),
    "pings": (b"", frame(PING)),
    "pings with a payload": (b"", frame(PING, b"p" * 125)),
    "pings inside a message": (BEGUN, frame(PING, b"p")),
    "pongs": (b"", frame(PONG)),
}
"""What begins a flood, and the frame that is repeated."""

CREATE = b'{"type": "response.create", "input": "abc", "max_output_tokens": 1, "store": false}'


def flood(connection: socket.socket, first: bytes, repeated: bytes, *, reads: bool) -> None:
    """Send frames until the server closes the connection, stops reading, or has read a great many."""
    piece = repeated * max(1, 16_384 // len(repeated))
    connection.settimeout(demands.STANDSTILL_SECONDS)
    try:
        connection.sendall(first)
        for _ in range(demands.FLOOD_BYTES // len(piece)):
            connection.sendall(piece)
            if reads:
                read_away(connection)
    except OSError:
        return


def read_away(connection: socket.socket) -> None:
    connection.setblocking(False)
    try:
        while connection.recv(1 << 16):
            pass
    except BlockingIOError:
        return
    finally:
        connection.settimeout(demands.STANDSTILL_SECONDS)


@pytest.mark.parametrize("path", SOCKETS)
@pytest.mark.parametrize("kind", FLOODS)
def test_a_flood_of_frames_closes_the_connection_and_nothing_else(echo: Server, kind: str, path: str) -> None:
    first, repeated = FLOODS[kind]
    with Watch(echo) as watch, open_socket(echo, path) as connection:
        watch.during(lambda: flood(connection, first, repeated, reads=False))
        assert close_code(connection) in (*demands.FLOOD_CLOSED, None)


def test_pings_of_a_client_that_reads_close_its_connection_too(echo: Server) -> None:
    with Watch(echo) as watch, open_socket(echo, "/v1/realtime") as connection:
        watch.during(lambda: flood(connection, b"", frame(PING, b"p"), reads=True))
        assert close_code(connection) in (*demands.FLOOD_CLOSED, None)


@pytest.mark.parametrize("path", SOCKETS)
@pytest.mark.parametrize("text", [b"", b"{}", b'{"type": "input.append"}', b'{"type": "look"}', CREATE])
def test_a_flood_of_messages_starves_nobody(echo: Server, path: str, text: bytes) -> None:
    """Each message is answered; whoever does not read the answers is not read either, or closed."""
    with Watch(echo) as watch, open_socket(echo, path) as connection:
        watch.during(lambda: flood(connection, b"", frame(TEXT, text), reads=False))


def test_many_connections_that_flood_a_little(echo: Server) -> None:
    """Each stays below what one may send; together they are many."""

    def attack() -> None:
        connections = [open_socket(echo, "/v1/realtime") for _ in range(40)]
        for _ in range(20):
            for connection in connections:
                try:
                    connection.sendall(frame(PING) * 50)
                except OSError:
                    continue  # Closed, which is allowed.
        for connection in connections:
            connection.close()

    with Watch(echo) as watch:
        watch.during(attack)


def test_a_message_in_small_pieces_is_still_understood(echo: Server) -> None:
    """An honest client may cut its messages: what is bounded is the excess."""
    text = b'{"type": "session.open", "id": "pieces"}'
    with open_socket(echo, "/v1/realtime") as connection:
        connection.sendall(frame(TEXT, text[:1], last=False))
        for byte in text[1:-1]:
            connection.sendall(frame(CONTINUATION, bytes([byte]), last=False))
        connection.sendall(frame(CONTINUATION, text[-1:]))
        connection.settimeout(demands.ANSWER_SECONDS)
        said = b""
        while b"session.opened" not in said:
            piece = connection.recv(1 << 16)
            assert piece, said
            said += piece
