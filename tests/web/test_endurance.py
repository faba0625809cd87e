"""A page that is left open: what it keeps is bounded, whatever the server does meanwhile."""

import pytest
from playwright.sync_api import Page, expect

from tests.server.serving import Server
from tests.web.conftest import OpenPage, Serve
from tests.web.test_page import finished, say

HEAP_GROWTH_BYTES_MAX = 12 << 20
NODES_GROWTH_MAX = 3000
WIDE = {"width": 1280, "height": 800}
"""Wide enough for the panel beside the conversation."""


class Footprint:
    """What a page keeps, after its garbage was collected."""

    def __init__(self, page: Page) -> None:
        self._session = page.context.new_cdp_session(page)
        self._session.send("Performance.enable")

    def take(self) -> tuple[float, float]:
        """Bytes of the heap, and nodes of documents, those included that nobody shows any more."""
        self._session.send("HeapProfiler.collectGarbage")
        metrics = {
            each["name"]: each["value"] for each in self._session.send("Performance.getMetrics")["metrics"]
        }
        return metrics["JSHeapUsedSize"], metrics["Nodes"]


def watch_a_storm(server: Server, page: Page, seconds: int) -> None:
    """Look at every view while a storm goes on, and see that the page has not grown."""
    say(page, "before the storm")
    finished(page, 1)
    for view in ("timeline", "memory", "health", "talk"):
        page.click(f"#tab-{view}")
    footprint = Footprint(page)
    heap, nodes = footprint.take()
    assert server.post("/v1/storm", {"sessions": 60, "seconds": seconds}).status_code == 202
    rounds = 0
    while server.get("/v1/storm").json()["running"]:
        view = ("memory", "health", "talk", "timeline")[rounds % 4]
        page.click(f"#tab-{view}")
        page.wait_for_timeout(700)
        rounds += 1
    assert server.get("/v1/storm").json()["turns"] > 100
    page.click("#tab-talk")
    expect(page.locator("#glance-held")).to_be_visible()
    assert page.locator("#events li").count() <= 30
    heap_after, nodes_after = footprint.take()
    assert heap_after - heap < HEAP_GROWTH_BYTES_MAX
    assert nodes_after - nodes < NODES_GROWTH_MAX


def test_a_storm_does_not_make_the_page_grow(server: Server, open_page: OpenPage) -> None:
    watch_a_storm(server, open_page(server, viewport=WIDE), 6)


@pytest.mark.soak
def test_a_minute_of_storm_does_not_make_the_page_grow(server: Server, open_page: OpenPage) -> None:
    watch_a_storm(server, open_page(server, viewport=WIDE), 60)


def test_a_map_of_a_hundred_thousand_units_is_drawn_from_differences(
    serve: Serve, open_page: OpenPage
) -> None:
    server = serve("--kv-tokens", "1600000")
    page = open_page(server, "/#memory")
    expect(page.locator("#pool-0 h2")).to_contain_text("of 100000 held")
    received: list[int] = []
    page.on("websocket", lambda socket: socket.on("framereceived", lambda frame: received.append(len(frame))))
    page.reload()
    expect(page.locator("#pool-0 h2")).to_contain_text("of 100000 held")
    received.clear()
    name = server.open("small")
    server.say(name, "x" * 500)
    expect(page.locator("#holders button")).to_have_text(
        f"small · {server.state(name)['memory']['full']['units']}"
    )
    # A picture of all units would be 200 kB; what changed is a few runs.
    assert 0 < max(received) < 20_000
    drawn = page.evaluate("(({ width, height }) => width * height)(document.querySelector('#pool-0 canvas'))")
    assert drawn >= 100_000
