"""A proxy in front of PostgreSQL that ends a connection between the database's answer and its client.

Everything passes until `cut` is set; the next answer that completes a statement is dropped, and both ends
closed. The statement was carried out then, and its client cannot know. `delay` makes answers slow.
"""

import contextlib
import shutil
import socket
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType

NAME = ".s.PGSQL.5432"


def messages(data: bytes) -> bytes:
    """The types of PostgreSQL's messages; `C` completes a statement."""
    types, place = bytearray(), 0
    while place + 5 <= len(data):
        types.append(data[place])
        place += 1 + int.from_bytes(data[place + 1 : place + 5], "big")
    return bytes(types)


class Proxy:
    """Listens on a Unix socket in a directory of its own."""

    def __init__(self, behind: Path) -> None:
        self.behind = behind / NAME
        self.cut = False
        self.cuts = 0
        self.delay = 0.0
        """Seconds by which answers come later."""
        self.directory = Path(tempfile.mkdtemp(prefix="holdfast-cut-"))
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.directory / NAME))
        self._listener.listen()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        shutil.rmtree(self.directory)

    def part(self) -> None:
        """Cut all connections, and accept no others."""
        (self.directory / NAME).unlink()
        for pair in self._pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            server.connect(str(self.behind))
            self._pairs.append((client, server))
            for source, target, cuts in ((client, server, False), (server, client, True)):
                threading.Thread(target=self._pass_on, args=(source, target, cuts), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, cuts: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if cuts and self.cut and b"C" in messages(data):
                    self.cut = False
                    self.cuts += 1
                    break
                if cuts:
                    time.sleep(self.delay)
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
