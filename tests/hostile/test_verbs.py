"""Verbs that race: whatever is asked of a session at once, every request has exactly one answer."""

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.hostile import demands
from tests.hostile.conftest import ROOM, Serve
from tests.hostile.neighbours import Watch, engine_pid
from tests.plain import NO_TLS
from tests.server.serving import Server

pytestmark = pytest.mark.soak

LONG = {"max_tokens": 3000, "ignore_eos": True}
SHORT = {"max_tokens": 20, "ignore_eos": True}
NAMES = ("one", "two", "three")

Call = tuple[str, str, dict[str, Any] | None]

VERBS: dict[str, Call] = {
    "turn": ("POST", "/v1/sessions/{name}/turns", {"input": "abc", "sampling": SHORT}),
    "long turn": ("POST", "/v1/sessions/{name}/turns", {"input": "abc", "sampling": LONG}),
    "kept turn": (
        "POST",
        "/v1/sessions/{name}/turns",
        {"input": "abc", "sampling": LONG, "on_abort": "keep"},
    ),
    "named turn": ("POST", "/v1/sessions/{name}/turns", {"input": "abc", "sampling": SHORT, "turn_id": "t"}),
    "chat": (
        "POST",
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "abc"}], "session_id": "{name}", **SHORT},
    ),
    "generate": ("POST", "/generate", {"text": "abc", "rid": "g", "sampling_params": {"max_new_tokens": 50}}),
    "interrupt": ("POST", "/v1/sessions/{name}/interrupt", {"keep": "all"}),
    "cut": ("POST", "/v1/sessions/{name}/interrupt", {"keep_tokens": 3}),
    "take back": ("POST", "/v1/sessions/{name}/interrupt", {"keep": "none"}),
    "rewind": ("POST", "/v1/sessions/{name}/rewind", {"to_turn": 0}),
    "fork": ("POST", "/v1/sessions/{name}/fork", {}),
    "spill": ("POST", "/v1/sessions/{name}/spill", {}),
    "restore": ("POST", "/v1/sessions/{name}/restore", None),
    "abort": ("POST", "/abort_request", {"rid": "g"}),
    "abort all": ("POST", "/abort_request", {"abort_all": True}),
    "flush": ("POST", "/flush_cache", None),
    "close": ("DELETE", "/v1/sessions/{name}", None),
    "open": ("POST", "/v1/sessions", {"id": "{name}"}),
    "look": ("GET", "/v1/sessions/{name}", None),
    "list": ("GET", "/v1/sessions", None),
    "memory": ("GET", "/v1/memory", None),
}
"""What may be asked of a session, or beside it."""


def asked(http: httpx.Client, verb: str, name: str) -> int:
    """The status of one call; an answer that never comes is a failure."""
    method, path, body = VERBS[verb]
    filled = (
        None if body is None else {key: name if value == "{name}" else value for key, value in body.items()}
    )
    if verb == "fork":
        filled = {"id": f"fork-of-{name}"}
    answer = http.request(method, path.format(name=name), json=filled)
    assert answer.status_code < 500 or answer.status_code == 503, (verb, answer.text)
    return answer.status_code


def race(server: Server, verbs: list[list[str]]) -> Counter[tuple[str, int]]:
    """Threads that ask one thing after another, all on the same few sessions."""

    def run(number: int) -> Counter[tuple[str, int]]:
        chance = random.Random(number)
        counted: Counter[tuple[str, int]] = Counter()
        with httpx.Client(base_url=server.url, timeout=demands.ANSWER_SECONDS, verify=NO_TLS) as http:
            for verb in verbs[number]:
                counted[verb, asked(http, verb, chance.choice(NAMES))] += 1
        return counted

    with ThreadPoolExecutor(len(verbs)) as threads:
        return sum(threads.map(run, range(len(verbs))), Counter())


@pytest.mark.parametrize(
    "more", [(), ("--overlap",), ("--host-memory", "64M")], ids=["plain", "overlap", "host"]
)
@pytest.mark.parametrize("model", ["echo", "echo-hybrid"])
def test_every_request_of_a_race_has_one_answer(serve: Serve, model: str, more: tuple[str, ...]) -> None:
    server = serve(model, "--audit", "strict", *ROOM, *more)
    engine = engine_pid(server)
    for name in NAMES:
        server.open(name)
    chance = random.Random(f"{model} {more}")
    verbs = [chance.choices(list(VERBS), k=60) for _ in range(8)]
    answers = race(server, verbs)
    assert sum(answers.values()) == 8 * 60
    assert engine_pid(server) == engine
    server.check_clean()
    assert server.complaints() == []


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "abort all"])
def test_abort_all_leaves_nobody_without_an_answer(verb: str, echo_host: Server) -> None:
    """Calls that may wait for the session's memory or for its turn, and `abort_all` in the midst of them."""
    with (
        ThreadPoolExecutor(8) as threads,
        httpx.Client(base_url=echo_host.url, timeout=demands.ANSWER_SECONDS, verify=NO_TLS) as http,
    ):
        asked(http, "open", "one")
        for _ in range(6):
            asked(http, "turn", "one")
            asked(http, "spill", "one")
            calls = [threads.submit(asked, http, call, "one") for call in ("turn", verb, "long turn", verb)]
            calls += [threads.submit(asked, http, "abort all", "one") for _ in range(3)]
            for call in calls:
                assert call.result(demands.ANSWER_SECONDS) in (200, 201, 400, 404, 409, 410, 503)
            asked(http, "abort all", "one")
            asked(http, "open", "one")


@pytest.fixture(scope="module")
def echo_host() -> Any:
    """A server with memory on the host, so that sessions can be away."""
    server = Server("echo", *ROOM, "--audit", "strict", "--host-memory", "64M")
    yield server
    server.check_clean()
    assert server.stop() == 0
    assert server.complaints() == []


def test_the_same_turn_at_once_is_carried_out_once(serve: Serve, tmp_path: Path) -> None:
    """Eight clients say the same turn; nobody hears that the journal cannot be written."""
    server = serve(
        "echo", *ROOM, "--journal", str(tmp_path / "journal.db"), "--durability", "fsync", "--audit", "strict"
    )
    server.open("one")
    for number in range(40):
        barrier = threading.Barrier(8)

        def say(turn: str, barrier: threading.Barrier = barrier) -> httpx.Response:
            with httpx.Client(base_url=server.url, timeout=demands.ANSWER_SECONDS, verify=NO_TLS) as http:
                barrier.wait()
                body = {"input": f"word {turn}", "turn_id": turn}
                return http.post("/v1/sessions/one/turns", json=body)

        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(say, [f"t-{number}"] * 8))
        done = [answer for answer in answers if answer.status_code == 200]
        assert all(answer.status_code in (200, 409) for answer in answers), [each.text for each in answers]
        assert done
        assert {tuple(answer.json()["token_ids"]) for answer in done} == {tuple(done[0].json()["token_ids"])}
        assert server.state("one")["turns"] == number + 1
    server.check_clean()


def test_a_rewind_that_changes_nothing_leaves_the_last_turn_as_it_was(echo: Server) -> None:
    """A client may still cut into a turn that has just ended."""
    for rewinds in (0, 1, 2):
        name = echo.open()
        echo.say(name, "first words", turn_id="a")
        whole = echo.say(name, "abcdefgh", turn_id="b")
        known = echo.state(name)["tokens"]["known"]
        for _ in range(rewinds):
            answer = echo.post(f"/v1/sessions/{name}/rewind", {"to_turn": 2})
            assert answer.status_code == 200
        cut = echo.post(f"/v1/sessions/{name}/interrupt", {"turn_id": "b", "keep_tokens": 3})
        assert cut.status_code == 200, cut.text
        dropped = whole["usage"]["completion_tokens"] - 3
        assert cut.json()["tokens"]["known"] == known - dropped


def test_listings_do_not_hold_up_the_model(echo: Server) -> None:
    """Thousands of sessions, and clients that list them without end: each answer costs its own time only."""
    sessions, listings, clients = 2000, 160, 8

    def fill() -> None:
        with httpx.Client(base_url=echo.url, timeout=demands.ANSWER_SECONDS, verify=NO_TLS) as http:
            for number in range(sessions):
                assert http.post("/v1/sessions", json={"id": f"idle-{number}"}).status_code == 201

    def attack() -> int:
        def ask_again(number: int) -> int:
            with httpx.Client(base_url=echo.url, timeout=demands.ANSWER_SECONDS, verify=NO_TLS) as http:
                for _ in range(listings // clients):
                    path = "/v1/sessions" if number % 2 else "/v1/memory"
                    assert http.get(path).status_code == 200
            return listings // clients

        with ThreadPoolExecutor(clients) as threads:
            return sum(threads.map(ask_again, range(clients)))

    with Watch(echo, neighbours=1) as watch:
        fill()
        before = watch.neighbours[0].tokens
        answered = watch.during(attack)
        said = watch.neighbours[0].tokens - before
        assert said >= answered // 2, f"{said} tokens while {answered} lists were answered"
