"""Figures over time: plots of what the server says of itself, bounded in time."""

import re

from playwright.sync_api import expect

from tests.server.serving import Server
from tests.web.conftest import OpenPage, Serve
from tests.web.test_page import finished, say

HISTORY = """() => import('/web/history.js').then(({ History }) => {
  const history = new History(300);
  for (let second = 0; second < 5000; second++) history.add({ value: second }, second);
  const spans = [history.span];
  const sparse = new History(300);
  for (let second = 0; second < 5000; second += 100) sparse.add({ value: second }, second);
  const young = new History(300);
  young.add({ value: 1 }, 1);
  const [count, first] = [history.points.length, history.points[0].at];
  return { count, first, sparse: sparse.points.length, spans: [...spans, young.span] };
})"""

PLOT = """() => import('/web/plot.js').then(({ Plot, nice }) => {
  const plot = new Plot("Rate", "tokens", [["one", "c1", "one"], ["two", "c2", "two"]]);
  const given = [[0, 10, null], [3, 40, 5], [6, 20, null], [60, 30, null]];
  const points = given.map(([at, one, two]) => ({ at, values: { one, two } }));
  plot.show(points, 60);
  const paths = [...plot.whole.querySelectorAll(".line")].map((each) => each.getAttribute("d"));
  return { paths, top: plot.top.textContent, key: plot.whole.querySelector(".key").textContent,
    label: plot.picture.getAttribute("aria-label"), nice: [0, 3, 41, 100, 0.02].map(nice) };
})"""


def test_no_more_than_five_minutes_are_kept(server: Server, open_page: OpenPage) -> None:
    page = open_page(server)
    kept = page.evaluate(HISTORY)
    assert kept == {"count": 300, "first": 4700, "sparse": 4, "spans": [299, 60]}


def test_a_plot_draws_lines_with_gaps(server: Server, open_page: OpenPage) -> None:
    page = open_page(server)
    drawn = page.evaluate(PLOT)
    assert drawn["paths"][0] == "M0.0 63.1L15.0 16.9L30.0 47.7M300.0 32.3"
    assert drawn["paths"][1].count("M") == 1
    assert "L" not in drawn["paths"][1]
    assert drawn["top"] == "50"
    assert drawn["label"].startswith("Rate, tokens: one 30, two ")
    assert drawn["nice"] == [0, 5, 50, 100, 0.02]


def test_what_is_said_appears_in_the_plots(server: Server, open_page: OpenPage) -> None:
    page = open_page(server)
    say(page, "some words to be counted")
    finished(page, 1)
    page.click("#tab-health")
    expect(page.locator(".plot:visible")).to_have_count(8)
    rate = page.locator("#plots .plot").first
    line = rate.locator(".line").first
    # Points come once a second; the peak of the turn is among them.
    expect(line).to_have_attribute("d", re.compile(r"M[^L]+(L[^L]+){3}"))
    heights = {float(each) for each in re.findall(r" (\d+\.\d)", line.get_attribute("d") or "")}
    assert len(heights) > 1, "the plot shows that something was said"
    box = rate.locator("svg").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] - 2, box["y"] + 10)
    expect(rate.locator(".cursor")).to_have_attribute("visibility", "visible")
    page.mouse.move(2, 2)
    expect(rate.locator(".cursor")).to_have_attribute("visibility", "hidden")


def test_accepted_drafts_are_shown_where_there_are_drafts(serve: Serve, open_page: OpenPage) -> None:
    server = serve("--kv-tokens", "8192", "--speculate", "ngram")
    page = open_page(server)
    say(page, "the same again " * 12)
    finished(page, 1)
    page.click("#tab-health")
    drafts = page.locator("#plots .plot:visible", has_text="Drafts accepted")
    expect(drafts.locator(".line")).to_have_attribute("d", re.compile("M"))
    expect(page.locator(".plot:visible")).to_have_count(9)


def test_a_tenant_sees_the_plots_of_memory_alone(serve: Serve, open_page: OpenPage) -> None:
    server = serve("--kv-tokens", "8192", environment={"HOLDFAST_API_KEYS": "ann:secret-a"})
    page = open_page(server, "/#health", expected=("401",))
    page.fill("#key", "secret-a")
    page.press("#key", "Enter")
    expect(page.locator("#no-figures")).to_be_visible()
    expect(page.locator("#plots .plot:visible figcaption")).to_have_text(
        [re.compile("Memory in use"), re.compile("Audit")]
    )
    expect(page.locator(".card")).to_have_count(0)
