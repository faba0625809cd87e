"""The tree of turns: going back, forking, figures, and the comparison of two branches."""

import re

from playwright.sync_api import Locator, Page, expect

from tests.server.serving import Server
from tests.web.conftest import OpenPage
from tests.web.test_page import expect_answers, finished, say


def talked(page: Page, *texts: str) -> None:
    for number, text in enumerate(texts, 1):
        say(page, text)
        finished(page, number)


def act(page: Page, node: Locator, label: str) -> None:
    """Choose a turn of the tree, and press a button of its card."""
    node.click()
    page.locator("#turn-card").get_by_text(label, exact=True).click()


def width(node: Locator) -> float:
    return float(node.locator(".frame").get_attribute("width") or "0")


def test_rewinding_and_forking(server: Server, open_page: OpenPage) -> None:
    page = open_page(server)
    talked(page, "first", "second", "third")
    page.click("#tab-timeline")
    nodes = page.locator(".node")
    expect(nodes).to_have_count(3)
    act(page, nodes.nth(1), "Fork from here")
    expect(page.locator(".lane")).to_have_count(2)
    # What the fork shares is drawn once: the fork's lane is empty, and hangs on its parent's.
    expect(page.locator("path.stem")).to_have_count(2)
    expect(nodes).to_have_count(3)
    page.locator(".lane-head").first.click()
    expect_answers(page, "first", "second", "third")
    page.click("#tab-timeline")
    act(page, nodes.first, "Rewind to here")
    # The first turn is still both branches' own; the second is the fork's alone now.
    expect(page.locator(".lane").nth(0).locator(".node")).to_have_count(1)
    expect(page.locator(".lane").nth(1).locator(".node")).to_have_count(1)
    page.locator(".lane-head").nth(1).click()
    say(page, "another third")
    finished(page, 3)
    expect_answers(page, "first", "second", "another third")
    turns = sorted(session["turns"] for session in server.get("/v1/sessions").json()["sessions"])
    assert turns == [1, 3]


def test_turns_are_as_wide_as_their_tokens_and_coloured_by_where_they_came_from(
    server: Server, open_page: OpenPage
) -> None:
    page = open_page(server)
    talked(page, "short", "much longer than that " * 12)
    page.click("#tab-timeline")
    first, second = page.locator(".node").nth(0), page.locator(".node").nth(1)
    assert width(second) > 2 * width(first)

    def cached(node: Locator) -> float:
        return float(node.locator(".part-cached").get_attribute("width") or "0") / width(node)

    assert cached(first) < cached(second) < 1
    second.hover()
    known = server.get("/v1/sessions").json()["sessions"][0]["tokens"]["known"]
    expect(page.locator("#tip")).to_have_text(
        re.compile(r"(\d+) tokens found in memory, \d+ computed\n\d+ said, .* a second\nfirst token .* ms")
    )
    numbers = [int(each) for each in re.findall(r"(\d+) (?:tokens|computed|said)", page.inner_text("#tip"))]
    assert sum(numbers) == known
    page.mouse.move(2, 2)
    expect(page.locator("#tip")).to_be_hidden()


def test_dragging_a_turn_onto_another_compares_their_answers(server: Server, open_page: OpenPage) -> None:
    page = open_page(server)
    talked(page, "the same beginning", "one way to go on")
    page.click("#tab-timeline")
    act(page, page.locator(".node").first, "Fork from here")
    page.locator(".lane-head").nth(1).click()
    say(page, "another way to go on")
    finished(page, 2)
    page.click("#tab-timeline")
    nodes = page.locator(".node")
    expect(nodes).to_have_count(3)
    nodes.nth(1).hover()
    page.mouse.down()
    box = nodes.nth(2).bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 10, box["y"] + 10, steps=5)
    expect(page.locator("#tip")).to_have_text("Compare with this")
    page.mouse.up()
    columns = page.locator("#compare .answer")
    expect(columns).to_have_text(["one way to go on", "another way to go on"])
    expect(page.locator("#compare")).to_contain_text("They share 1 turn.")
    page.locator("#compare").get_by_text("Close").click()
    expect(page.locator("#compare")).to_be_hidden()
    # The same with the keyboard: mark one, mark the other.
    nodes.nth(1).click()
    page.keyboard.press("c")
    expect(page.locator(".node[data-marked=yes]")).to_have_count(1)
    page.keyboard.press("ArrowDown")
    page.keyboard.press("c")
    expect(columns).to_have_text(["one way to go on", "another way to go on"])
