"""Engines that share a journal in PostgreSQL, API processes on them, and clients that count every answer."""

import threading
import time
from collections.abc import Sequence
from itertools import count, cycle
from pathlib import Path
from typing import Any

import httpx

from holdfast.engine.durable.stores import read_sessions
from tests.databases import shared_cluster
from tests.plain import NO_TLS
from tests.server.apart import SMALL, Apart, EngineProcess
from tests.server.serving import Server

__all__ = ["Shared", "Talker", "folder", "stored_turns", "talk_all"]

RETRIED = (409, 429, 503)
SECONDS = 60.0
"""How long a client repeats a request."""


class Shared:
    """Three engines and two API processes on one database, by default."""

    def __init__(
        self, apart: Apart, *more: str, engines: int = 3, apis: int = 2, url: str | None = None, **given: Any
    ) -> None:
        self.apart = apart
        self.url = url or shared_cluster().url(shared_cluster().new_database())
        self._more = more
        self._given = given
        self._names = count()
        self.engines = [self.engine() for _ in range(engines)]
        links = ("--link-seconds", "2")
        self.apis = [apart.api(*self.engines, arguments=links) for _ in range(apis)]

    def engine(self, name: str | None = None, listen: str = "127.0.0.1:0", *more: str) -> EngineProcess:
        """One more engine, or one that was killed."""
        name = name or f"e{next(self._names)}"
        arguments = ("--engine-id", name, "--journal", self.url, "--link-seconds", "2", *SMALL)
        return self.apart.engine(*arguments, *self._more, *more, listen=listen, **self._given)

    def of(self, session: str, api: int = 0) -> int:
        """The number of the engine that has a session."""
        return int(self.apis[api].state(session)["engine"].removeprefix("e"))


class Talker:
    """A client of one session: it repeats each turn until it is acknowledged, through any API process."""

    def __init__(self, apis: Sequence[Server], session: str) -> None:
        self.session = session
        self.acknowledged: list[str] = []
        self._apis = cycle([httpx.Client(base_url=api.url, timeout=20, verify=NO_TLS) for api in apis])

    def open(self) -> None:
        """Open the session; a repeat may find it."""
        answer = self._repeat("/v1/sessions", {"id": self.session}, (201, 409))
        assert answer.status_code == 201 or answer.json()["error"]["code"] == "session_exists", answer.text

    def say(self, number: int) -> None:
        """Take one turn to its acknowledged end."""
        name = f"t{number}"
        body = {"input": f"{self.session} {name}", "turn_id": name}
        answer = self._repeat(f"/v1/sessions/{self.session}/turns", body, (200,)).json()
        assert answer["text"] == f"{self.session} {name}", answer
        self.acknowledged.append(name)

    def _repeat(self, path: str, body: dict[str, Any], wanted: Sequence[int]) -> httpx.Response:
        deadline = time.monotonic() + SECONDS
        seen: list[str] = []
        while time.monotonic() < deadline:
            try:
                answer = next(self._apis).post(path, json=body)
            except httpx.TransportError as error:
                seen.append(repr(error))
            else:
                if answer.status_code in wanted:
                    return answer
                assert answer.status_code in RETRIED, answer.text
                seen.append(answer.text)
            time.sleep(0.02)
        raise AssertionError(f"{path} {body}: no answer: {seen[-5:]}")

    def check(self) -> None:
        """The session has the acknowledged turns, each once and in order, whoever is asked."""
        deadline = time.monotonic() + SECONDS
        while True:
            assert time.monotonic() < deadline, self.session
            try:
                answer = next(self._apis).get(f"/v1/sessions/{self.session}")
            except httpx.TransportError:
                continue
            if answer.status_code == 200:
                break
            assert answer.status_code == 503, answer.text
            time.sleep(0.05)
        assert answer.json()["turns"] == len(self.acknowledged), (answer.json(), self.acknowledged)


def talk_all(talkers: Sequence[Talker], turns: int, first: int = 0) -> list[threading.Thread]:
    """Let all clients talk, each in a thread; join them with `ended`."""

    def talk(talker: Talker) -> None:
        for number in range(first, first + turns):
            talker.say(number)

    threads = [threading.Thread(target=talk, args=(talker,)) for talker in talkers]
    for thread in threads:
        thread.start()
    return threads


def stored_turns(url: str) -> dict[str, list[str]]:
    """The turn ids of every session in the journal, in order."""
    return {
        stored.id.rpartition("/")[2]: [turn.turn_id for turn in stored.turns] for stored in read_sessions(url)
    }


def folder(path: Path) -> str:
    """A directory for an engine's disk tier."""
    path.mkdir(parents=True, exist_ok=True)
    return str(path)
