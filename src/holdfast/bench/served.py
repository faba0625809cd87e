"""`holdfast serve` in a process of its own, for benchmarks that measure a server from outside."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from types import TracebackType

__all__ = ["ServerProcess"]

SERVE = (sys.executable, "-m", "holdfast.cli", "serve")
STOP_SECONDS_MAX = 60.0
GRAPHS_SECONDS_MAX = 120.0


class ServerProcess:
    """A server on a free port; leaving the context stops it."""

    def __init__(self, *arguments: str, command: Sequence[str] = SERVE) -> None:
        """`arguments` follow the command: the model and its options."""
        self._process = subprocess.Popen(
            [*command, *arguments, "--port", "0"], stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid
        self.url = self._read_url()
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        self.address = (host, int(port))

    def _read_url(self) -> str:
        """The address that the server prints when it listens."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if found := re.search(r"http://\S+", line):
                return found[0]
        raise RuntimeError(f"the server ended with status {self._process.wait()} before it listened")

    def __enter__(self) -> ServerProcess:
        self._wait_for_graphs()
        return self

    def _wait_for_graphs(self) -> None:
        """Wait until an idle server on a GPU has captured its graphs, which would hold up the first turns."""
        deadline = time.monotonic() + GRAPHS_SECONDS_MAX
        while time.monotonic() < deadline:
            with urllib.request.urlopen(f"{self.url}/health/ready") as answer:
                graphs = json.load(answer).get("graphs")
            if graphs is None or graphs["captured"] >= graphs["total"]:
                return
            time.sleep(0.5)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Terminate the server, and kill it if it does not end."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
