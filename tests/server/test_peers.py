"""The engine's end of links over TCP: who gets which report, and what ends with a link."""

import contextlib
import itertools
import logging
import os
import pty
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.turn import KEEP_ALL
from holdfast.server.dialects.wire_fields import SamplingFields
from holdfast.server.link import wire
from holdfast.server.link.frames import Frames, framed
from holdfast.server.link.missed_messages import KEPT_BYTES_MAX, KEPT_TICKS, TICKS_MAX, MissedMessages
from holdfast.server.link.peers import ACCEPTED_AT_ONCE, HANDSHAKES_AT_ONCE, STRANGERS_MAX, Peers
from holdfast.server.link.refusal_log import LINES_MAX, WHILE_SECONDS, RefusalLog
from holdfast.server.link.secure_socket import SecureSocket
from holdfast.server.link.tls import MAKE, KeysNotMade, client_context, server_context, write_keys

VIEW = wire.SessionView("ann/s", 3, 1, 2)
STORED = wire.StoredSession(VIEW, "ann", None, {"a": 1}, 5.0)
STEPS = itertools.count(1)
READY = wire.Pulse(0, 0, 0, 0, {}, [], 0)


class Engine:
    """What peers need of an engine."""

    later: tuple[wire.Elsewhere | None, ...] = ()

    def welcome(self, greeting: wire.Greeting) -> wire.Welcome | str:
        return wire.Welcome(wire.PROTOCOL, "e", "life", greeting.model)

    def introduction(self) -> list[wire.Report]:
        return [READY]

    def pulse(self) -> wire.Pulse:
        return READY

    def untold(self) -> Iterator[wire.Elsewhere | None]:
        yield from self.later

    def stored(self, name: str) -> wire.StoredSession | None:
        return STORED if name == VIEW.name else None

    def take(self, content: wire.Content, secure: SecureSocket) -> str | None:
        return "no file is expected"


class Client:
    """An API process in the test's own thread."""

    def __init__(self, peers: Peers, port: int, keys: Path, calls: int, engine: bool) -> None:
        self.peers = peers
        self.calls = calls
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setblocking(False)
        self._came, self._goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = client_context(str(keys)).wrap_bio(self._came, self._goes)
        self._frames = Frames()
        self._engine = engine
        self._shaken = False
        while not self._shaken:
            self._pump()

    def greet(self) -> None:
        self.say(wire.Greeting(wire.PROTOCOL, f"client {self.calls}", self.calls, engine=self._engine))
        assert isinstance(self.hear(), wire.Welcome) and self.hear() == READY

    def number(self, call: int) -> int:
        return self.calls << wire.CALL_BITS | call

    def say(self, message: wire.Command) -> None:
        self._tls.write(framed(wire.encode(message)))
        self._pump()

    def _pump(self) -> None:
        self._socket.sendall(self._goes.read())
        self.peers.wait(0.005)
        with contextlib.suppress(BlockingIOError):
            self._came.write(self._socket.recv(1 << 16))
        with contextlib.suppress(ssl.SSLWantReadError):
            if not self._shaken:
                self._tls.do_handshake()
                self._shaken = True
            while data := self._tls.read(1 << 16):
                self._frames.feed(data)
        self._socket.sendall(self._goes.read())

    def frame(self) -> bytes:
        """The next frame as it came."""
        for _ in range(400):
            frame = self._frames.take()
            if frame is not None:
                return frame
            self._pump()
        raise AssertionError("nothing came")

    def hear(self) -> wire.Report:
        return wire.decode_report(self.frame())

    def heard(self) -> list[wire.Report]:
        """Everything up to a pulse that is sent now; all members hear that."""
        mark = wire.Pulse(next(STEPS), 0, 0, 0, {}, [], 0)
        self.peers.send([mark])
        found: list[wire.Report] = []
        while (report := self.hear()) != mark:
            found.append(report)
        return [report for report in found if not isinstance(report, wire.Pulse)]

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "link.pem"
    write_keys(path)
    return path


@pytest.fixture
def peers(keys: Path) -> Iterator[Peers]:
    listener = socket.create_server(("127.0.0.1", 0))
    made = Peers(listener, server_context(str(keys)), Engine(), 60.0)
    yield made
    made.close(0.0)


def joined(peers: Peers, keys: Path, calls: int, engine: bool = False) -> Client:
    client = Client(peers, port_of(peers), keys, calls, engine)
    client.greet()
    return client


def port_of(peers: Peers) -> int:
    return int(peers._listener.getsockname()[1])


def silent(peers: Peers, host: str = "127.0.0.1") -> socket.socket:
    """A connection from an address of this machine that says nothing, once the engine has it."""
    connected = socket.create_connection(("127.0.0.1", port_of(peers)), source_address=(host, 0))
    connected.setblocking(False)
    peers.wait(1.0)
    assert any(each.host == host for each in peers._strangers.values())
    return connected


def is_open(connected: socket.socket) -> bool:
    """Whether the engine has not closed a connection."""
    try:
        return connected.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


def commands(peers: Peers, count: int) -> list[wire.Command]:
    """So many commands, and no more."""
    found: list[wire.Command] = []
    for _ in range(1000):
        while (received := peers.receive()) is not None:
            found.append(received[0])
        if len(found) >= count:
            break
        peers.wait(0.01)
    assert len(found) == count
    return found


def turn(client: Client, call: int, **fields: object) -> wire.StartTurn:
    return wire.StartTurn(client.number(call), f"t-{call}", "ann", [1], SamplingFields(), **fields)  # type: ignore[arg-type]


def end(client: Client, call: int, view: wire.SessionView | None = None) -> wire.End:
    return wire.End(client.number(call), "finished", "stop", "", [], 1, 0, 1, 0.0, 0.0, 0.0, view=view)


def test_a_key_file_is_the_owner_s_alone_and_is_not_replaced(keys: Path) -> None:
    assert keys.stat().st_mode & 0o777 == 0o600
    before = keys.read_bytes()
    with pytest.raises(KeysNotMade, match="exists"):
        write_keys(keys)
    assert keys.read_bytes() == before


def test_silent_connections_do_not_keep_an_api_process_out(peers: Peers, keys: Path) -> None:
    member = joined(peers, keys, 3)
    crowd = [silent(peers) for _ in range(40)]
    assert [is_open(each) for each in crowd] == [False] * 8 + [True] * STRANGERS_MAX, "the oldest are closed"
    later = joined(peers, keys, 5)
    crowd += [silent(peers) for _ in range(40)]
    assert len(peers._strangers) == STRANGERS_MAX
    assert {each.calls for each in peers.members} == {3, 5}
    assert member.heard() == later.heard() == []
    for each in (*crowd, member, later):
        each.close()


def test_an_address_with_many_silent_connections_loses_its_own(peers: Peers) -> None:
    first = silent(peers, "127.0.0.3")
    crowd = [silent(peers, "127.0.0.2") for _ in range(40)]
    second = silent(peers, "127.0.0.3")
    assert is_open(first) and is_open(second)
    assert [is_open(each) for each in crowd] == [False] * 10 + [True] * (STRANGERS_MAX - 2)
    for each in (first, second, *crowd):
        each.close()


def test_a_connection_that_has_shown_the_key_keeps_its_place(peers: Peers, keys: Path) -> None:
    client = Client(peers, port_of(peers), keys, 3, False)
    crowd = [silent(peers) for _ in range(40)]
    client.greet()
    assert [each.calls for each in peers.members] == [3]
    for each in (*crowd, client):
        each.close()


def first_message(keys: Path) -> bytes:
    """What begins a handshake: anybody can send it, and an answer takes the engine a signature."""
    goes = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        client_context(str(keys)).wrap_bio(ssl.MemoryBIO(), goes).do_handshake()
    return goes.read()


def test_handshakes_take_little_time_between_two_steps(
    peers: Peers, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crowd = [silent(peers) for _ in range(STRANGERS_MAX)]
    hello = first_message(keys)
    for number, each in enumerate(crowd):
        each.sendall(hello + (b"and no more of TLS" if number % 2 else b""))
    reads: list[SecureSocket] = []
    read = SecureSocket.read
    monkeypatch.setattr(SecureSocket, "read", lambda secure: reads.append(secure) or read(secure))
    for number in range(1, STRANGERS_MAX // HANDSHAKES_AT_ONCE + 1):
        peers.wait(0.0)
        assert len(reads) == number * HANDSHAKES_AT_ONCE
    assert len(set(reads)) == STRANGERS_MAX, "all of them, one after the other"
    for each in crowd:
        assert each.recv(1 << 16), "each is answered"
        with contextlib.suppress(ConnectionError):
            each.sendall(hello[:1])
    crowd.append(silent(peers))
    crowd[-1].sendall(hello)
    peers.wait(0.0)
    assert peers._by_descriptor[list(peers._strangers)[-1]].secure in reads[-HANDSHAKES_AT_ONCE:]
    for each in crowd:
        each.close()


def test_handshakes_without_end_do_not_keep_an_api_process_out(
    peers: Peers, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its own address, some byte by byte, some whole, and more of them whenever it sends something."""
    hello, wait, port = first_message(keys), peers.wait, port_of(peers)
    slow = [silent(peers) for _ in range(STRANGERS_MAX)]
    sent, crowd = itertools.count(), []

    def attacked(seconds: float) -> bool:
        at = next(sent)
        for each in slow:
            with contextlib.suppress(OSError):
                each.sendall(hello[at : at + 1])
        for _ in range(2):
            crowd.append(socket.create_connection(("127.0.0.1", port)))
            crowd[-1].sendall(hello)
        return wait(seconds)

    monkeypatch.setattr(peers, "wait", attacked)
    client = joined(peers, keys, 3)
    assert [each.calls for each in peers.members] == [3]
    for each in (*slow, *crowd, client):
        each.close()


def test_a_crowd_that_is_silent_or_has_left_makes_nobody_wait(peers: Peers) -> None:
    crowd = [silent(peers) for _ in range(STRANGERS_MAX)]
    for each in crowd:
        each.close()
    peers.wait(0.0)
    assert peers._strangers == {}
    crowd = [socket.create_connection(("127.0.0.1", port_of(peers))) for _ in range(ACCEPTED_AT_ONCE)]
    peers.wait(1.0)
    assert len(peers._strangers) == ACCEPTED_AT_ONCE
    for each in crowd:
        each.close()


def test_an_encrypted_key_is_refused_and_its_password_not_asked_for(tmp_path: Path) -> None:
    key, certificate, both = (tmp_path / name for name in ("key", "certificate", "both.pem"))
    words = [*MAKE, "-subj", "/CN=x", "-keyout", str(key), "-out", str(certificate), "-passout", "pass:words"]
    words.remove("-nodes")
    subprocess.run(words, check=True, capture_output=True)
    both.write_bytes(key.read_bytes() + certificate.read_bytes())
    child = "import sys; from holdfast.server.link.tls import server_context; server_context(sys.argv[1])"
    process, terminal = pty.fork()
    if not process:
        os.execv(sys.executable, [sys.executable, "-c", child, str(both)])
    shown = b""
    with contextlib.suppress(OSError):  # The terminal's end.
        while b"pass phrase" not in shown and (more := os.read(terminal, 1 << 12)):
            shown += more
    os.close(terminal)
    os.waitpid(process, 0)
    assert b"pass phrase" not in shown and b"which is not a key file" in shown


def test_nothing_after_a_frame_that_is_refused_is_a_command(peers: Peers, keys: Path) -> None:
    client = joined(peers, keys, 5)
    for message in (wire.Rewind(client.number(1), "ann/s", 1), wire.Stop(), wire.Rewind(1, "ann/s", 0)):
        client._tls.write(framed(wire.encode(message)))
    client._tls.write(framed(wire.encode(wire.CloseSession(client.number(2), "ann/s"))))
    client._pump()
    assert commands(peers, 1) == [wire.Rewind(client.number(1), "ann/s", 1)]
    assert peers.members == []
    client.close()


def test_what_a_member_sent_before_its_link_broke_is_carried_out(peers: Peers, keys: Path) -> None:
    client = joined(peers, keys, 5)
    client._tls.write(framed(wire.encode(wire.CloseSession(client.number(1), "ann/s"))))
    client._socket.sendall(client._goes.read() + bytes((23, 3, 3, 0, 32)) + bytes(32))  # No record of TLS.
    assert commands(peers, 1) == [wire.CloseSession(client.number(1), "ann/s")]
    client.close()


def test_a_single_member_gets_each_step_as_it_was_made(peers: Peers, keys: Path) -> None:
    client = joined(peers, keys, 5)
    steps = [wire.Step([wire.Delta(client.number(1), place, "x", [7])]) for place in range(64)]
    for step in steps:
        peers.send([step])
    assert [client.frame() for _ in steps] == [wire.encode(step) for step in steps], "one frame a step"
    client.close()


def test_each_member_gets_its_own_turns_and_all_hear_what_others_changed(peers: Peers, keys: Path) -> None:
    one, two = joined(peers, keys, 5), joined(peers, keys, 6)
    mine, theirs = wire.Delta(one.number(1), 0, "a", [1]), wire.Delta(two.number(1), 0, "b", [2])
    peers.send([wire.Step([mine, theirs], [end(one, 2, VIEW)], [("ann/x", "closed")])])
    assert one.heard() == [wire.Step([mine], [end(one, 2, VIEW)], [("ann/x", "closed")])]
    assert two.heard() == [wire.Step([theirs], [], [("ann/x", "closed")]), wire.Elsewhere([], [VIEW])]
    peers.send([wire.Step([mine])])
    assert one.heard() == [wire.Step([mine])] and two.heard() == []
    for client in (one, two):
        client.close()


def test_a_session_that_is_new_or_changed_is_told_whole(peers: Peers, keys: Path) -> None:
    one, two = joined(peers, keys, 5), joined(peers, keys, 6)
    one.say(wire.UpdateSession(one.number(1), VIEW.name, {"a": 1}))
    one.say(wire.Rewind(one.number(2), VIEW.name, 1))
    commands(peers, 2)
    peers.send([wire.Done(one.number(1), VIEW), wire.Done(one.number(2), VIEW), wire.Done(one.number(3))])
    assert [type(report) for report in one.heard()] == [wire.Done] * 3
    assert two.heard() == [wire.Elsewhere([STORED], []), wire.Elsewhere([], [VIEW])]
    first = wire.SessionView(VIEW.name, 3, 1, 1)
    peers.send([wire.Step([], [end(one, 4, first)])])
    assert two.heard() == [wire.Elsewhere([STORED], [])], "a first turn may have brought tools"
    for client in (one, two):
        client.close()


def test_what_only_one_member_knew_ends_with_its_link(peers: Peers, keys: Path) -> None:
    client, other = joined(peers, keys, 5), joined(peers, keys, 6)
    client.say(turn(client, 1, session="ann/s"))
    client.say(turn(client, 2, session="ann/k", keeps=True))
    client.say(turn(client, 3, session="ann~1", volatile=True))
    client.say(turn(client, 4, session="ann~2", volatile=True))
    client.say(wire.Hear(client.number(5), "ann/h", [1, 2]))
    client.say(wire.Hear(client.number(6), "ann/s2", [1, 2]))
    client.say(turn(client, 7, session="ann/s2"))
    other.say(turn(other, 1, session="ann/o"))
    commands(peers, 8)
    peers.send(
        [wire.Step([], [end(client, 3)], [("ann~2", "expired")]), wire.Declined(client.number(7), "x", "")]
    )
    assert other.heard() == [wire.Step([], [], [("ann~2", "expired")])]
    client.close()
    last = commands(peers, 5)
    reason = "the API process was lost"
    assert last[:3] == [
        wire.EndTurn(client.number(1), None, reason),
        wire.EndTurn(client.number(2), KEEP_ALL, reason),
        wire.EndTurn(client.number(4), None, reason),
    ]
    assert [(type(each), each.session) for each in last[3:]] == [  # type: ignore[union-attr]
        (wire.Hear, "ann/h"),
        (wire.CloseSession, "ann~1"),
    ]
    assert [peer.calls for peer in peers.members] == [6]
    peers.send([wire.Done(last[3].call), wire.Done(client.number(1))])  # type: ignore[union-attr]
    assert other.heard() == [], "answers to a link that is gone go nowhere"
    other.close()


def test_while_draining_nothing_begins(peers: Peers, keys: Path) -> None:
    client = joined(peers, keys, 5)
    peers.draining = True
    client.say(turn(client, 1, session="ann/s"))
    client.say(wire.OpenSession(client.number(2), "ann/n", "ann"))
    client.say(wire.Fork(client.number(3), "ann/s", "ann/f", None))
    client.say(wire.CloseSession(client.number(4), "ann/s"))
    assert [report.code for report in client.heard()] == ["engine_draining"] * 3  # type: ignore[union-attr]
    assert commands(peers, 1) == [wire.CloseSession(client.number(4), "ann/s")]
    client.close()


def test_refusals_do_not_flood_the_log(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    refusals = RefusalLog(logging.getLogger("holdfast.engine"), lambda: now)
    for number in range(100):
        refusals.tell(f"stranger {number}")
    assert len(caplog.messages) == LINES_MAX
    now = WHILE_SECONDS
    refusals.tick()
    assert caplog.messages[-1] == f"{100 - LINES_MAX} more links were refused"
    refusals.tell("another")
    assert caplog.messages[-1].endswith("another")


def test_a_new_member_is_told_of_sessions_in_portions(peers: Peers, keys: Path) -> None:
    engine: Any = peers._host
    engine.later = (None, wire.Elsewhere([STORED]), None, wire.Elsewhere([STORED]), wire.Elsewhere([STORED]))
    client = joined(peers, keys, 5)
    told: list[wire.Report] = []
    for _ in range(1000):
        peers.wait(0.01)
        told += client.heard()
        if len(told) == 3:
            break
    assert told == [each for each in engine.later if each is not None]
    client.close()


def test_another_engine_hears_only_answers(peers: Peers, keys: Path) -> None:
    client = joined(peers, keys, 5)
    other = joined(peers, keys, 6, engine=True)
    other.say(wire.Stage(other.number(1), "ann/s", "m", "l", 3, "digest", "", 10))
    assert commands(peers, 1) == [wire.Stage(other.number(1), "ann/s", "m", "l", 3, "digest", "", 10)]
    peers.send([wire.Step([], [], [("ann/s", "closed")]), wire.Done(client.number(1), VIEW)])
    peers.send([wire.Done(other.number(1))])
    assert other.hear() == wire.Done(other.number(1))
    other.close()
    (abandoned,) = commands(peers, 1)
    assert isinstance(abandoned, wire.Abandon) and abandoned.stage == other.number(1)
    client.close()


def test_missed_messages_are_asked_of_all_others_and_the_first_that_has_some_answers(
    peers: Peers, keys: Path
) -> None:
    asker, first, second = (joined(peers, keys, calls) for calls in (5, 6, 7))
    other = joined(peers, keys, 8, engine=True)
    call = asker.number(1)
    asker.say(wire.FetchMissed(call, "ann/s"))
    asked = [client.hear() for client in (first, second)]
    assert asked == [wire.GiveMissed(call, "ann/s")] * 2
    first.say(wire.Missed(call))
    second.say(wire.Missed(call, 4, [(3, "three"), (4, "four")]))
    assert asker.hear() == wire.Done(call, answer=[4, [[3, "three"], [4, "four"]]])
    first.say(wire.Missed(call, 9, [(9, "late")]))
    assert asker.heard() == [] and first.heard() == []
    for client in (asker, first, second, other):
        client.close()


def test_missed_messages_of_nobody_are_none(peers: Peers, keys: Path) -> None:
    asker = joined(peers, keys, 5)
    asker.say(wire.FetchMissed(asker.number(1), "ann/s"))
    assert asker.hear() == wire.Done(asker.number(1)), "there is no other API process"
    other, gone = joined(peers, keys, 6), joined(peers, keys, 7)
    asker.say(wire.FetchMissed(asker.number(2), "ann/s"))
    other.say(wire.Missed(asker.number(2)))
    assert asker.heard() == [], "one more may have some"
    gone.close()
    commands(peers, 0)
    assert asker.hear() == wire.Done(asker.number(2))
    asker.close()
    other.close()


def test_a_question_for_missed_messages_with_anothers_number_is_refused(peers: Peers, keys: Path) -> None:
    asker, other = joined(peers, keys, 5), joined(peers, keys, 6)
    asker.say(wire.FetchMissed(other.number(1), "ann/s"))
    commands(peers, 0)
    assert [peer.calls for peer in peers.members] == [6]
    assert other.heard() == []
    other.close()


def test_nobody_waits_for_long_for_missed_messages() -> None:
    missed, call = MissedMessages(), 5 << wire.CALL_BITS
    asked = wire.FetchMissed(call, "ann/s")
    assert missed.ask(asked, [6, 7]) == []
    assert missed.hear(6, wire.Missed(call)) == []
    assert missed.hear(6, wire.Missed(call)) == [], "an answer counts once"
    assert [missed.tick() for _ in range(TICKS_MAX + 1)] == [[]] * TICKS_MAX + [[wire.Done(call)]]
    assert missed.hear(7, wire.Missed(call, 3, [])) == [], "too late"
    assert missed.ask(asked, [6]) == []
    assert missed.gone(5) == [] == missed.gone(6), "the one that asked is gone"


def test_what_a_process_left_when_it_ended_is_given_once_and_not_for_ever() -> None:
    missed, call = MissedMessages(), 5 << wire.CALL_BITS
    asked = wire.FetchMissed(call, "ann/s")
    nothing, left = [wire.Done(call)], wire.KeepMissed("ann/s", 3, [(3, "three")])
    missed.keep(left)
    assert missed.ask(wire.FetchMissed(call, "ann/t"), []) == nothing, "another session"
    assert missed.ask(asked, [6]) == [], "another process may have newer ones"
    assert missed.hear(6, wire.Missed(call)) == [wire.Done(call, answer=(3, [(3, "three")]))]
    assert missed.ask(asked, []) == nothing
    missed.keep(left)
    assert missed.ask(asked, [6]) == []
    assert missed.hear(6, wire.Missed(call, 9, [])) == [wire.Done(call, answer=(9, []))]
    assert missed.ask(asked, []) == nothing, "older ones are of no use"
    missed.keep(left)
    for _ in range(KEPT_TICKS + 1):
        missed.tick()
    assert missed.ask(asked, []) == nothing
    for name in ("ann/a", "ann/b", "ann/c"):
        missed.keep(wire.KeepMissed(name, 1, [(1, "x" * (KEPT_BYTES_MAX // 2))]))
    answers = [missed.ask(wire.FetchMissed(call, f"ann/{name}"), [])[0].answer for name in "abc"]
    assert [answer is not None for answer in answers] == [False, True, True], "the oldest went"
