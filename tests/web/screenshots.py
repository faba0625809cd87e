"""Pictures of the page and of the terminal, from a real server with the embedded model: `make screenshots`.

    python -m tests.web.screenshots [FOLDER]

A person's way through the page: an answer is cut and continued, a message is edited in a fork, other sessions
talk, and the memory, the tree and the figures are looked at. Words and figures differ from run to run.
"""

import html
import os
import re
import shutil
import sys
from pathlib import Path

from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.preloaded import commands
from tests.server.serving import Server

IMAGES = Path(__file__).parents[2] / "docs" / "images"
SIZE = {"width": 1280, "height": 800}
ARGUMENTS = ("--kv-tokens", "4096", "--context-length", "2048", "--host-memory", "96MiB", "--storm")
"""Little memory: sessions are spilled while the pictures are taken."""
PATIENCE_MS = 240_000
TERMINAL = """<meta charset="utf-8"><style>
body { margin: 0; background: #0c1113; color: #e9efee; }
pre { margin: 0; padding: 28px 32px; font: 15px/1.2 "DejaVu Sans Mono", monospace; width: max-content; }
b { color: #5ad1c1; font-weight: 600; }
</style><pre>%s</pre>"""


def ended(page: Page, count: int) -> None:
    expect(page.locator(".turn[data-state=done], .turn[data-state=cut]")).to_have_count(
        count, timeout=PATIENCE_MS
    )


def say(page: Page, text: str, count: int) -> None:
    page.fill("#said", text)
    page.press("#said", "Enter")
    ended(page, count)


def talk(page: Page, folder: Path) -> None:
    """An answer is cut at a word, the next one goes on, and another question is typed."""
    page.click("#settings-open")
    page.fill("#limit", "200")
    page.fill("#seed", "7")
    page.keyboard.press("Escape")
    say(page, "Write a Python function that reverses a list. Answer with a code block.", 1)
    page.fill("#said", "Tell me a story about a lighthouse.")
    page.press("#said", "Enter")
    expect(page.locator(".turn[data-state=speaking] .answer")).to_have_text(
        re.compile(r"(\S+\s+){22}"), timeout=PATIENCE_MS
    )
    page.press("#said", "Escape")
    expect(page.locator(".note")).to_be_visible(timeout=PATIENCE_MS)
    page.locator("#said").press_sequentially("Go on, but let the keeper of the lighthouse ", delay=20)
    expect(page.locator("#ahead")).to_contain_text("listening", timeout=PATIENCE_MS)
    page.mouse.move(5, 400)
    page.wait_for_timeout(1500)
    page.screenshot(path=folder / "page-talk.png")
    page.fill("#said", "")


def branch(page: Page, folder: Path) -> None:
    """A message is edited, and both answers stand beside each other."""
    say(page, "How does it end?", 3)
    page.locator(".turn").nth(1).get_by_text("Edit", exact=True).click()
    page.fill(".editor textarea", "Write a haiku about the sea.")
    page.keyboard.press("Enter")
    ended(page, 2)
    say(page, "And one about the wind.", 3)
    page.click("#tab-timeline")
    nodes = page.locator(".node")
    expect(nodes).to_have_count(5)
    nodes.nth(1).hover()
    page.mouse.down()
    nodes.nth(3).hover()
    page.mouse.up()
    expect(page.locator("#compare .answer")).to_have_count(2)
    page.screenshot(path=folder / "page-timeline.png")


def crowd(server: Server, page: Page, folder: Path) -> None:
    """Other sessions talk, are cut and spilled; the map is looked at now and in light."""
    assert server.post("/v1/storm", {"sessions": 40, "seconds": 40}).status_code == 202
    page.click("#tab-memory")
    page.wait_for_timeout(25_000)
    page.screenshot(path=folder / "page-memory.png")
    page.click("#tab-health")
    page.wait_for_timeout(3000)
    page.screenshot(path=folder / "page-health.png")
    page.click("#tab-memory")
    page.locator("#arrange").get_by_text("Session").click()
    page.locator("#holders button").first.click()
    page.click("#look")
    page.click("#look")
    page.wait_for_timeout(1500)
    page.screenshot(path=folder / "page-memory-light.png")


def terminal(server: Server, browser: Browser, folder: Path) -> None:
    """What commands say of the same sessions."""
    shown = []
    for words in (["sessions", "ls", "--url", server.url], ["top", "--once", "--url", server.url]):
        said = commands.run(*words, text=True, env={**os.environ, "COLUMNS": "104"})
        assert said.returncode == 0, said.stderr
        asked = "holdfast " + " ".join(words).replace(server.url, "127.0.0.1:8000")
        shown.append(
            f"<b>$</b> {html.escape(asked)}\n{html.escape(said.stdout.rstrip().replace(server.url, 'http://127.0.0.1:8000'))}"
        )
    page = browser.new_page(viewport=SIZE)
    page.set_content(TERMINAL % "\n\n".join(shown))
    page.locator("pre").screenshot(path=folder / "terminal.png")


def main(folder: Path) -> None:
    """Make all pictures."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        sys.exit("there is no chromium on this machine")
    folder.mkdir(parents=True, exist_ok=True)
    server = Server("smollm2", *ARGUMENTS)
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=found, args=["--no-sandbox", "--disable-gpu"]
            )
            page = browser.new_page(viewport=SIZE, color_scheme="dark")
            page.goto(server.url)
            expect(page.locator("#status")).to_have_text("Connected")
            talk(page, folder)
            branch(page, folder)
            terminal(server, browser, folder)
            crowd(server, page, folder)
            browser.close()
    finally:
        server.stop()
    print(f"pictures in {folder}: {', '.join(sorted(each.name for each in folder.glob('*.png')))}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES)
