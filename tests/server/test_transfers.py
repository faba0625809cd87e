"""Files of memory between engines, over real sockets: they arrive as they are, or nothing is left of them."""

import errno
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from holdfast.engine.tiers.files import Header, MemoryForm, SnapshotFiles, encode
from holdfast.engine.tiers.snapshots import SnapshotStore
from holdfast.engine.tiers.staging import Staging
from holdfast.server.link import local_files, snapshot_receiver, snapshot_sender, wire
from holdfast.server.link.frames import framed
from holdfast.server.link.local_files import FileEnded, copy_file, name_local, open_local
from holdfast.server.link.peers import Peers
from holdfast.server.link.secure_socket import SecureSocket
from holdfast.server.link.snapshot_receiver import SnapshotReceiver
from holdfast.server.link.snapshot_sender import EngineLink, SendFailed, SnapshotSender, connect, send_file
from holdfast.server.link.tls import client_context, server_context, write_keys
from tests.server.test_peers import Engine

HEADER = Header("model", "layout", 3, "digest")
KIB = 1 << 10
SILENCE_SECONDS = 0.5


def content_of(size: int) -> bytes:
    """A file of about so many bytes."""
    return bytes(encode(HEADER, {"full.0": torch.randint(0, 255, (size,), dtype=torch.uint8)}))


def open_descriptors() -> set[str]:
    """What this process has open."""
    found = set()
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found.add(f"{each.name} {each.readlink()}")
    return found


class Taker(Engine):
    """An engine's end of links, with a disk; its loop is the test's thread."""

    def __init__(self, folder: Path, keys: Path) -> None:
        nothing: Any = None
        self.files = SnapshotFiles(folder)
        self.store = SnapshotStore(self.files, 1 << 30, "model", MemoryForm("layout"), nothing, nothing)
        self.staging = Staging(self.store, {}, lambda: 0.0)
        self.answers: list[wire.Report] = []
        self.receiver = SnapshotReceiver(self.staging, self.answers.append, SILENCE_SECONDS)
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        self.peers = Peers(listener, server_context(str(keys)), self, 60.0)
        self.context = client_context(str(keys))

    def take(self, content: wire.Content, secure: SecureSocket) -> str | None:
        return self.receiver.take(content, secure)

    def round(self) -> None:
        """What the loop does between two steps."""
        self.peers.wait(0.01, [self.receiver.descriptor])
        while (received := self.peers.receive()) is not None:
            command = received[0]
            if isinstance(command, wire.Stage):
                self.receiver.stage(command)
            elif isinstance(command, wire.Abandon):
                self.receiver.abandon(command.stage)
        self.receiver.poll()
        self.peers.send(self.answers[:])
        self.answers.clear()

    def serve(self, future: Future[Any]) -> Any:
        """Serve until a job of the other engine is done; its result."""
        while not future.done():
            self.round()
        return future.result()

    def until(self, look: Callable[[], object]) -> None:
        """Serve until something is so."""
        for _ in range(2000):
            if look():
                return
            self.round()
        raise AssertionError("it did not come")

    def names(self) -> list[str]:
        return sorted(self.files.names())

    def close(self) -> None:
        self.receiver.close()
        self.peers.close(0.0)
        self.staging.close()
        self.files.close()


class Giver:
    """Another engine that does what it wants: each act is a job in a thread."""

    def __init__(self, taker: Taker) -> None:
        self.taker = taker
        self.links: list[EngineLink] = []
        self.connections: list[ssl.SSLSocket] = []

    def do(self, act: Callable[[], Any]) -> Any:
        future: Future[Any] = Future()

        def work() -> None:
            try:
                future.set_result(act())
            except Exception as error:  # noqa: BLE001
                future.set_exception(error)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            return self.taker.serve(future)
        finally:
            thread.join()

    def link(self) -> EngineLink:
        self.links.append(self.do(lambda: EngineLink(self.taker.address, self.taker.context, "")))
        return self.links[-1]

    def announce(self, link: EngineLink, size: int) -> str:
        """Announce a file; its token."""

        def announced() -> str:
            call = link.number()
            link.post(wire.Stage(call, "ann/s", "model", "layout", 3, "digest", "", size))
            return str(link.answer(call).answer)

        return str(self.do(announced))

    def bring(self, call: int, token: str, content: bytes, ends: bool = True) -> ssl.SSLSocket:
        """Bring content for a token."""

        def brought() -> ssl.SSLSocket:
            connection = connect(self.taker.address, self.taker.context)
            with suppress(OSError):  # The engine may end it before all is sent.
                connection.sendall(framed(wire.encode(wire.Content(call, token))) + content)
                if ends:
                    connection.shutdown(socket.SHUT_WR)
            return connection

        self.connections.append(self.do(brought))
        return self.connections[-1]

    def answer(self, link: EngineLink, call: int) -> Any:
        return self.do(lambda: link.answer(call)).answer

    def refused(self, link: EngineLink, call: int, why: str) -> None:
        """A call is declined."""
        with pytest.raises(SendFailed, match=why):
            self.answer(link, call)

    def close(self) -> None:
        for each in (*self.links, *self.connections):
            each.close()


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "link.pem"
    write_keys(path)
    return path


@pytest.fixture
def taker(tmp_path: Path, keys: Path) -> Iterator[Taker]:
    threads, descriptors = threading.active_count(), open_descriptors()
    made = Taker(tmp_path / "disk", keys)
    yield made
    made.close()
    for each in threading.enumerate():
        if each.name == "holdfast-release":  # It gives the pages of a removed file back.
            each.join()
    assert threading.active_count() == threads and open_descriptors() == descriptors, "nothing is left"
    assert made.names() == [] and made.store.used == 0


@pytest.fixture
def giver(taker: Taker) -> Iterator[Giver]:
    made = Giver(taker)
    yield made
    made.close()


@pytest.fixture
def sender(taker: Taker) -> Iterator[SnapshotSender]:
    made = SnapshotSender(taker.context, "")
    yield made
    made.close()
    os.close(made.descriptor)


def no_name(_: int) -> None:
    """What `name_local` returns where processes cannot open each other's files."""


@pytest.fixture(params=["by the network", "on this machine"])
def is_local(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the engines are on one machine, as far as they know."""
    if request.param == "by the network":
        monkeypatch.setattr(snapshot_sender, "name_local", no_name)
    return bool(request.param == "on this machine")


def test_a_file_arrives_as_it_is_whatever_its_size_costs_the_loop_nothing(
    taker: Taker, sender: SnapshotSender, is_local: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = 0
    read = SecureSocket.read

    def counted(secure: SecureSocket) -> bool:
        nonlocal reads
        reads += 1
        return read(secure)

    monkeypatch.setattr(SecureSocket, "read", counted)
    for size in (64 * KIB, 16 << 10 << 10):
        content = content_of(size)
        (tmp_path / "sent").write_bytes(content)
        descriptor = os.open(tmp_path / "sent", os.O_RDONLY)
        reads = 0
        assert taker.serve(sender.send(taker.address, "ann/s", HEADER, descriptor, len(content)))
        most = 8 if is_local else 16
        assert reads <= most, "one or two handshakes, and messages; a file of 16 MiB has 64 pieces"
        (name,) = taker.names()
        assert (tmp_path / "disk" / name).read_bytes() == content
        assert taker.store.used == len(content), "the later file takes the place of the earlier one"
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_files_that_follow_each_other_share_a_link_as_long_as_it_holds(
    taker: Taker, sender: SnapshotSender, is_local: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    make = EngineLink.__init__

    def noted(link: EngineLink, address: str, context: ssl.SSLContext, model: str) -> None:
        made.append(address)
        make(link, address, context, model)

    monkeypatch.setattr(EngineLink, "__init__", noted)
    monkeypatch.setattr(snapshot_sender, "FRESH_SECONDS", 1e6)
    content = content_of(KIB)
    (tmp_path / "sent").write_bytes(content)

    def send(header: Header = HEADER) -> Any:
        descriptor = os.open(tmp_path / "sent", os.O_RDONLY)
        return taker.serve(sender.send(taker.address, "ann/s", header, descriptor, len(content)))

    assert send() and send() and len(made) == 1
    for link in list(sender._links.values()):
        link._socket.shutdown(socket.SHUT_RDWR)
    assert send() and len(made) == 2, "the link had gone"
    with pytest.raises(SendFailed, match="does not match"):
        send(Header("model", "another layout", 3, "digest"))
    assert len(made) == 2, "a refusal is not repeated"
    assert send() and send() and len(made) == 3
    monkeypatch.setattr(snapshot_sender, "FRESH_SECONDS", 0.0)
    assert send() and len(made) == 4, "the link was silent for too long"


def test_only_the_meant_file_of_this_machine_and_user_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"x" * KIB)
    with (tmp_path / "file").open("rb") as file, (tmp_path / "other").open("wb+") as other:
        named = name_local(file.fileno())
        assert named is not None
        descriptor = open_local(named, KIB)
        assert descriptor is not None and os.read(descriptor, 2 * KIB) == b"x" * KIB
        os.close(descriptor)
        opened = open_descriptors()
        replaced = msgspec.structs.replace
        assert open_local(named, KIB + 1) is None, "it is too short"
        assert open_local(replaced(named, machine="another"), KIB) is None
        assert open_local(replaced(named, descriptor=other.fileno()), 0) is None, "it is another file"
        assert open_local(replaced(named, process=1 << 22), KIB) is None, "there is no such process"
        folder = os.open(tmp_path, os.O_RDONLY)
        whole = name_local(folder)
        assert whole is not None and open_local(whole, 0) is None, "it is no regular file"
        os.close(folder)
        with monkeypatch.context() as patched:
            patched.setattr(os, "geteuid", lambda: 12345)
            assert open_local(named, KIB) is None, "it is another user's"
        with monkeypatch.context() as patched:
            patched.setattr(local_files, "BOOT_ID", tmp_path / "missing")
            assert name_local(file.fileno()) is None
            assert open_local(replaced(named, machine=""), KIB) is None
        assert open_descriptors() == opened


@pytest.mark.parametrize("fails", [None, errno.EXDEV, errno.EOPNOTSUPP])
def test_the_kernel_copies_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: int | None) -> None:
    def failing(*_: int) -> int:
        raise OSError(fails, "no")

    if fails is not None:
        monkeypatch.setattr(os, "copy_file_range", failing)
    monkeypatch.setattr(local_files, "COPY_BYTES", KIB)
    content = os.urandom(5 * KIB)
    (tmp_path / "file").write_bytes(content)
    with (tmp_path / "file").open("rb") as file, (tmp_path / "copy").open("wb") as copy:
        pieces: list[int] = []
        copy_file(file.fileno(), copy.fileno(), 4 * KIB + 1, pieces.append)
        assert (tmp_path / "copy").read_bytes() == content[: 4 * KIB + 1]
        assert pieces[-1] == 4 * KIB + 1 and len(pieces) >= 5
        with pytest.raises(FileEnded, match="it ended after 5120 bytes of 6144"):
            copy_file(file.fileno(), copy.fileno(), 6 * KIB, pieces.append)


def test_errors_of_a_copy_are_told(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file, pytest.raises(OSError, match="Bad file descriptor"):
        copy_file(file.fileno(), file.fileno(), KIB, lambda _: None)


class Held:
    """Lets no file be copied until it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.goes_on = threading.Event(), threading.Event()
        self.copies = 0
        copy = snapshot_receiver.copy_file

        def held(source: int, target: int, size: int, copied: Callable[[int], None]) -> None:
            self.begun.set()
            assert self.goes_on.wait(30)
            copied(0)
            self.copies += 1
            copy(source, target, size, copied)

        monkeypatch.setattr(snapshot_receiver, "copy_file", held)


def sent_file(taker: Taker, sender: SnapshotSender, folder: Path, content: bytes) -> Future[bool]:
    """Send a file of some content."""
    (folder / "sent").write_bytes(content)
    descriptor = os.open(folder / "sent", os.O_RDONLY)
    return sender.send(taker.address, "ann/s", HEADER, descriptor, len(content))


def test_a_link_is_kept_while_the_other_engine_copies(
    taker: Taker, sender: SnapshotSender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_sender, "BEAT_SECONDS", 0.01)
    held, content = Held(monkeypatch), content_of(KIB)
    beats = 0
    hear = taker.peers._hear

    def heard(peer: Any, command: wire.Command, size: int) -> None:
        nonlocal beats
        beats += isinstance(command, wire.Beat)
        hear(peer, command, size)

    monkeypatch.setattr(taker.peers, "_hear", heard)
    sending = sent_file(taker, sender, tmp_path, content)
    taker.until(held.begun.is_set)
    before = beats
    taker.until(lambda: beats >= before + 3)
    held.goes_on.set()
    assert taker.serve(sending) is True
    assert (tmp_path / "disk" / taker.names()[0]).read_bytes() == content


def test_who_waits_too_long_for_a_copy_gives_up_and_nothing_is_left(
    taker: Taker, sender: SnapshotSender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = content_of(KIB)
    monkeypatch.setattr(snapshot_sender, "FRESH_SECONDS", 1e6)
    assert taker.serve(sent_file(taker, sender, tmp_path, content)), "there is a link"
    held = Held(monkeypatch)
    monkeypatch.setattr(snapshot_sender, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(snapshot_sender, "SECONDS", 0.05)
    with pytest.raises(TimeoutError):
        taker.serve(sent_file(taker, sender, tmp_path, content))
    assert held.begun.is_set()
    taker.until(lambda: len(taker.names()) == 1 and taker.store.used == len(content))
    held.goes_on.set()
    taker.until(lambda: "holdfast-receiver" not in {each.name for each in threading.enumerate()})
    assert held.copies == 0, "what is not needed is not copied"


@pytest.mark.parametrize("competes", [True, False])
def test_a_thread_rests_after_each_piece_while_steps_need_the_processor(
    taker: Taker,
    sender: SnapshotSender,
    is_local: bool,
    competes: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rests: list[float] = []
    sleep = time.sleep

    def noted(seconds: float) -> None:
        (rests.append if threading.current_thread().name == "holdfast-receiver" else sleep)(seconds)

    monkeypatch.setattr(snapshot_receiver.time, "sleep", noted)  # type: ignore[attr-defined]
    monkeypatch.setattr(local_files, "COPY_BYTES", snapshot_receiver.BUFFER_BYTES)
    monkeypatch.setattr(taker.receiver, "_competes", lambda: competes)
    content = content_of(4 << 10 << 10)
    assert taker.serve(sent_file(taker, sender, tmp_path, content)) is True
    pieces = -(-len(content) // snapshot_receiver.BUFFER_BYTES)
    assert len(rests) == (pieces if competes else 0) and all(seconds > 0 for seconds in rests)


@pytest.mark.parametrize("why", ["header", "no thread", "too slow"])
def test_a_copy_that_cannot_be_used_is_declined_and_nothing_is_left(
    taker: Taker, sender: SnapshotSender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    content = content_of(KIB)
    if why == "header":
        content = bytes(len(content))
    elif why == "no thread":
        refuse_threads(monkeypatch)
    else:
        monkeypatch.setattr(taker.receiver, "_silence_seconds", -1e6)
    with pytest.raises(SendFailed, match={"no thread": "can't start new thread"}.get(why, why)):
        taker.serve(sent_file(taker, sender, tmp_path, content))
    assert taker.names() == [] and taker.store.used == 0


def test_content_with_a_wrong_or_used_token_is_refused(
    taker: Taker, giver: Giver, caplog: pytest.LogCaptureFixture
) -> None:
    content = content_of(KIB)
    link, other = giver.link(), giver.link()
    token = giver.announce(link, len(content))
    giver.bring(link.number(), "0" * 32, content)
    taker.until(lambda: "a token that was not given, or was used" in caplog.text)
    giver.bring(other.number(), token, content)
    taker.until(lambda: "the token of another engine" in caplog.text)
    call = link.number()
    giver.bring(call, token, content)
    assert giver.answer(link, call) is True, "the others have not used it up"
    caplog.clear()
    giver.bring(link.number(), token, content)
    taker.until(lambda: "a token that was not given, or was used" in caplog.text)
    assert len(taker.names()) == 1
    member = giver.link()
    giver.do(lambda: member.post(wire.Content(member.number(), token)))
    taker.until(lambda: len(taker.peers.members) == 2)
    giver.connections.append(stranger := socket.create_connection(taker.peers._listener.getsockname()))  # type: ignore[arg-type]
    stranger.sendall(framed(wire.encode(wire.Content(1, token))))
    caplog.clear()
    taker.until(lambda: "a link was refused" in caplog.text)


@pytest.mark.parametrize(
    ("change", "ends", "why"),
    [
        (lambda content: content + b"x", True, "longer than the announced"),
        (lambda content: content[:-1], True, "it ended after"),
        (lambda content: b"", True, "it ended after 0 bytes"),
        (lambda content: content[:-1], False, "timed out"),
        (lambda content: content, False, "timed out"),
        (lambda content: bytes(len(content)), True, "header"),
    ],
    ids=["more", "less", "nothing", "silence", "no end", "no header"],
)
def test_content_that_was_not_announced_leaves_nothing(
    taker: Taker, giver: Giver, change: Callable[[bytes], bytes], ends: bool, why: str
) -> None:
    content = content_of(2 << 10 << 10)
    link = giver.link()
    token, call = giver.announce(link, len(content)), link.number()
    giver.bring(call, token, change(content), ends)
    giver.refused(link, call, why)
    assert taker.names() == [] and taker.store.used == 0
    token, call = giver.announce(link, len(content)), link.number()
    giver.bring(call, token, content)
    assert giver.answer(link, call) is True, "the next one is received"


def test_a_transfer_whose_link_is_gone_is_broken_off(taker: Taker, giver: Giver) -> None:
    content = content_of(2 << 10 << 10)
    link = giver.link()
    token, unused = giver.announce(link, len(content)), giver.announce(link, len(content))
    assert unused != token and len(taker.names()) == 2 and taker.store.used == 2 * len(content)
    giver.bring(link.number(), token, content[: KIB * KIB], ends=False)
    link.close()
    taker.until(lambda: taker.names() == [] and taker.store.used == 0)
    taker.until(lambda: "holdfast-receiver" not in {each.name for each in threading.enumerate()})


def test_what_does_not_begin_in_time_and_what_is_slow_is_given_up(
    taker: Taker, giver: Giver, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = content_of(2 << 10 << 10)
    link = giver.link()
    with monkeypatch.context() as patched:
        patched.setattr(snapshot_receiver, "BEGIN_SECONDS", -1.0)
        giver.announce(link, len(content))
        taker.until(lambda: taker.names() == [] and taker.store.used == 0)
    monkeypatch.setattr(taker.receiver, "_silence_seconds", -1e6)
    token, call = giver.announce(link, len(content)), link.number()
    monkeypatch.setattr(SecureSocket, "release", _released_for(30.0, SecureSocket.release))
    giver.bring(call, token, content)
    giver.refused(link, call, "it is too slow: 1048576 bytes of")


def _released_for(seconds: float, release: Callable[..., Any]) -> Callable[..., Any]:
    return lambda secure, _: release(secure, seconds)


def test_while_it_drains_an_engine_receives_what_it_has_promised(taker: Taker, giver: Giver) -> None:
    content = content_of(KIB)
    link = giver.link()
    token, call = giver.announce(link, len(content)), link.number()
    taker.peers.draining = True
    with pytest.raises(SendFailed, match="shutting down"):
        giver.announce(link, len(content))
    giver.bring(call, token, content)
    assert giver.answer(link, call) is True


def test_an_engine_that_ends_breaks_transfers_off(taker: Taker, giver: Giver) -> None:
    content = content_of(2 << 10 << 10)
    link = giver.link()
    token = giver.announce(link, len(content))
    giver.announce(link, len(content))
    giver.bring(link.number(), token, content[:-1], ends=False)
    taker.until(lambda: "holdfast-receiver" in {each.name for each in threading.enumerate()})


def refuse_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the system have no thread for a receiver."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "holdfast-receiver":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)


def test_without_a_thread_a_file_is_refused_and_leaves_nothing(
    taker: Taker, giver: Giver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    content = content_of(KIB)
    link = giver.link()
    token, call = giver.announce(link, len(content)), link.number()
    refuse_threads(monkeypatch)
    giver.bring(call, token, content)
    taker.until(lambda: "can't start new thread" in caplog.text)
    assert taker.names() == [] and taker.store.used == 0


def test_a_file_that_is_cut_while_it_is_sent_fails(taker: Taker, giver: Giver, tmp_path: Path) -> None:
    (tmp_path / "sent").write_bytes(b"x" * KIB)
    link = giver.link()
    token, call = giver.announce(link, 2 * KIB), link.number()
    connection = giver.bring(call, token, b"", ends=False)
    descriptor = os.open(tmp_path / "sent", os.O_RDONLY)
    with pytest.raises(SendFailed, match="shorter than it was"):
        giver.do(lambda: send_file(connection, descriptor, 2 * KIB, link))
    os.close(descriptor)
