"""Engines, API processes and HAProxy as processes, for benchmarks of a cluster on one machine."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from holdfast.bench.machine import processor_seconds
from holdfast.bench.served import ServerProcess
from holdfast.server.link.tls import write_keys

__all__ = ["Cluster", "EngineProcess", "HaProxy", "cpu_of"]

ENGINE = (sys.executable, "-m", "holdfast.cli", "engine")
LISTENS = re.compile(r"Holdfast engine \S+ listens on (\S+)")
STOP_SECONDS_MAX = 60.0
CONNECT_SECONDS_MAX = 10.0

HAPROXY = """
global
    maxconn 4096
defaults
    mode http
    timeout connect 5s
    timeout client 1h
    timeout server 1h
frontend clients
    bind {frontend}
    default_backend servers
backend servers
    balance roundrobin
"""


def cpu_of(pids: Sequence[int]) -> float:
    """Processor time of processes and their descendants, in seconds."""
    return sum(processor_seconds(pid) for pid in pids)


class EngineProcess:
    """`holdfast engine` that listens on a free port."""

    def __init__(self, *arguments: str) -> None:
        command = [*ENGINE, *arguments, "--listen", "127.0.0.1:0"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if found := LISTENS.search(line):
                self.address = found[1]
                return
        raise RuntimeError(f"the engine ended with status {self._process.wait()} before it listened")

    def freeze(self) -> None:
        """Stop it as it is; it can only be killed then."""
        self._process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        """Kill -9, and return when it is gone."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def stop(self) -> None:
        """Drain and end it; kill it if it does not end."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


class HaProxy:
    """HAProxy in front of servers."""

    def __init__(self, program: str, servers: Sequence[ServerProcess], folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address: tuple[str, int] = free.getsockname()[:2]
        backends = [f"    server api{n} {host}:{port}" for n, (host, port) in enumerate(_places(servers))]
        path = folder / "haproxy.cfg"
        frontend = f"{self.address[0]}:{self.address[1]}"
        path.write_text(HAPROXY.format(frontend=frontend) + "\n".join(backends) + "\n", encoding="ascii")
        self._process = subprocess.Popen([program, "-db", "-q", "-f", str(path)])
        self.pid = self._process.pid
        deadline = time.monotonic() + CONNECT_SECONDS_MAX
        while True:
            try:
                socket.create_connection(self.address).close()
                return
            except ConnectionRefusedError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise
                time.sleep(0.05)

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait()


def _places(servers: Sequence[ServerProcess]) -> list[tuple[str, int]]:
    return [server.address for server in servers]


class Cluster:
    """Engines and API processes with one key; leaving the context stops all of them, the last first."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
        self._stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self._keys = self.folder / "link.pem"
        write_keys(self._keys)

    def engine(self, model: str, *arguments: str) -> EngineProcess:
        """One more engine."""
        engine = EngineProcess(model, "--link-keys", str(self._keys), *arguments)
        self._stack.callback(engine.stop)
        return engine

    def api(self, engines: Sequence[EngineProcess], *arguments: str) -> ServerProcess:
        """One more API process, on these engines."""
        named = [part for engine in engines for part in ("--engine", engine.address)]
        return self.server(*named, "--link-keys", str(self._keys), *arguments)

    def server(self, *arguments: str) -> ServerProcess:
        """One more server."""
        return self._stack.enter_context(ServerProcess(*arguments))

    def haproxy(self, program: str, servers: Sequence[ServerProcess]) -> HaProxy:
        """HAProxy in front of servers."""
        proxy = HaProxy(program, servers, self.folder)
        self._stack.callback(proxy.stop)
        return proxy

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
