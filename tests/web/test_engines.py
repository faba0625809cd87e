"""Engines apart from the server: the page shows where sessions live, and tells of those that move."""

import re

from playwright.sync_api import expect

from tests.server.apart import Apart, apart, until
from tests.server.serving import Server
from tests.server.shared import Shared
from tests.web.conftest import OpenPage
from tests.web.test_page import finished, say

__all__ = ["apart"]

MOVES = """() => import('/web/engines.js').then(({ moves, shares }) => {
  const before = new Map([["stays", "a"], ["goes", "a"], ["ends", "b"]]);
  const now = new Map([["stays", "a"], ["goes", "b"], ["new", "b"]]);
  const pool = (tier, units, free) => ({ tier, units, holders: { FREE: free } });
  const pools = [pool("host", 10, 5), pool("device", 100, 80), pool("device", 100, 60)];
  return { moves: moves(before, now), shares: shares(pools) };
})"""


def test_sessions_are_shown_where_they_live(apart: Apart, open_page: OpenPage) -> None:
    engines = [apart.engine("--engine-id", name) for name in ("left", "right")]
    server = apart.api(*engines)
    apart.connected(server, 2)
    for name in ("one", "two", "three"):
        assert server.post("/v1/sessions", {"id": name}).status_code == 201
        assert server.post(f"/v1/sessions/{name}/turns", {"input": "some words to hold"}).status_code == 200
    listed = server.get("/v1/sessions").json()["sessions"]
    homes = {each["id"]: each["engine"] for each in listed}
    assert set(homes.values()) == {"left", "right"}, "new sessions go where most is free"

    page = open_page(server, "/#health")
    cards = page.locator("#engine-cards .card")
    expect(cards).to_have_count(2)
    expect(page.locator("#engine-count")).to_have_text("2 engines, 4 sessions")  # The page has one as well.
    for name in ("left", "right"):
        card = page.locator(f'#engine-cards [data-engine="{name}"]')
        expect(card).to_have_attribute("data-state", "up")
        shown = set(card.locator(".names li").all_inner_texts())
        assert shown & homes.keys() == {session for session, home in homes.items() if home == name}
        expect(card.locator("p")).to_have_text(f"{len(shown)} session{'s' if len(shown) > 1 else ''}")
        expect(card.locator("label").first).to_contain_text(re.compile(r"device \d+ %"))

    assert engines[1].stop() == 0
    expect(page.locator('#engine-cards [data-engine="right"]')).to_have_attribute("data-state", "down")
    expect(page.locator('#engine-cards [data-engine="left"]')).to_have_attribute("data-state", "up")


def test_a_session_that_moves_is_seen_to_move(apart: Apart, open_page: OpenPage) -> None:
    """By an operator's hand, and because its engine was killed."""
    shared = Shared(apart, engines=2, apis=1)
    (server,) = shared.apis
    apart.connected(server, 2)
    server.open("wanderer")
    server.say("wanderer", "some words to hold")
    here = shared.of("wanderer")
    page = open_page(server, "/#health", expected=("503",))
    cards = [page.locator(f'#engine-cards [data-engine="e{number}"] .names') for number in (0, 1)]
    expect(cards[here]).to_contain_text("wanderer")
    moved = server.post("/v1/cluster/move", {"session": "wanderer", "engine": f"e{1 - here}"})
    assert moved.status_code == 200, moved.text
    expect(cards[1 - here]).to_contain_text("wanderer")
    expect(cards[here]).not_to_contain_text("wanderer")
    expect(page.locator("#events")).to_contain_text(f"wanderer moved from e{here} to e{1 - here}")

    shared.engines[1 - here].process.kill()
    until(lambda: server.post("/v1/sessions/wanderer/turns", {"input": "on"}).status_code == 200)
    expect(cards[here]).to_contain_text("wanderer")
    expect(page.locator(f'#engine-cards [data-engine="e{1 - here}"]')).to_have_attribute("data-state", "down")


def test_moves_are_found_by_comparison(server: Server, open_page: OpenPage) -> None:
    page = open_page(server)
    assert page.evaluate(MOVES) == {
        "moves": [{"session": "goes", "from": "a", "to": "b"}],
        "shares": [["device", 30], ["host", 50]],
    }


def test_a_server_with_its_own_engine_shows_no_engines(server: Server, open_page: OpenPage) -> None:
    page = open_page(server)
    say(page, "hello")
    finished(page, 1)
    page.click("#tab-health")
    expect(page.locator("#plots .plot").first).to_be_visible()
    expect(page.locator("#engines")).to_be_hidden()
