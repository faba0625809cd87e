"""A real Chromium on a real server. Without a Chromium the tests are skipped, except where `CI` is true."""

import os
import shutil
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Page,
    ViewportSize,
    expect,
    sync_playwright,
)

from tests.server.serving import Server

OpenPage = Callable[..., Page]
Serve = Callable[..., Server]

USUAL: ViewportSize = {"width": 1100, "height": 720}

expect.set_options(timeout=30_000)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all tests of a file; as long as it is there, its event loop runs in this thread."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        assert os.environ.get("CI") != "true", "continuous integration installs a Chromium: .ci/run"
        pytest.skip("there is no chromium on this machine")
    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--process-per-site"]
        launched = playwright.chromium.launch(executable_path=found, args=flags)
        yield launched
        launched.close()


class Room:
    """A context whose pages share a process that has read the page once: another takes 1.5 seconds to do so.

    What pages remember is in `sessionStorage`, and so their own, but for the look; that is cleared.
    """

    def __init__(self, browser: Browser, server: Server) -> None:
        self.context = browser.new_context(viewport=USUAL)
        self._anchor = self.context.new_page()
        self._anchor.goto(f"{server.url}/icon.svg")
        self._session = self.context.new_cdp_session(self._anchor)

    def clear(self, origin: str) -> None:
        """Close its pages, and forget what one of them has left."""
        for page in self.context.pages:
            if page is not self._anchor:
                page.close()
        self.context.clear_permissions()
        self.context.clear_cookies()
        self._session.send("Storage.clearDataForOrigin", {"origin": origin, "storageTypes": "local_storage"})


@pytest.fixture(scope="module")
def room(browser: Browser, shared_server: Server) -> Room:
    return Room(browser, shared_server)


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Server]:
    """A server of the model that says what it was told."""
    server = Server(
        "echo", "--audit", "strict", "--kv-tokens", "65536", "--context-length", "60000", "--storm"
    )
    yield server
    assert server.stop() == 0


@pytest.fixture
def server(shared_server: Server) -> Iterator[Server]:
    """That server, found as it should be after each test."""
    yield shared_server
    shared_server.check_clean()


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start servers of one's own; they end with the test."""
    started: list[Server] = []

    def start(*arguments: str, environment: dict[str, str] | None = None) -> Server:
        started.append(Server("echo", *arguments, environment=environment))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            assert each.stop() == 0


@pytest.fixture
def open_page(browser: Browser, room: Room) -> Iterator[OpenPage]:
    """Open the page of a server. What its console complains of fails the test, but for what is `expected`.

    The first page of a test is in the shared room, unless it has `options`; others have rooms of their own.
    """
    contexts: list[BrowserContext] = []
    complaints: list[str] = []
    shared: list[Server] = []

    def open_one(
        server: Server, path: str = "/", *, expected: tuple[str, ...] = (), **options: object
    ) -> Page:
        if shared or options:
            contexts.append(browser.new_context(**{"viewport": USUAL, **options}))  # type: ignore[arg-type]
            page = contexts[-1].new_page()
        else:
            shared.append(server)
            page = room.context.new_page()
        page.set_default_timeout(30_000)

        def heard(message: ConsoleMessage) -> None:
            if message.type in ("error", "warning") and not any(each in message.text for each in expected):
                complaints.append(message.text)

        page.on("console", heard)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(server.url + path)
        return page

    yield open_one
    for context in contexts:
        context.close()
    for server in shared:
        room.clear(server.url)
    assert complaints == []
