"""Frames of a WebSocket: how many are read at once, what they cost, and what normal clients never notice."""

import asyncio
import contextlib
import json
import random
import socket
from unittest.mock import Mock

import pytest
from websockets.frames import Frame, Opcode

from holdfast.server.http import websockets as sockets
from holdfast.server.http.websockets import FRAGMENT_BYTES, FRAMES_SAVED_MAX, Budget, FrameScanner
from tests.server.raw import CLOSE, CONTINUATION, PING, TEXT, frame, frames_of, opened_socket, rest
from tests.server.serving import Server
from tests.server.talking import Talk

FLOOD = 20 * FRAMES_SAVED_MAX
OPEN = json.dumps({"type": "session.open"}).encode()


# --- counting ----------------------------------------------------------------------------------------


def test_frames_are_found_wherever_what_arrives_is_cut() -> None:
    chance = random.Random(7)
    sizes = [0, 1, 125, 126, 127, FRAGMENT_BYTES - 1, FRAGMENT_BYTES, 65535, 65536, 70000]
    opcodes = [Opcode.TEXT, Opcode.CONT, Opcode.BINARY, Opcode.PING, Opcode.PONG]
    for _ in range(50):
        sent, ends, cost = b"", [], 0
        for _ in range(chance.randrange(1, 12)):
            opcode, final = chance.choice(opcodes), chance.random() < 0.5
            control = opcode in (Opcode.PING, Opcode.PONG)
            size = chance.choice(sizes[:3]) if control else chance.choice(sizes)
            sent += Frame(opcode, bytes(size), fin=final or control).serialize(mask=chance.random() < 0.8)
            ends.append(len(sent))
            whole = final and opcode is not Opcode.CONT
            cost += control or (not whole and size < FRAGMENT_BYTES)
        scanner, waiting, read, paid = FrameScanner(), b"", 0, 0
        while read < len(sent):
            more = chance.choice([1, 3, 17, 1000, 100_000])
            have = read + len(waiting)
            waiting += sent[have : have + more]
            end, costs = scanner.ahead(waiting, 2)
            begun = [place for place in (0, *ends[:-1]) if read <= place < read + end]
            assert len(begun) <= 2, "more frames than were asked for"
            waiting, read, paid = waiting[end:], read + end, paid + costs
        assert (read, paid) == (len(sent), cost)


def test_a_budget_is_spent_and_refills() -> None:
    budget = Budget(10, 2.0, now=100.0)
    assert budget.spend(10, 100.0) and not budget.spend(1, 100.0)
    assert budget.spend(2, 101.0) and not budget.spend(1, 101.0)
    assert not budget.spend(11, 1e9) and budget.spend(10, 1e9), "it never holds more than its bound"


# --- floods ------------------------------------------------------------------------------------------


def flood(connection: socket.socket, data: bytes) -> list[tuple[int, bytes]]:
    """Send all of it, as far as the server takes it, and return the frames that were answered."""

    async def both() -> bytes:
        reading = asyncio.to_thread(rest, connection)
        writing = asyncio.to_thread(send)
        return (await asyncio.gather(reading, writing))[0]

    def send() -> None:
        with contextlib.suppress(ConnectionError):
            connection.sendall(data)

    return frames_of(asyncio.run(both()))


FLOODS = {
    "pings": frame(PING) * FLOOD,
    "long pings": frame(PING, bytes(125)) * FLOOD,
    "pongs": frame(10) * FLOOD,
    "empty continuations": frame(TEXT, final=False) + frame(CONTINUATION, final=False) * FLOOD,
    "continuations of a byte": frame(TEXT, b"a", final=False)
    + frame(CONTINUATION, b"a", final=False) * FLOOD,
    "fragments that end": (frame(TEXT, b" ", final=False) + frame(CONTINUATION)) * FLOOD,
}


@pytest.mark.parametrize("case", FLOODS)
def test_frames_that_cost_nothing_to_send_are_bounded(echo: Server, case: str) -> None:
    with opened_socket(echo) as connection:
        answered = flood(connection, FLOODS[case])
    opcode, payload = answered[-1]
    assert (opcode, int.from_bytes(payload[:2])) == (CLOSE, 1008) and b"pings" in payload
    # What the budget gained while they were read is a fraction of what was sent.
    assert sum(opcode == 10 for opcode, _ in answered) < FLOOD // 2
    assert echo.get("/health").status_code == 200
    with Talk(echo) as talk:
        assert talk.open()["turns"] == 0


def test_pongs_do_not_pile_up_for_a_client_that_does_not_read(echo: Server) -> None:
    """Pings are answered while the client reads; more than the sockets hold is neither kept nor sent."""
    with opened_socket(echo) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with contextlib.suppress(ConnectionError):
            connection.sendall(frame(PING, bytes(125)) * FLOOD)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)  # What was kept comes at once.
        answered = frames_of(rest(connection))
    assert sum(opcode == 10 for opcode, _ in answered) <= FLOOD // 4
    echo.check_clean()


def test_a_few_frames_are_read_in_a_pass_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many arrive at once; between two passes everybody else has a turn."""
    read: list[int] = []

    async def story() -> None:
        connection = sockets.SocketConnection.__new__(sockets.SocketConnection)
        connection.loop = asyncio.get_running_loop()
        connection._scanner = FrameScanner()
        connection._budget = Budget(FRAMES_SAVED_MAX, 1, 0)
        connection._unread = bytearray()
        connection._next_pass = None
        connection._flooded = connection.read_paused = False
        connection.handshake_initiated = True
        connection.transport = Transport()  # type: ignore[assignment]
        connection.data_received(frame(PING) * 1000)
        assert read == [sockets.FRAMES_A_PASS] and not connection.transport.reading  # type: ignore[attr-defined]
        passes = 1
        while not connection.transport.reading:  # type: ignore[attr-defined]
            await asyncio.sleep(0)
            passes += 1
        assert sum(read) == 1000 and max(read) == sockets.FRAMES_A_PASS
        assert passes >= 1000 // sockets.FRAMES_A_PASS

    class Transport:
        reading = True

        def is_closing(self) -> bool:
            return False

        def pause_reading(self) -> None:
            self.reading = False

        def resume_reading(self) -> None:
            self.reading = True

    base = sockets.WebSocketsSansIOProtocol
    monkeypatch.setattr(base, "data_received", lambda _self, data: read.append(len(data) // len(frame(PING))))
    asyncio.run(story())


def test_a_ping_is_answered_only_while_the_client_reads() -> None:
    connection = sockets.SocketConnection.__new__(sockets.SocketConnection)
    connection.writable = asyncio.Event()
    connection.conn = Mock(data_to_send=Mock(return_value=[b"pong"]))
    connection.transport = Mock()
    for _ in range(3):
        connection.handle_ping()
    assert connection.transport.write.call_count == 0 and connection.conn.data_to_send.call_count == 3
    connection.writable.set()
    connection.handle_ping()
    connection.transport.write.assert_called_once_with(b"pong")


# --- what normal clients do --------------------------------------------------------------------------


def test_messages_in_many_fragments_are_heard(echo: Server) -> None:
    """In short fragments as long as the budget lasts, and in long ones without end."""
    append = b'{"type": "input.append", "text": "x"' + b" " * 500_000 + b"}"
    pieces = [append[at : at + FRAGMENT_BYTES] for at in range(0, len(append), FRAGMENT_BYTES)]
    middle = b"".join(frame(CONTINUATION, piece, final=False) for piece in pieces[1:-1])
    long = (
        frame(TEXT, pieces[0], final=False) + middle + frame(CONTINUATION, pieces[-1] + b" " * FRAGMENT_BYTES)
    )
    repeats = 2 * FRAMES_SAVED_MAX // len(pieces)
    bytewise = b"".join(frame(CONTINUATION, bytes([byte]), final=False) for byte in OPEN[1:])
    with opened_socket(echo) as connection:
        connection.sendall(frame(TEXT, OPEN[:1], final=False) + bytewise + frame(CONTINUATION))
        for _ in range(repeats):
            connection.sendall(long)
        connection.sendall(frame(TEXT, b'{"type": "input.commit"}'))
        heard = b""
        while b"response.done" not in heard:
            heard += (more := connection.recv(65536))
            assert more, frames_of(heard)
    said = [json.loads(text) for opcode, text in frames_of(heard) if opcode == TEXT]
    assert said[-1]["usage"]["prompt_tokens"] >= repeats


def test_a_message_that_comes_byte_by_byte_is_heard(echo: Server) -> None:
    with opened_socket(echo) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in frame(TEXT, OPEN):
            connection.sendall(bytes([byte]))
        heard = connection.recv(65536)
        while not frames_of(heard):
            heard += connection.recv(65536)
    assert [json.loads(text)["type"] for _, text in frames_of(heard)] == ["session.opened"]


def test_many_messages_at_once_are_all_heard_in_order(echo: Server) -> None:
    """Messages cost nothing: there are more here than the budget has, sent before any answer is read."""
    count = FRAMES_SAVED_MAX + 1000
    with Talk(echo, compression=None) as talk:
        talk.open("many")
        for number in range(count):
            talk.say("input.append", text=f"{number % 10}")
        talk.say("input.commit", sampling={"max_tokens": 1, "ignore_eos": True})
        assert talk.hear("response.done")["usage"]["prompt_tokens"] >= count


def test_pings_are_answered(echo: Server) -> None:
    with Talk(echo) as talk:
        for _ in range(100):
            assert talk.connection.ping().wait(60)
        assert talk.open()["turns"] == 0
