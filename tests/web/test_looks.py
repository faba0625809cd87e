"""How the page looks: clean to a checker of accessibility, usable on a phone, in light and dark."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.server.serving import Server
from tests.web.conftest import OpenPage, Serve

SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
VIEWS = ("talk", "timeline", "memory", "health")

AT_REST = """() => document.getAnimations().every(
    (each) => each.playState !== "running" || each.effect.getComputedTiming().endTime === Infinity
)"""
"""Whether nothing fades in any more: half-faded letters have too little contrast."""

SCREENSHOTS = Path(os.environ.get("HOLDFAST_SCREENSHOTS", "build/screenshots"))
"""Where pictures of the views are kept."""


def filled(server: Server, open_page: OpenPage, **options: object) -> Page:
    """A page with a conversation, a fork and some memory in use."""
    page = open_page(server, **options)
    for number, text in enumerate(("Tell me of the sea.", "And of the wind?", "Which one holds fast?"), 1):
        page.fill("#said", text)
        page.press("#said", "Enter")
        expect(page.locator(".turn[data-state=done]")).to_have_count(number)
    page.click("#tab-timeline")
    page.locator(".node").nth(1).click()
    page.locator("#turn-card").get_by_text("Fork from here").click()
    expect(page.locator(".lane")).to_have_count(2)
    page.locator(".lane-head").nth(1).click()
    expect(page.locator(".turn")).to_have_count(2)
    page.fill("#said", "What do sailors say?")
    page.press("#said", "Enter")
    expect(page.locator(".turn[data-state=done]")).to_have_count(3)
    for name in ("harbour", "lighthouse", "anchor", "reef", "tide"):
        session = server.open(name)
        server.say(session, name * 150)
    return page


def view(page: Page, name: str) -> None:
    page.click(f"#tab-{name}")
    expect(page.locator(f"#{name}")).to_be_visible()
    if name == "memory":
        expect(page.locator("#holders button")).to_have_count(7)
    if name == "health":
        expect(page.locator(".card")).to_have_count(7)


def clean(page: Page, seen: Callable[[str], object] = str) -> None:
    """Have a checker of accessibility look at the page: contrast, names, roles, order (WCAG AA)."""
    colours = set()
    for scheme in SCHEMES:
        page.emulate_media(color_scheme=scheme)
        colours.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        page.wait_for_function(AT_REST)
        seen(scheme)
        results = Axe().run(page)
        assert results.violations_count == 0, f"{scheme}: {results.generate_report()}"
    assert len(colours) == len(SCHEMES), "the page has the colours of both"


def test_every_view_is_accessible_and_pictured(server: Server, open_page: OpenPage) -> None:
    page = filled(server, open_page)
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    for name in VIEWS:
        view(page, name)
        clean(
            page,
            lambda scheme, name=name: page.screenshot(path=SCREENSHOTS / f"page-{name}-{scheme}.png"),
        )


def test_what_opens_over_the_page_is_accessible(server: Server, open_page: OpenPage) -> None:
    page = open_page(server, reduced_motion="reduce")
    page.fill(
        "#said", "```python\nx = 'a' + f(12)  # why\n```\n\n| a | b |\n|---|---|\n| [1](https://x.org) | 2 |"
    )
    page.press("#said", "Enter")
    expect(page.locator(".turn[data-state=done]")).to_have_count(1)
    clean(page)
    page.get_by_text("Edit", exact=True).click()
    clean(page)
    page.keyboard.press("Escape")
    for key, dialog in (("Alt+s", "settings"), ("?", "help")):
        page.focus("#tab-talk")
        page.keyboard.press(key)
        expect(page.locator(f"#{dialog}")).to_be_visible()
        clean(page)
        page.keyboard.press("Escape")
    page.click("#tab-timeline")
    page.locator(".node").click()
    clean(page)


def test_the_question_for_a_key_is_accessible(serve: Serve, open_page: OpenPage) -> None:
    server = serve("--kv-tokens", "65536", environment={"HOLDFAST_API_KEYS": "ann:the-key"})
    page = open_page(server, expected=("401",))
    expect(page.locator("#key-dialog")).to_be_visible()
    clean(page)


def test_a_phone_shows_every_view_without_scrolling_sideways(server: Server, open_page: OpenPage) -> None:
    page = filled(server, open_page, viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    for name in VIEWS:
        view(page, name)
        wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, f"{name} is {wide} pixels too wide"


def test_a_large_screen_shows_larger_letters_and_nothing_sideways(
    server: Server, open_page: OpenPage
) -> None:
    page = open_page(server, viewport={"width": 3840, "height": 2160})
    assert page.evaluate("parseFloat(getComputedStyle(document.body).fontSize)") > 20
    for name in VIEWS:
        page.click(f"#tab-{name}")
        wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, f"{name} is {wide} pixels too wide"


def test_every_view_can_be_reached_and_used_with_the_keyboard(server: Server, open_page: OpenPage) -> None:
    page = open_page(server)
    expect(page.locator("#said")).to_be_focused()
    page.keyboard.type("by hand")
    page.keyboard.press("Enter")
    expect(page.locator(".turn[data-state=done]")).to_have_count(1)
    page.focus("#tab-talk")
    for name in ("timeline", "memory", "health", "talk"):
        page.keyboard.press("ArrowRight")
        expect(page.locator(f"#tab-{name}")).to_be_focused()
        expect(page.locator(f"#{name}")).to_be_visible()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#tab-timeline")).to_be_focused()
    expect(page.locator(".node")).to_have_count(1)
    for name in ("node", "Fork from here"):
        for _ in range(12):
            page.keyboard.press("Tab")
            at = page.evaluate(
                "document.activeElement.textContent + document.activeElement.getAttribute('class')"
            )
            if name in at:
                break
        page.keyboard.press("Enter")
    expect(page.locator(".lane")).to_have_count(2)
