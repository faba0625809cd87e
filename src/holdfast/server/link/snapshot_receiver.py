"""Receives sessions' memory from other engines: a thread for each file, beside the engine's loop.

    Stage --> Done(token)       a file is announced; Declined if this engine cannot use it
    Content(token), bytes …     a connection of its own: the loop greets it and hands it to a thread, which
                                decrypts, and writes the file
    --> Done                    on the link, once the loop has checked the file and staged it
    Stage --> Done(True)        instead of these, if the file is on this machine: a thread has copied it

The loop's work does not grow with the file. A token is good for one connection, of the engine that it was
given to. A transfer that is refused, stalls, ends early, brings more than announced, or is not needed any
more leaves nothing: no file, no descriptor, no thread. Called by the engine's loop, by its commands.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from holdfast.engine.tiers.files import Header
from holdfast.engine.tiers.staging import ARRIVING_MAX, NotStaged, Staging
from holdfast.server.link import wire
from holdfast.server.link.local_files import copy_file, open_local
from holdfast.server.link.secure_socket import SecureBytes, SecureSocket

__all__ = ["SnapshotReceiver"]

log = logging.getLogger("holdfast.engine")

BUFFER_BYTES = 1 << 20
"""Bytes that are decrypted before they are written: reading and writing let other threads run."""

BEGIN_SECONDS = 30.0
"""How long after its announcement the content of a file may begin."""

BYTES_PER_SECOND_MIN = 1 << 20
"""How fast it must come, on the whole, after that."""

JOIN_SECONDS = 10.0

REST = 2.0
"""How much longer than it works for a piece a thread rests while steps need the processor."""


def never() -> bool:
    """Steps leave the processor alone, as those of a GPU."""
    return False


class TransferBroken(RuntimeError):
    """A transfer has come to nothing; the message says why."""


GoOn = Callable[[int], None]
"""Hears how many bytes have come after each piece; raises if no more are wanted."""


class Source(Protocol):
    """Where the content of a file comes from; the thread of its transfer reads it."""

    def bring(self, target: int, size: int, go_on: GoOn) -> None:
        """Write all of the content to a descriptor."""

    def break_off(self) -> None:
        """Let the thread's wait end, from another thread."""

    def close(self) -> None:
        """The thread has ended."""


class Connection:
    """Content that comes over the network."""

    def __init__(self, content: SecureBytes) -> None:
        self._content = content
        self.break_off = content.break_off
        self.close = content.close

    def bring(self, target: int, size: int, go_on: GoOn) -> None:
        """Receive and write all of the content."""
        buffer = memoryview(bytearray(min(BUFFER_BYTES, size)))
        done = 0
        while done < size:
            piece = buffer[: min(len(buffer), size - done)]
            count = self._content.fill(piece)
            go_on(done + count)
            if count < len(piece):
                raise TransferBroken(f"it ended after {done + count} bytes of {size}")
            while piece:
                piece = piece[os.write(target, piece) :]
            done += count
        if self._content.fill(buffer[:1]):
            raise TransferBroken(f"it is longer than the announced {size} bytes")


class LocalCopy:
    """Content in a file of another process of this machine, by an open descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def bring(self, target: int, size: int, go_on: GoOn) -> None:
        """Let the kernel copy all of the content."""
        copy_file(self._descriptor, target, size, go_on)

    def break_off(self) -> None:
        """Nothing is waited for: `go_on` ends a copy."""

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class Transfer:
    """One file on its way."""

    __slots__ = (
        "call",
        "competes",
        "descriptor",
        "error",
        "needed",
        "size",
        "source",
        "stage",
        "thread",
        "until",
        "worked",
    )

    def __init__(
        self, stage: int, descriptor: int, size: int, until: float, competes: Callable[[], bool]
    ) -> None:
        """`competes` says whether steps need the processor."""
        self.competes = competes
        self.worked = 0.0
        """The processor time of the thread up to the piece before."""
        self.stage = stage
        """The call that announced it."""
        self.call = 0
        """The call that brings it, once it has begun."""
        self.descriptor = descriptor
        """Of the file; the thread closes it once it has begun."""
        self.size = size
        self.until = until
        self.needed = True
        self.source: Source | None = None
        """Where its content comes from, once it has begun."""
        self.thread: threading.Thread | None = None
        self.error: str | None = None

    def receive(self, clock: Callable[[], float]) -> None:
        """Write the content to the file; in the thread."""
        try:
            assert self.source is not None, "it has begun"
            self.source.bring(self.descriptor, self.size, lambda done: self._go_on(done, clock))
        except Exception as error:  # noqa: BLE001
            self.error = str(error) or type(error).__name__
        finally:
            os.close(self.descriptor)

    def _go_on(self, done: int, clock: Callable[[], float]) -> None:
        """Rest beside steps after a piece; raise if a transfer with `done` bytes is to be given up."""
        if not self.needed:
            raise TransferBroken("it is not needed any more")
        if clock() > self.until:
            raise TransferBroken(f"it is too slow: {done} bytes of {self.size} came in time")
        if self.competes():
            time.sleep(REST * (time.thread_time() - self.worked))
        self.worked = time.thread_time()

    def break_off(self) -> None:
        """Let the thread end soon: the file is not needed any more."""
        self.needed = False
        if self.source is not None:
            self.source.break_off()


class SnapshotReceiver:
    """The files that come to one engine."""

    def __init__(
        self,
        staging: Staging,
        answer: Callable[[wire.Done | wire.Declined], None],
        silence_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        competes: Callable[[], bool] = never,
    ) -> None:
        """`silence_seconds`: how long a connection may bring nothing; `competes`: steps need the CPU."""
        self._competes = competes
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable when a thread has finished."""
        self._staging = staging
        self._answer = answer
        self._silence_seconds = silence_seconds
        self._clock = clock
        self._expected: dict[str, Transfer] = {}
        """Transfers that have not begun, by token."""
        self._begun: dict[int, Transfer] = {}
        """Transfers with a thread, by the call that announced them."""
        self._finished: queue.SimpleQueue[Transfer] = queue.SimpleQueue()

    def stage(self, command: wire.Stage) -> None:
        """A file is announced."""
        about = (command.model, command.layout, command.length, command.tokens, command.types)
        try:
            if command.call in self._begun or len(self._begun) >= ARRIVING_MAX:
                raise NotStaged("a transfer has not ended yet")
            descriptor = self._staging.begin(command.call, command.session, Header(*about), command.bytes)
        except NotStaged as refusal:
            self._decline(command.call, str(refusal))
            return
        until = self._clock() + BEGIN_SECONDS
        transfer = Transfer(command.call, descriptor, command.bytes, until, self._competes)
        local = None if command.local is None else open_local(command.local, command.bytes)
        if local is None:
            token = secrets.token_hex(16)
            self._expected[token] = transfer
            self._answer(wire.Done(command.call, answer=token))
            return
        transfer.call = command.call
        why = self._begin(transfer, LocalCopy(local))
        if why is not None:
            self._decline(command.call, why)

    def take(self, message: wire.Content, secure: SecureSocket) -> str | None:
        """Take a connection over that brings the content of a file; or why it is refused."""
        transfer = self._expected.get(message.token)
        if transfer is None:
            return "content with a token that was not given, or was used"
        if message.call >> wire.CALL_BITS != transfer.stage >> wire.CALL_BITS:
            return "content with the token of another engine"
        del self._expected[message.token]
        transfer.call = message.call
        return self._begin(transfer, Connection(secure.release(self._silence_seconds)))

    def _begin(self, transfer: Transfer, source: Source) -> str | None:
        """Start the thread of a transfer; or why it cannot be, and then nothing of the transfer is left."""
        transfer.source = source
        transfer.until = self._clock() + self._silence_seconds + transfer.size / BYTES_PER_SECOND_MIN
        transfer.thread = threading.Thread(
            target=self._work, args=(transfer,), name="holdfast-receiver", daemon=True
        )
        try:
            transfer.thread.start()
        except RuntimeError as error:  # The system has no thread for it.
            os.close(transfer.descriptor)
            source.close()
            self._staging.abandon(transfer.stage)
            return str(error)
        self._begun[transfer.stage] = transfer
        return None

    def _work(self, transfer: Transfer) -> None:
        """The thread of a transfer."""
        transfer.receive(self._clock)
        self._finished.put(transfer)
        os.eventfd_write(self.descriptor, 1)

    def poll(self) -> None:
        """Answer what has finished, and give up what does not begin."""
        while not self._finished.empty():
            self._finish(self._finished.get())
            with suppress(BlockingIOError):
                os.eventfd_read(self.descriptor)  # Written: the thread has ended.
        if self._expected:
            now = self._clock()
            for late in [each for each in self._expected.values() if each.until < now]:
                self.abandon(late.stage)

    def _finish(self, transfer: Transfer) -> None:
        self._end(transfer)
        if not transfer.needed:
            return
        try:
            if transfer.error is not None:
                raise NotStaged(transfer.error)
            self._staging.complete(transfer.stage)
        except NotStaged as refusal:
            self._staging.abandon(transfer.stage)
            log.info("a file from another engine is not used: %s", refusal)
            self._decline(transfer.call, str(refusal))
        else:
            self._answer(wire.Done(transfer.call, answer=True))

    def _end(self, transfer: Transfer) -> None:
        """The thread of a transfer has no more to do."""
        assert transfer.thread is not None and transfer.source is not None
        transfer.thread.join()
        transfer.source.close()
        del self._begun[transfer.stage]

    def abandon(self, stage: int) -> None:
        """A file is not needed any more: its engine has gone, or says so."""
        self._staging.abandon(stage)
        for token, each in list(self._expected.items()):
            if each.stage == stage:
                del self._expected[token]
                os.close(each.descriptor)
        transfer = self._begun.get(stage)
        if transfer is not None:
            transfer.break_off()

    def _decline(self, call: int, why: str) -> None:
        self._answer(wire.Declined(call, "not_staged", why))

    def close(self) -> None:
        """Abandon everything, and wait for the threads."""
        begun = list(self._begun.values())
        for each in [*self._expected.values(), *begun]:
            self.abandon(each.stage)
        for each in begun:
            assert each.thread is not None
            each.thread.join(JOIN_SECONDS)
        self.poll()
        if not self._begun:  # A disk that hangs is left alone.
            os.close(self.descriptor)
