"""A real server process on a free port, as a person would start it, and what tests ask of it."""

import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from tests.plain import NO_TLS
from tests.preloaded import commands

READY = re.compile(r"Holdfast serves \S+ on (http://\S+)")
HELD = ("TURN", "SESSION", "CHECKPOINT", "RETIRING", "TRANSIT", "QUARANTINE", "COPY")
ADMIN_KEY = "the-admin-key-of-the-tests"


def _command(process: int) -> str:
    """What a process runs; nothing if it has ended."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""


class Server:
    """`holdfast serve` in a process of its own."""

    def __init__(
        self,
        model: str | Path | None,
        *arguments: str,
        environment: dict[str, str] | None = None,
        descriptors: int | None = None,
        execute: bool = False,
        starts_within: float = 120,
    ) -> None:
        """`descriptors` limits how many each process may open. Without a model its engines are apart.

        The server is a preloaded process, unless `execute` asks for new interpreters.
        """
        named = [] if model is None else [str(model)]
        self.arguments = [*named, "--port", "0", *arguments]
        self.lines: list[str] = []
        settings = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        self.process = commands.start(
            *("serve", *self.arguments),
            descriptors=descriptors,
            execute=execute,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=settings,
        )
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._ready.wait(starts_within), "\n".join(["the server did not come up:", *self.lines])
        found = [match for line in self.lines if (match := READY.search(line))]
        assert found, "\n".join(["the server ended:", *self.lines])
        self.url = found[0][1]
        self.http = httpx.Client(base_url=self.url, timeout=60, verify=NO_TLS)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if READY.search(line):
                self._ready.set()
        self._ready.set()

    # --- calls ------------------------------------------------------------------------------------

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        return self.http.post(path, json=body, **more)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self.http.get(path, **more)

    def open(self, name: str | None = None, **fields: Any) -> str:
        """Open a session and return its name."""
        body = {**fields, **({} if name is None else {"id": name})}
        answer = self.post("/v1/sessions", body)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def say(self, session: str, said: Any, **fields: Any) -> dict[str, Any]:
        """Take a turn and return it."""
        answer = self.post(f"/v1/sessions/{session}/turns", {"input": said, **fields})
        assert answer.status_code == 200, answer.text
        turn: dict[str, Any] = answer.json()
        return turn

    def state(self, session: str) -> dict[str, Any]:
        answer = self.get(f"/v1/sessions/{session}")
        assert answer.status_code == 200, answer.text
        shown: dict[str, Any] = answer.json()
        return shown

    def close_all(self) -> None:
        """Close every session."""
        for session in self.get("/v1/sessions").json()["sessions"]:
            assert self.http.delete(f"/v1/sessions/{session['id']}").status_code == 200

    def held(self) -> dict[str, int]:
        """Units that anybody but the prefix tree holds, by pool and kind; empty when all is as before."""
        memory = self.get("/v1/memory").json()
        assert memory["findings"] == [], memory["findings"]
        held: dict[str, int] = {}
        for pool in memory["pools"]:
            assert sum(pool["holders"].values()) == pool["units"]
            for kind in HELD:
                if pool["holders"][kind]:
                    held[f"{pool['component']} {pool['tier']} {kind}"] = pool["holders"][kind]
        return held

    def settle(self, expected: dict[str, int] | None = None) -> None:
        """Wait until the pools are as expected: what ends does so within a step or two."""
        wanted = expected if expected is not None else {}
        deadline = time.monotonic() + 20
        while self.held() != wanted:
            assert time.monotonic() < deadline, f"still held: {self.held()}, not {wanted}"
            time.sleep(0.02)

    def check_clean(self) -> None:
        """Nothing is held, nothing was found, the process lives."""
        assert self.process.poll() is None, "\n".join(["the server ended:", *self.lines])
        self.close_all()
        self.post("/flush_cache")  # Conversations that were sent whole have sessions of their own.
        self.settle()

    # --- the process ------------------------------------------------------------------------------

    def children(self, module: str) -> list[int]:
        """The server's own processes that run a module."""
        found = {
            int(child)
            for task in Path(f"/proc/{self.process.pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        }
        return sorted(child for child in found if module in _command(child))

    def engine_pid(self) -> int:
        """The engine's process."""
        (engine,) = self.children("holdfast.server.link.worker")
        return engine

    def kill_engine(self, number: int = signal.SIGKILL) -> None:
        """Kill the engine's process, and wait until the server has noticed."""
        before = self.engine_pid()
        os.kill(before, number)
        deadline = time.monotonic() + 60
        while self.get("/health/ready").status_code == 200:
            assert time.monotonic() < deadline, "nobody noticed"
            time.sleep(0.01)

    def wait_ready(self, seconds: float = 60) -> None:
        """Wait until turns are taken."""
        deadline = time.monotonic() + seconds
        while self.get("/health/ready").status_code != 200:
            assert time.monotonic() < deadline, "the engine did not come back"
            time.sleep(0.05)

    def complaints(self) -> list[str]:
        """Lines of its log that say that something went wrong inside."""
        return [
            line for line in self.lines if "Traceback" in line or re.match(r"[\d:]+ (ERROR|CRITICAL)", line)
        ]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Ask the server to end, and return its exit status."""
        self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            status = self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status
