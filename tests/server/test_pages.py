"""Listing sessions a page at a time, and what the metrics say of the engine's loop."""

import re

import pytest

from holdfast.server.link import wire
from holdfast.server.seeds import Seeds
from holdfast.server.sessions import SessionRecord, SessionTable, engine_name
from tests.server.conftest import Serve
from tests.server.serving import Server


def add(table: SessionTable, name: str, tenant: str = "ann") -> None:
    view = wire.SessionView(engine_name(tenant, name), 0, None, 0)
    table.add(SessionRecord(tenant, name, view, Seeds(None).of_session(tenant, name)))


def test_pages_list_each_session_once_whatever_comes_and_goes_meanwhile() -> None:
    table = SessionTable()
    for number in range(20):
        add(table, f"s{number}")
        add(table, f"s{number}", "bob")
    seen: list[str] = []
    after: int | None = 0
    while after is not None:
        records, after = table.page("ann", after, 3)
        assert len(records) <= 3
        seen += [record.name for record in records]
        table.remove(engine_name("ann", seen[-1]), "closed")  # Where a page ended may be gone by the next.
        table.remove(engine_name("bob", seen[-1]), "closed")
        add(table, f"new-{len(seen)}")
        add(table, "s19")  # An engine that was started again has it still: it keeps its place.
        if len(seen) > 60:
            raise AssertionError("the list has no end")
        if len(seen) > 24:
            break
    assert seen[:20] == [f"s{number}" for number in range(20)]
    assert len(set(seen)) == len(seen)
    assert table.page("nobody", 0, 3) == ([], None)


def test_counts_follow_openings_in_any_order() -> None:
    table = SessionTable()
    first, second = table.opening("ann", "s"), table.opening("ann", "s")
    assert (table.count("ann"), table.is_taken("ann", "s")) == (1, True)
    add(table, "s")
    assert table.count("ann") == 1
    first()
    table.remove("ann/s", "closed")
    assert (table.count("ann"), table.is_taken("ann", "s")) == (1, True), "the second is being opened still"
    second()
    assert (table.count("ann"), table.is_taken("ann", "s")) == (0, False)


def test_a_list_has_pages_that_follow_one_another(echo: Server) -> None:
    names = [echo.open(f"page-{number}") for number in range(7)]
    listed: list[str] = []
    after = ""
    for _ in range(4):
        answer = echo.get(f"/v1/sessions?limit=2{after}").json()
        listed += [each["id"] for each in answer["sessions"]]
        after = f"&after={answer['next']}"
    assert listed == names and answer["next"] is None
    assert echo.get("/v1/sessions").json()["next"] is None, "all fit into one page"
    echo.close_all()


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=1001", "limit=x", "limit=-1", "after=x", "after=-1", "after=" + "9" * 30]
)
def test_a_page_that_cannot_be_is_refused_by_the_field_s_name(echo: Server, query: str) -> None:
    answer = echo.get(f"/v1/sessions?{query}")
    name, _, value = query.partition("=")
    assert answer.status_code == 400 and answer.json()["error"]["param"] == name
    assert value not in answer.json()["error"]["message"] or value in ("0", "1001", "1")


def test_the_metrics_say_what_held_the_loop(serve: Serve) -> None:
    echo = serve("echo", "--kv-tokens", "16384")

    def counts() -> dict[str, float]:
        page = echo.get("/metrics").text
        found = re.findall(r'^holdfast_loop_held_seconds_count\{work="(\w+)"\} (\S+)$', page, re.MULTILINE)
        return {work: float(count) for work, count in found}

    def until(least: dict[str, float]) -> dict[str, float]:
        for _ in range(2000):
            seen = counts()
            if all(seen.get(work, 0.0) >= count for work, count in least.items()):
                return seen
            echo.get("/health")
        raise AssertionError(f"{counts()}, not {least}")

    names = [echo.open() for _ in range(3)]
    echo.say(names[0], "hello")
    echo.get("/v1/memory")
    more = {"open": 3, "start": 1, "ask": 4, "report": 1, "plan": 1, "journal": 1, "send": 1, "all": 1}
    seen = until(more)
    assert seen["start"] == 1.0, "there was one turn"
    echo.close_all()
