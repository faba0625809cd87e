"""Sends sessions' memory to other engines: a thread with a link to each, as an API process has one.

    Greeting --> Welcome, Pulse     which engine it is, and how much room it has
    Stage --> Done(token)           a snapshot file is announced; Declined if the engine cannot use it
    Content(token), bytes …         its content, over a connection of its own
    --> Done                        on the link: the file is complete
    Stage --> Done(True)            instead of these: an engine on the same machine has copied the file
    Claim --> Done                  the session is that engine's by now

The thread reads the file and waits for the network; the engine's loop only looks whether a job is done
(`Future`), and is woken by a descriptor. A link that fails fails its job, and the next job makes another. The
other end of a transfer is `snapshot_receiver`. Used by `hand_overs`.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from holdfast.engine.tiers.files import Header
from holdfast.server.link import wire
from holdfast.server.link.addresses import split_address
from holdfast.server.link.frames import framed
from holdfast.server.link.local_files import name_local
from holdfast.server.link.secure_socket import BoundedFrames, set_timeouts

__all__ = ["SendFailed", "SnapshotSender"]

log = logging.getLogger("holdfast.engine")

READ_BYTES = 1 << 20
"""Bytes of a file that are read, encrypted and sent at a time."""

SECONDS = 10.0
"""How long the other engine may say nothing, or take nothing."""

FRESH_SECONDS = 2.0
"""How long after its last use a link is used for the next file; an older one may be gone."""

BEAT_SECONDS = 0.5
"""How often an engine is told that its link is still used, while it receives a file."""

COPIED_BYTES_PER_SECOND_MIN = 16 << 20
"""How fast an engine on the same machine must copy a file, on the whole."""

Answer = TypeVar("Answer")


class SendFailed(RuntimeError):
    """The other engine was not reached, or declined; the message says why."""


class DeclinedByEngine(SendFailed):
    """The other engine declined."""


def connect(address: str, context: ssl.SSLContext) -> ssl.SSLSocket:
    """A connection to an engine, after the handshake."""
    host, port = split_address("advertise", address)
    plain = socket.create_connection((host, port), SECONDS)
    set_timeouts(plain, SECONDS)
    try:
        return context.wrap_socket(plain)
    except BaseException:
        plain.close()
        raise


class EngineLink:
    """A link to one engine, with waiting."""

    def __init__(self, address: str, context: ssl.SSLContext, model: str) -> None:
        self.pulse: wire.Pulse | None = None
        self.heard = 0.0
        """When the last message came."""
        self._frames = BoundedFrames()
        self._numbers = itertools.count(1)
        self._prefix = 1 + secrets.randbelow((1 << (63 - wire.CALL_BITS)) - 1)
        self._socket = connect(address, context)
        try:
            self._greet(model, address)
        except BaseException:
            self.close()
            raise

    def _greet(self, model: str, address: str) -> None:
        """Say who asks, and wait for the first heartbeat."""
        self.post(
            wire.Greeting(wire.PROTOCOL, secrets.token_hex(16), self._prefix, model, address, engine=True)
        )
        welcome = self._hear()
        if not isinstance(welcome, wire.Welcome):
            raise SendFailed(welcome.message if isinstance(welcome, wire.Unable) else "it sent no welcome")
        while self.pulse is None:
            self._hear()

    def number(self) -> int:
        """The number of the next call."""
        return self._prefix << wire.CALL_BITS | next(self._numbers)

    def post(self, command: wire.Command) -> None:
        """Send a command."""
        self._socket.sendall(framed(wire.encode(command)))

    def answer(self, call: int, seconds: float = SECONDS) -> wire.Done:
        """Wait for the answer to a call, which takes so long at most; raises if it is declined."""
        until = time.monotonic() + seconds
        while True:
            report = self._hear(until)
            if isinstance(report, wire.Done) and report.call == call:
                return report
            if isinstance(report, wire.Declined) and report.call == call:
                raise DeclinedByEngine(report.message)

    def _hear(self, until: float | None = None) -> wire.Report:
        while (frame := self._frames.take()) is None:
            data = self._receive(time.monotonic() + SECONDS if until is None else until)
            if not data:
                raise SendFailed("the other engine closed the link")
            self._frames.feed(data)
        report = wire.decode_report(frame)
        self.heard = time.monotonic()
        if isinstance(report, wire.Pulse):
            self.pulse = report
        return report

    def _receive(self, until: float) -> bytes:
        """What comes next; the other engine gets heartbeats meanwhile."""
        self._socket.settimeout(BEAT_SECONDS)
        try:
            while True:
                try:
                    return self._socket.recv(1 << 16)
                except TimeoutError:
                    if time.monotonic() > until:
                        raise
                self.post(wire.Beat())
        finally:
            self._socket.settimeout(SECONDS)

    def close(self) -> None:
        """Close the link."""
        with suppress(OSError):
            self._socket.close()


class SnapshotSender:
    """The links of one engine to others, and the thread that uses them."""

    def __init__(self, context: ssl.SSLContext, model: str) -> None:
        """`model` is the digest of the model: an engine with another one refuses the link."""
        self._context = context
        self._model = model
        self._links: dict[str, EngineLink] = {}
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable when a job has finished."""
        self._thread: threading.Thread | None = None

    # --- called by the engine's loop --------------------------------------------------------------

    def look(self, address: str) -> Future[wire.Pulse | None]:
        """Ask an engine how much room it has."""
        return self._submit(lambda: self._link(address, fresh=True).pulse)

    def send(self, address: str, session: str, header: Header, descriptor: int, size: int) -> Future[bool]:
        """Send a file, whose descriptor is closed afterwards."""

        def send() -> bool:
            try:
                return self._send(address, session, header, descriptor, size)
            finally:
                os.close(descriptor)

        return self._submit(send)

    def tell(self, address: str, session: str) -> Future[bool]:
        """Tell an engine that a session is its own by now."""

        def told() -> bool:
            try:
                return self._tell(self._link(address), session)
            except (OSError, SendFailed):  # The other engine drops links that are silent.
                return self._tell(self._link(address, fresh=True), session)

        return self._submit(told)

    def clear(self) -> None:
        """The descriptor was seen."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)

    def close(self) -> None:
        """End the thread after the job that it does."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(SECONDS)

    # --- the thread -------------------------------------------------------------------------------

    def _submit(self, act: Callable[[], Answer]) -> Future[Answer]:
        future: Future[Answer] = Future()

        def work() -> None:
            try:
                future.set_result(act())
            except Exception as error:  # noqa: BLE001
                future.set_exception(error)
            os.eventfd_write(self.descriptor, 1)

        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="holdfast-sender", daemon=True)
            self._thread.start()
        self._jobs.put(work)
        return future

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
        for link in self._links.values():
            link.close()

    def _link(self, address: str, fresh: bool = False) -> EngineLink:
        """The link to an engine; made anew where it is to be fresh, or has been silent."""
        link = self._links.get(address)
        if link is not None and fresh:
            self._drop(address)
            link = None
        if link is None:
            link = self._links[address] = EngineLink(address, self._context, self._model)
        return link

    def _drop(self, address: str) -> None:
        link = self._links.pop(address, None)
        if link is not None:
            link.close()

    def _tell(self, link: EngineLink, session: str) -> bool:
        call = link.number()
        link.post(wire.Claim(call, session))
        return link.answer(call).answer is not None

    def _send(self, address: str, session: str, header: Header, descriptor: int, size: int) -> bool:
        try:
            link, answer = self._announce(address, session, header, descriptor, size)
            if answer is True:
                return True
            content = wire.Content(link.number(), str(answer))
            try:
                with connect(address, self._context) as connection:
                    connection.sendall(framed(wire.encode(content)))
                    send_file(connection, descriptor, size, link)
                    return bool(link.answer(content.call).answer)
            except OSError:
                link.answer(content.call)  # It says why, if the other engine ended the transfer.
                raise
        except Exception:
            self._drop(address)
            raise

    def _announce(
        self, address: str, session: str, header: Header, descriptor: int, size: int
    ) -> tuple[EngineLink, object]:
        """Announce a file over the link that was used just now, or else a new one: its token.

        True if the other engine has copied it.
        """
        fields = (header.model, header.layout, header.length, header.tokens, header.types)
        local = name_local(descriptor)

        def announced(link: EngineLink) -> object:
            call = link.number()
            link.post(wire.Stage(call, session, *fields, size, local))
            return link.answer(call, SECONDS + size / COPIED_BYTES_PER_SECOND_MIN).answer

        link = self._links.get(address)
        if link is not None and time.monotonic() - link.heard < FRESH_SECONDS:
            try:
                return link, announced(link)
            except DeclinedByEngine:
                raise
            except (OSError, SendFailed) as error:
                log.debug("a link to %s is made again: %s", address, error)
        link = self._link(address, fresh=True)
        return link, announced(link)


def send_file(connection: ssl.SSLSocket, descriptor: int, size: int, link: EngineLink) -> None:
    """Send the first `size` bytes of a file, and let nothing follow; keep the link alive meanwhile."""
    buffer = memoryview(bytearray(min(READ_BYTES, size)))
    done, beaten = 0, time.monotonic()
    while done < size:
        count = os.preadv(descriptor, [buffer[: size - done]], done)
        if not count:
            raise SendFailed("the file is shorter than it was")
        connection.sendall(buffer[:count])
        done += count
        if time.monotonic() - beaten > BEAT_SECONDS:
            beaten = time.monotonic()
            link.post(wire.Beat())
    connection.shutdown(socket.SHUT_WR)
