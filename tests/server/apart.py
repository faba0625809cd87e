"""Engines and API processes as processes of their own, and a network between them that tests can disturb."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.server.link.tls import write_keys
from tests.preloaded import commands
from tests.server.serving import Server

LISTENS = re.compile(r"Holdfast engine \S+ listens on (\S+)")
SMALL = ("--kv-tokens", "16384", "--audit", "strict")
ENDLESS = ("--context-length", "100000", "--kv-tokens", "200000")
"""An engine whose longest turn outlasts a test."""


class EngineProcess:
    """`holdfast engine` in a process of its own."""

    def __init__(
        self,
        keys: Path,
        *arguments: str,
        model: str = "echo",
        listen: str = "127.0.0.1:0",
        network: str | None = None,
        machine: str | None = None,
    ) -> None:
        """`network` is the file of a network namespace, in which the engine runs.

        `machine` is the file of the boot id of another machine, which it takes itself to be on.
        """
        self.lines: list[str] = []
        self.process = commands.start(
            *("engine", model, "--listen", listen, "--link-keys", str(keys), *arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            network=network,
            machine=machine,
        )
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._ready.wait(120), "\n".join(["the engine did not come up:", *self.lines])
        found = [match for line in self.lines if (match := LISTENS.search(line))]
        assert found, "\n".join(["the engine ended:", *self.lines])
        self.address = found[0][1]

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if LISTENS.search(line):
                self._ready.set()
        self._ready.set()

    def says(self, words: str, seconds: float = 30) -> str:
        """Wait for a line of its log."""
        return said(self.lines, words, seconds)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Ask the engine to end, and return its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        status = self.process.wait(60)
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status


def said(lines: list[str], words: str, seconds: float = 30) -> str:
    """Wait until a log has a line with some words."""
    return until(lambda: next((line for line in lines if words in line), None), seconds, lambda: lines)


def until(look: Callable[[], Any], seconds: float = 30, why: Callable[[], object] = lambda: "") -> Any:
    """Wait until `look` finds something."""
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline, f"it did not come: {why()}"
        time.sleep(0.01)
    return found


class Proxy:
    """Forwards connections to a port; what passes is recorded, and can be held back or cut."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        """`host` is where it listens."""
        self.port_there = port
        self.recorded: list[bytes] = []
        """What clients have sent, one entry for each connection."""
        self.flows = threading.Event()
        self.flows.set()
        self.delay = 0.0
        self.cut_after: int | None = None
        """Bytes from clients after which a connection is cut."""
        self.hold_after: int | None = None
        """Bytes from one client after which nothing flows."""
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._listener = socket.create_server((host, 0))
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._ended = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listener.accept()
            except OSError:
                return
            try:
                there = self.connect()
            except OSError:
                here.close()
                continue
            self._pairs.append((here, there))
            place = len(self.recorded)
            self.recorded.append(b"")
            threading.Thread(target=self._pump, args=(here, there, place), daemon=True).start()
            threading.Thread(target=self._pump, args=(there, here, None), daemon=True).start()

    def connect(self) -> socket.socket:
        """A connection to what is behind it."""
        return socket.create_connection(("127.0.0.1", self.port_there))

    def _pump(self, source: socket.socket, sink: socket.socket, place: int | None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if self.delay:
                    time.sleep(self.delay)
                sent = 0 if place is None else len(self.recorded[place]) + len(data)
                if self.hold_after is not None and sent > self.hold_after:
                    self.flows.clear()
                self.flows.wait()
                if place is not None:
                    self.recorded[place] += data
                    if self.cut_after is not None and len(self.recorded[place]) >= self.cut_after:
                        sink.sendall(data[: len(data) // 2])
                        break
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def cut(self) -> None:
        """Cut all connections."""
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop forwarding."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.flows.set()
        self.cut()


class Apart:
    """Starts engines and API processes that share a key file."""

    def __init__(self, folder: Path) -> None:
        self.keys = folder / "link.pem"
        write_keys(self.keys)
        self._engines: list[EngineProcess] = []
        self._servers: list[Server] = []
        self._proxies: list[Proxy] = []

    def engine(self, *arguments: str, keys: Path | None = None, **more: Any) -> EngineProcess:
        engine = EngineProcess(keys or self.keys, *(arguments or SMALL), **more)
        self._engines.append(engine)
        return engine

    def api(self, *engines: EngineProcess | Proxy, arguments: tuple[str, ...] = ()) -> Server:
        """An API process; all its engines are connected."""
        named = [part for engine in engines for part in ("--engine", engine.address)]
        server = Server(None, *named, "--link-keys", str(self.keys), *arguments)
        self._servers.append(server)
        self.connected(server, len(engines))
        return server

    def connected(self, server: Server, count: int) -> None:
        """Wait until so many engines of a server are up."""
        until(lambda: list(states(server).values()).count("up") == count, why=lambda: server.lines)

    def proxy(self, engine: EngineProcess) -> Proxy:
        proxy = Proxy(engine.port)
        self._proxies.append(proxy)
        return proxy

    def end(self) -> None:
        """End everything; what is still running ends cleanly, and nothing went wrong inside."""
        for proxy in self._proxies:
            proxy.close()
        for each in (*self._servers, *self._engines):
            if each.process.poll() is None:
                assert each.stop() == 0, "\n".join(each.lines)
            elif isinstance(each, Server):
                each.http.close()
            assert not any("Traceback" in line for line in each.lines), "\n".join(each.lines)


def states(server: Server) -> dict[str, str]:
    """The states of a server's engines, by name."""
    found: dict[str, str] = server.get("/health").json()["engines"]
    return found


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[Apart]:
    """Engines and API processes; they end with the test, cleanly."""
    made = Apart(tmp_path)
    yield made
    made.end()
