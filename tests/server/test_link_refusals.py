"""Who does not belong to a link is refused, with a line in the log, and the others are served on."""

import contextlib
import secrets
import socket
import ssl
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.server.link import wire
from holdfast.server.link.frames import Frames, framed
from holdfast.server.link.peers import GREETING_MAX
from holdfast.server.link.tls import client_context, write_keys
from tests.server.apart import SMALL, Apart, EngineProcess, Server, said, until

MEMBER = wire.Greeting(wire.PROTOCOL, "a test", 7)
MINE = 7 << wire.CALL_BITS


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    """The processes that outlive a test, and their keys."""
    made = Apart(tmp_path_factory.mktemp("shared"))
    yield made
    made.end()


@pytest.fixture(scope="module")
def shared_processes(shared: Apart) -> tuple[EngineProcess, Server]:
    engine = shared.engine("--engine-id", "e0", *SMALL)
    return engine, shared.api(engine)


@pytest.fixture(scope="module")
def greeted_processes(shared: Apart) -> tuple[EngineProcess, Server]:
    """The same once more: an engine logs ten refusals in a while, then how many there were."""
    engine = shared.engine("--engine-id", "e1", *SMALL)
    return engine, shared.api(engine)


Served = tuple[EngineProcess, Server]


def left_alone(processes: Served) -> Iterator[Served]:
    """Processes with empty logs; the next test finds them as they were."""
    yield processes
    for each in processes:
        assert each.process.poll() is None
        assert not any("Traceback" in line for line in each.lines), "\n".join(each.lines)
        each.lines.clear()


@pytest.fixture
def served(shared_processes: Served) -> Iterator[Served]:
    """An engine, and an API process that uses it."""
    yield from left_alone(shared_processes)


@pytest.fixture
def greeted(greeted_processes: Served) -> Iterator[Served]:
    """The same, for greetings."""
    yield from left_alone(greeted_processes)


def serves(server: Server) -> None:
    """The API process and its engine go on as if nothing had been."""
    name = server.open()
    assert server.say(name, "hello")["text"] == "hello"
    assert server.complaints() == []
    server.check_clean()


class Foreigner:
    """A process that has the key, and says what it wants."""

    def __init__(self, engine: EngineProcess, keys: Path) -> None:
        plain = socket.create_connection(("127.0.0.1", engine.port), timeout=30)
        self.tls = client_context(str(keys)).wrap_socket(plain)
        self._frames = Frames()

    def say(self, message: wire.Command) -> None:
        self.tls.sendall(framed(wire.encode(message)))

    def hear(self) -> wire.Report | None:
        """The next report; None at the end."""
        while (frame := self._frames.take()) is None:
            data = self.tls.recv(1 << 16)
            if not data:
                return None
            self._frames.feed(data)
        return wire.decode_report(frame)

    def ended(self) -> None:
        """The engine ends the connection."""
        try:
            while self.hear() is not None:
                pass
        except (ssl.SSLError, ConnectionError):
            pass
        self.tls.close()


def ended(connected: socket.socket) -> None:
    """The engine ends a connection, maybe after a few bytes."""
    connected.settimeout(30)
    try:
        while connected.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    connected.close()


def test_plain_text_is_refused(served: Served) -> None:
    engine, server = served
    for words, why in (
        (b"GET / HTTP/1.1\r\nHost: engine\r\n\r\n", "the other end speaks HTTP, not TLS"),
        (framed(wire.encode(MEMBER)), "a link was refused"),
        (secrets.token_bytes(1 << 16), "a link was refused"),
    ):
        stranger = socket.create_connection(("127.0.0.1", engine.port))
        with contextlib.suppress(ConnectionError):
            stranger.sendall(words)
        ended(stranger)
        engine.says(why)
    serves(server)


def test_silent_connections_keep_no_api_process_out(apart: Apart) -> None:
    engine = apart.engine("--engine-id", "e0", *SMALL)
    with contextlib.ExitStack() as crowd:
        for _ in range(40):
            crowd.enter_context(socket.create_connection(("127.0.0.1", engine.port)))
        engine.says("connections have not greeted yet, and a new one has come")
        serves(apart.api(engine))


def test_another_key_is_refused_at_both_ends(apart: Apart, tmp_path: Path) -> None:
    other = tmp_path / "other.pem"
    write_keys(other)
    good, bad = apart.engine("--engine-id", "good", *SMALL), apart.engine(*SMALL, keys=other)
    server = Server(None, "--engine", good.address, "--engine", bad.address, "--link-keys", str(apart.keys))
    try:
        said(server.lines, f"no link to the engine at {bad.address}: the other end has another key")
        bad.says("a link was refused")
        serves(server)
    finally:
        assert server.stop() == 0


def test_without_a_key_there_is_no_link(served: Served) -> None:
    engine, server = served
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    stranger = context.wrap_socket(socket.create_connection(("127.0.0.1", engine.port)))
    with pytest.raises((ssl.SSLError, ConnectionError)):
        _talk(stranger)
    stranger.close()
    engine.says("the other end has no key")
    serves(server)


def _talk(stranger: ssl.SSLSocket) -> None:
    stranger.sendall(framed(wire.encode(MEMBER)))
    while stranger.recv(1 << 16):
        raise AssertionError("the engine has answered")
    raise ConnectionError


def test_an_old_tls_is_refused(served: Served, shared: Apart) -> None:
    engine, server = served
    context = client_context(str(shared.keys))
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError), socket.create_connection(("127.0.0.1", engine.port)) as plain:
        context.wrap_socket(plain)
    engine.says("the other end speaks an old TLS")
    serves(server)


def test_what_was_recorded_is_worth_nothing(apart: Apart) -> None:
    engine = apart.engine("--engine-id", "e0", *SMALL)
    proxy = apart.proxy(engine)
    server = apart.api(proxy)
    server.say(server.open("recorded"), "once")
    (recorded,) = [each for each in proxy.recorded if each]
    stranger = socket.create_connection(("127.0.0.1", engine.port))
    with contextlib.suppress(ConnectionError):
        stranger.sendall(recorded)
    ended(stranger)
    engine.says("a link was refused")
    assert server.state("recorded")["turns"] == 1
    serves(server)


def test_another_version_of_the_link_is_refused_with_both_numbers(served: Served, shared: Apart) -> None:
    engine, server = served
    foreigner = Foreigner(engine, shared.keys)
    foreigner.say(wire.Greeting(wire.PROTOCOL + 1, "newer", 7))
    answer = foreigner.hear()
    assert isinstance(answer, wire.Unable)
    assert f"version {wire.PROTOCOL + 1} of the link, the engine {wire.PROTOCOL}" in answer.message
    foreigner.ended()
    engine.says(answer.message)
    serves(server)


def test_another_model_is_refused_at_both_ends(apart: Apart) -> None:
    one = apart.engine("--engine-id", "one", *SMALL)
    other = apart.engine("--engine-id", "other", *SMALL, "--context-length", "4096")
    server = apart.api(one)
    late = Server(None, "--engine", one.address, "--engine", other.address, "--link-keys", str(apart.keys))
    try:
        line = said(late.lines, "no link to the engine at")
        assert "has model" in line or "serves model" in line
        refused = until(
            lambda: [each for each in (one, other) if any("serves model" in x for x in each.lines)]
        )
        assert len(refused) == 1
    finally:
        assert late.stop() == 0
    serves(server)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (wire.Beat(), "the first message is not a greeting"),
        (wire.CloseSession(7 << wire.CALL_BITS, "public/x"), "the first message is not a greeting"),
        (wire.Greeting(wire.PROTOCOL, "", 7), "the greeting has no name"),
        (wire.Greeting(wire.PROTOCOL, "x", 0), "the greeting has no name"),
        (wire.Greeting(wire.PROTOCOL, "x", 7, "another model"), "serves model another"),
        (wire.Greeting(wire.PROTOCOL, "x" * GREETING_MAX, 7), "bytes, of at most"),
    ],
)
def test_what_is_no_greeting_is_refused(
    greeted: Served, shared: Apart, message: wire.Command, why: str
) -> None:
    engine, server = greeted
    foreigner = Foreigner(engine, shared.keys)
    foreigner.say(message)
    foreigner.ended()
    engine.says(why)
    serves(server)


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (framed(wire.encode(wire.Stop())), "a message that no member may send: stop"),
        (framed(wire.encode(wire.Configure("echo", {}))), "a message that no member may send: configure"),
        (framed(wire.encode(MEMBER)), "a message that no member may send: greeting"),
        (framed(b"\xc1 nonsense"), "a message that cannot be read"),
        (framed(wire.encode(wire.MoveSession(MINE, "public/kept", "moon"))), "at `$.to`"),
        (framed(wire.encode(wire.Compact(MINE, "public/kept", 1, 1, [-1], "t"))), "at `$.tokens[0]`"),
        (framed(wire.encode(wire.CloseSession(8 << wire.CALL_BITS, "public/kept"))), "number of another API"),
        (struct.pack("<I", (1 << 32) - 1), "bytes, of at most"),
    ],
)
def test_a_member_that_breaks_the_rules_is_dropped_without_harm(
    served: Served, shared: Apart, sent: bytes, why: str
) -> None:
    engine, server = served
    server.say(server.open("kept"), "words")
    foreigner = Foreigner(engine, shared.keys)
    foreigner.say(MEMBER)
    assert isinstance(foreigner.hear(), wire.Welcome)
    foreigner.tls.sendall(sent)
    foreigner.ended()
    assert "the link to an API process is lost" in engine.says(why)
    assert server.state("kept")["turns"] == 1
    serves(server)


def test_a_truncated_frame_is_no_command(served: Served, shared: Apart) -> None:
    engine, server = served
    server.open("kept")
    foreigner = Foreigner(engine, shared.keys)
    foreigner.say(MEMBER)
    assert isinstance(foreigner.hear(), wire.Welcome)
    whole = framed(wire.encode(wire.CloseSession(7 << wire.CALL_BITS, "public/kept")))
    foreigner.tls.sendall(whole[:-1])
    foreigner.tls.shutdown(socket.SHUT_RDWR)
    foreigner.tls.close()
    engine.says("the link to an API process is lost")  # Closed, or reset with what was not read.
    assert server.state("kept")["state"] == "IDLE"
    serves(server)


def test_the_same_numbers_of_another_process_are_refused(served: Served, shared: Apart) -> None:
    engine, server = served
    first, second, again = (Foreigner(engine, shared.keys) for _ in range(3))
    first.say(MEMBER)
    assert isinstance(first.hear(), wire.Welcome)
    second.say(wire.Greeting(wire.PROTOCOL, "another process", MEMBER.calls))
    assert isinstance(answer := second.hear(), wire.Unable) and "restart this one" in answer.message
    second.ended()
    again.say(MEMBER)
    assert isinstance(again.hear(), wire.Welcome), "a process that connects again takes its place"
    first.ended()
    engine.says("its API process has connected again")
    again.tls.close()
    serves(server)


def test_one_engine_at_two_addresses_is_one(apart: Apart) -> None:
    engine = apart.engine("--engine-id", "e0", *SMALL)
    proxy = apart.proxy(engine)
    server = Server(
        None, "--engine", engine.address, "--engine", proxy.address, "--link-keys", str(apart.keys)
    )
    try:
        said(server.lines, "is connected already, to the same engine at")
        serves(server)
    finally:
        assert server.stop() == 0
