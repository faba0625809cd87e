"""The live map: pictures of who holds what, their differences, and what each caller may know."""

import contextlib
import json
import os
import signal
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from prometheus_client import Histogram
from websockets.sync.client import connect

from holdfast.core.ledger import Kind
from holdfast.server.http.keys import Caller
from holdfast.server.telemetry.figures import buckets_of, quantile
from holdfast.server.telemetry.live import OTHERS, Picture, difference, seen_by, shown_holders
from tests.server.conftest import Serve
from tests.server.serving import Server


class Onlooker:
    """A client of `/v1/memory/live` that keeps the map as a page does."""

    def __init__(self, server: Server, stack: contextlib.ExitStack, **options: Any) -> None:
        url = server.url.replace("http://", "ws://") + "/v1/memory/live"
        self.connection = stack.enter_context(connect(url, **options))
        self.pools: list[dict[str, Any]] = []
        self.cells: list[list[int]] = []
        self.holders: dict[int, list[Any]] = {}
        self.seen: list[dict[str, Any]] = []
        self.changes = 0

    def look(self) -> str:
        """Take one message; its type, or `changes` for a difference."""
        message = self.connection.recv(timeout=60)
        if isinstance(message, bytes):
            self.changes += 1
            apply(self.cells, message)
            return "changes"
        body = json.loads(message)
        self.seen.append(body)
        if body["type"] == "memory.pools":
            self.pools = body["pools"]
            self.cells = [[0] * pool["units"] for pool in self.pools]
            self.holders = {}
        elif body["type"] == "memory.holders":
            for number in body["gone"]:
                del self.holders[number]
            self.holders.update({number: rest for number, *rest in body["come"]})
        return str(body["type"])

    def until(self, kind: str) -> dict[str, Any]:
        while self.look() != kind:
            pass
        return self.seen[-1] if kind != "changes" else {}

    def counts(self) -> list[dict[str, int]]:
        """Units by kind of each pool, counted from the map."""
        counted = []
        for cells in self.cells:
            kinds = dict.fromkeys((kind.name for kind in Kind), 0)
            for number in cells:
                # Between the news that a holder is gone and the difference, its units are nobody's.
                kind = number if number < len(Kind) else self.holders.get(number, [None])[0]
                if kind is not None:
                    kinds[Kind(kind).name] += 1
            counted.append(kinds)
        return counted

    def until_it_shows(self, server: Server) -> None:
        """Look on until the map is the ledger, which may still move after an answer."""
        for _ in range(200):
            if self.counts() == ledger(server):
                return
            self.look()
        raise AssertionError((self.counts(), ledger(server)))


def apply(cells: list[list[int]], message: bytes) -> None:
    numbers = np.frombuffer(message, dtype="<u4").tolist()
    place = 1
    while place < len(numbers):
        pool, runs = numbers[place : place + 2]
        place += 2
        for start, length, holder in np.reshape(numbers[place : place + 3 * runs], (runs, 3)).tolist():
            cells[pool][start : start + length] = [holder] * length
        place += 3 * runs


def ledger(server: Server) -> list[dict[str, int]]:
    return [pool["holders"] for pool in server.get("/v1/memory").json()["pools"]]


def test_the_map_is_the_ledger_s_and_follows_it(echo: Server) -> None:
    with contextlib.ExitStack() as stack:
        viewer = Onlooker(echo, stack)
        viewer.until("changes")
        assert [pool["component"] for pool in viewer.pools] == ["full"]
        viewer.until_it_shows(echo)
        names = [echo.open(f"seen-{number}") for number in range(5)]
        for name in names:
            echo.say(name, name * 100)
            viewer.until_it_shows(echo)
        shown = {holder[1] for holder in viewer.holders.values()}
        assert shown == set(names)
        echo.close_all()
        viewer.until_it_shows(echo)
        assert viewer.holders == {}
        assert viewer.until("memory.report")["findings"] == []
        assert viewer.until("health")["storm"]["allowed"] is False


def test_one_may_ask_what_a_session_shares(echo: Server) -> None:
    with contextlib.ExitStack() as stack:
        viewer = Onlooker(echo, stack)
        viewer.until("changes")
        name = echo.open("sharing")
        echo.say(name, "s" * 600)
        viewer.until_it_shows(echo)
        viewer.connection.send(json.dumps({"type": "look", "session": name}))
        shared = viewer.until("memory.leased")["units"]["0"]
        assert len(shared) == echo.state(name)["memory"]["leased"]["full"] > 0
        assert {viewer.cells[0][unit] for unit in shared} == {int(Kind.TREE)}
        viewer.connection.send(json.dumps({"type": "look", "session": "nobody"}))
        while viewer.until("memory.leased")["session"] != "nobody":
            pass
        assert viewer.seen[-1]["units"] == {}
        for wrong in ("", "[]", '{"type": "look", "session": 7}', '{"type": "listen"}'):
            viewer.connection.send(wrong)
            assert viewer.until("error")["error"]["type"] == "invalid_request_error"


def test_where_nothing_happens_nothing_is_sent_but_reports(echo: Server) -> None:
    with contextlib.ExitStack() as stack:
        viewer = Onlooker(echo, stack)
        viewer.until("memory.report")
        viewer.until("memory.report")
        changes = viewer.changes
        kinds = {viewer.look() for _ in range(6)}
        assert kinds == {"memory.report", "health"}
        assert viewer.changes == changes


def test_another_engine_begins_another_map(serve: Serve) -> None:
    server = serve("echo", "--kv-tokens", "65536")
    with contextlib.ExitStack() as stack:
        viewer = Onlooker(server, stack)
        viewer.until("changes")
        server.say(server.open("lost"), "x" * 500)
        viewer.until_it_shows(server)
        os.kill(server.engine_pid(), signal.SIGKILL)
        while viewer.until("engine")["up"]:
            pass
        assert viewer.until("engine")["up"]
        viewer.until("memory.pools")
        viewer.until("changes")
        viewer.until_it_shows(server)


def test_a_tenant_sees_its_own_names_and_no_figures(serve: Serve) -> None:
    environment = {"HOLDFAST_API_KEYS": "ann:secret-a,bob:secret-b", "HOLDFAST_ADMIN_KEY": "boss"}
    server = serve("echo", "--kv-tokens", "65536", environment=environment)
    for tenant, key in (("ann", "secret-a"), ("bob", "secret-b")):
        headers = {"Authorization": f"Bearer {key}"}
        assert server.post("/v1/sessions", {"id": f"of-{tenant}"}, headers=headers).status_code == 201
        turn = server.post(f"/v1/sessions/of-{tenant}/turns", {"input": "z" * 400}, headers=headers)
        assert turn.status_code == 200
    with contextlib.ExitStack() as stack:
        seen = {}
        for key in ("secret-a", "boss"):
            viewer = Onlooker(server, stack, additional_headers={"Authorization": f"Bearer {key}"})
            viewer.until("changes")
            viewer.until("memory.report")
            viewer.until("memory.report")
            seen[key] = sorted(holder[1] for holder in viewer.holders.values())
            told = {message["type"] for message in viewer.seen}
            assert ("health" in told) is (key == "boss")
        assert seen == {"secret-a": ["of-ann"], "boss": ["ann/of-ann", "bob/of-bob"]}


def picture(step: int, *pools: list[int]) -> Picture:
    return Picture(
        0,
        step,
        tuple(("full", "device", len(cells)) for cells in pools),
        tuple(np.array(cells, dtype=np.uint16) for cells in pools),
        {},
    )


def test_differences_are_runs_and_add_up() -> None:
    chance = np.random.default_rng(7)
    before = None
    cells = [[0] * 400, [0] * 30]
    for step in range(1, 40):
        pools = [chance.integers(0, 3, 400).repeat(1 + step % 9)[:400].tolist(), [step % 2] * 30]
        after = picture(step, *pools)
        apply(cells, difference(before, after))
        assert cells == pools
        before = after
    assert before is not None
    assert difference(before, before) == np.array([before.step], dtype="<u4").tobytes()
    whole = difference(picture(0, [0] * 100_000), picture(1, [9] * 100_000))
    assert len(whole) == 4 * (1 + 2 + 3), "one run"


SIZE = 64
HOLDERS = {8: (3, "ann/a", ""), 9: (2, "bob/b", "t"), 10: (1, "ann", ""), 11: (1, "bob", "")}


def map_of(*held: tuple[int, int, int]) -> Picture:
    """A picture of one pool with (first unit, last unit, number) held."""
    cells = [0] * SIZE
    for first, last, number in held:
        cells[first : last + 1] = [number] * (last + 1 - first)
    return replace(picture(1, cells), holders=HOLDERS)


def test_a_tenant_s_map_has_its_own_units_and_a_coarse_rest() -> None:
    whole = map_of((5, 9, 9), (20, 22, 8), (30, 30, 10), (40, 44, 11), (50, 51, int(Kind.RETIRING)))
    ann = Caller("ann", admin=False)
    seen = seen_by(whole, ann)
    others = 8  # Ten of 64, rounded down to a sixteenth of the pool.
    assert seen.cells[0].tolist() == [8] * 3 + [int(Kind.TREE)] + [OTHERS] * others + [0] * (
        SIZE - 4 - others
    )
    assert seen.holders == {8: (3, "ann/a", ""), OTHERS: (3, "", "")}
    assert [seen.place_of(0, unit) for unit in (20, 22, 30, 5, 0)] == [0, 2, 3, None, None]
    admin = seen_by(whole, Caller("ann", admin=True))
    assert admin.place_of(0, 5) == 5 and admin.cells[0][30] == admin.cells[0][40] == Kind.TREE
    assert set(admin.holders) == {8, 9}


def test_no_map_of_a_tenant_tells_where_or_how_much_others_hold() -> None:
    """Totals of others within a sixteenth look the same, wherever units lie and whatever the tenant holds."""
    nobody, ann = Caller("carl", admin=False), Caller("ann", admin=False)
    for count in range(16, 20):
        for first in (0, 7, SIZE - count):
            seen = seen_by(map_of((first, first + count - 1, 9)), nobody)
            assert seen.cells[0].tolist() == [OTHERS] * 16 + [0] * (SIZE - 16)
    for own in range(8):
        for count in range(16, 20):
            seen = seen_by(map_of((0, count - 1, 9), (30, 29 + own, 8)), ann)
            assert np.count_nonzero(seen.cells[0] == OTHERS) == 16
    assert OTHERS not in seen_by(map_of((0, 2, 9)), nobody).holders


def test_names_are_hidden_by_tenant() -> None:
    holders = {8: (3, "ann/a", ""), 9: (2, "bob/b", "t"), 10: (3, "ann#rid", "")}
    assert shown_holders(holders, Caller("ann", admin=False)) == {
        8: [3, "a", ""],
        9: [2, "", ""],
        10: [3, "rid", ""],
    }
    assert shown_holders(holders, Caller("ann", admin=True))[9] == [2, "bob/b", "t"]


@pytest.mark.parametrize(("part", "expected"), [(0.5, 0.5), (0.95, 0.95), (1.0, 1.0)])
def test_quantiles_are_read_off_buckets(part: float, expected: float) -> None:
    histogram = Histogram("values", "Values.", buckets=(1.0, 2.0), registry=None)
    assert quantile(buckets_of(histogram), part) is None
    for _ in range(100):
        histogram.observe(0.3)
    assert quantile(buckets_of(histogram), part) == pytest.approx(expected)
    for _ in range(900):
        histogram.observe(5.0)
    assert quantile(buckets_of(histogram), 0.9) == 2.0
