"""Clients that mind their own business while somebody else attacks, and the watch that is kept over a server.

A neighbour takes a turn on a session of its own, rewinds, and takes it again: every answer must be token by
token the one that it got before the attack. `Watch` starts neighbours, runs an attack, and sees that all of
them get tokens meanwhile; afterwards it looks at the engine's process, memory, descriptors and the log.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import httpx

from tests.hostile import demands
from tests.hostile.raw import family_of
from tests.plain import NO_TLS
from tests.server.serving import Server

T = TypeVar("T")

TURN_TOKENS = 200


class Stopped(Exception):
    """The neighbour was told to go."""


class Neighbour:
    """One client in a thread of its own."""

    def __init__(self, server: Server, name: str, headers: dict[str, str] | None = None) -> None:
        self.server = server
        self.name = name
        self.tokens = 0
        self.turns = 0
        self.problem: str | None = None
        self._expected: list[int] = []
        self._leaving = threading.Event()
        self._news = threading.Condition()
        self._http = httpx.Client(
            base_url=server.url,
            timeout=demands.ANSWER_SECONDS,
            headers=headers,
            trust_env=False,
            verify=NO_TLS,
        )
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Take a first turn, which says what all others must be, and go on from there."""
        answer = self._http.post("/v1/sessions", json={"id": self.name})
        assert answer.status_code == 201, answer.text
        self._expected = self._turn()
        assert len(self._expected) == TURN_TOKENS
        self._thread.start()

    def more(self, count: int) -> None:
        """Wait until the neighbour has got so many more tokens."""
        wanted = self.tokens + count
        with self._news:
            came = self._news.wait_for(
                lambda: self.tokens >= wanted or self.problem is not None, demands.STANDSTILL_SECONDS
            )
        assert self.problem is None, f"{self.name}: {self.problem}"
        assert came, f"{self.name} stands still: {self.tokens - wanted + count} of {count} tokens came"

    def leave(self) -> None:
        """End after the turn that is under way, which must still be right."""
        self._leaving.set()
        self._thread.join(demands.ANSWER_SECONDS)
        alive = self._thread.is_alive()
        self._http.close()
        assert not alive, f"{self.name} never got the end of its turn"
        assert self.problem is None, f"{self.name}: {self.problem}"

    def _run(self) -> None:
        try:
            while not self._leaving.is_set():
                answer = self._http.post(f"/v1/sessions/{self.name}/rewind", json={"to_turn": 0})
                assert answer.status_code == 200, answer.text
                said = self._turn()
                assert said == self._expected, f"turn {self.turns} is another than before the attack"
                self.turns += 1
        except (AssertionError, httpx.HTTPError, ValueError, KeyError) as error:
            with self._news:
                self.problem = f"{type(error).__name__}: {error}"
                self._news.notify_all()

    def _turn(self) -> list[int]:
        """One turn, streamed."""
        said: list[int] = []
        sampling = {"max_tokens": TURN_TOKENS, "ignore_eos": True, "temperature": 0}
        mine = [65 + byte % 60 for byte in self.name.encode()]
        body = {"input": mine, "stream": True, "sampling": sampling}
        with self._http.stream("POST", f"/v1/sessions/{self.name}/turns", json=body) as response:
            if response.status_code != 200:
                raise AssertionError(f"{response.status_code}: {response.read().decode()}")
            kind = ""
            for line in response.iter_lines():
                if line.startswith("event: "):
                    kind = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    self._heard(kind, json.loads(line.removeprefix("data: ")), said)
        return said

    def _heard(self, kind: str, event: dict[str, Any], said: list[int]) -> None:
        if kind == "delta":
            said += event["token_ids"]
            with self._news:
                self.tokens += len(event["token_ids"])
                self._news.notify_all()
        else:
            assert kind == "done", event
            assert event["token_ids"] == said, "the end of the turn is not what was streamed"


class Watch:
    """Neighbours, and what is known of the server's processes."""

    def __init__(
        self,
        server: Server,
        *,
        neighbours: int = 2,
        growth_bytes: int = demands.GROWTH_BYTES,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.server = server
        self.growth_bytes = growth_bytes
        self.neighbours = [Neighbour(server, f"neighbour-{number}", headers) for number in range(neighbours)]
        self.engine = 0
        self._memory_before = 0
        self._memory_most = 0
        self._descriptors_before = 0

    def __enter__(self) -> Watch:
        for neighbour in self.neighbours:
            neighbour.start()
        for neighbour in self.neighbours:
            neighbour.more(demands.TOKENS_MEANWHILE)
        self.engine = engine_pid(self.server)
        self._memory_before = self._memory_most = resident_bytes(self.server)
        self._descriptors_before = descriptors(self.server)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            for neighbour in self.neighbours:
                neighbour._leaving.set()
            return
        self.go_on()
        self.check()

    def go_on(self) -> None:
        """See that every neighbour gets tokens."""
        for neighbour in self.neighbours:
            neighbour.more(demands.TOKENS_MEANWHILE)
        self._memory_most = max(self._memory_most, resident_bytes(self.server))

    def during(self, attack: Callable[[], T]) -> T:
        """Run an attack, and see that the neighbours go on until it is over; returns what it returns."""
        results: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(attack())
            except BaseException as error:  # noqa: BLE001 - it is raised again, in the test's own thread
                errors.append(error)

        attacker = threading.Thread(target=run, name="attacker", daemon=True)
        attacker.start()
        while attacker.is_alive():
            self.go_on()
        attacker.join()
        if errors:
            raise errors[0]
        return results[0]

    def check(self) -> None:
        """The neighbours' answers are right, and the server is as it was before the attack."""
        for neighbour in self.neighbours:
            neighbour.leave()
        assert engine_pid(self.server) == self.engine, "the engine was started again"
        growth = self._memory_most - self._memory_before
        assert growth <= self.growth_bytes, f"the server grew by {growth >> 20} MiB"
        self._wait_descriptors()
        check_clean(self.server)
        assert self.server.complaints() == []

    def _wait_descriptors(self) -> None:
        """Descriptors come back; a connection that was closed may take a moment to be noticed."""
        most = self._descriptors_before + demands.DESCRIPTORS_SLACK
        deadline = time.monotonic() + demands.ANSWER_SECONDS
        while (count := descriptors(self.server)) > most:
            assert time.monotonic() < deadline, f"{count} descriptors are open, {most} may be"
            time.sleep(0.1)


def check_clean(server: Server) -> None:
    """Nothing is held, nothing was found, the process lives; listings may come in pages."""
    while server.get("/v1/sessions").json()["sessions"]:
        server.close_all()
    server.check_clean()


def engine_pid(server: Server) -> int:
    """The engine's process, among those that the server started."""
    found = [pid for pid in family_of(server.process.pid) if "holdfast.server.link.worker" in _command(pid)]
    assert len(found) == 1, f"{len(found)} engines"
    return found[0]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""  # It has just ended.


def resident_bytes(server: Server) -> int:
    """Memory of all of a server's processes; what they share counts once.

    A text process that starts is a fork of hundreds of megabytes (tests/preloaded), nearly all of it shared.
    """
    total = 0
    for pid in family_of(server.process.pid):
        try:
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) << 10
        except (FileNotFoundError, ProcessLookupError):
            continue  # It has just ended.
    return total


def descriptors(server: Server) -> int:
    """Open descriptors of the process that listens."""
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))
