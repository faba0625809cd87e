"""The cost of the live memory map for the server, and the load time of the page.

    python -m holdfast.bench.server.page_map [--units 100000] [--seconds 10] [--json]

Starts a server of the echo model with a pool of `--units` pages, fills most of it with sessions, and watches
it over `/v1/memory/live`. `map_idle` and `map_busy` are the cores that the server's processes use for it:
without running turns, and while sessions run and are interrupted. `page_load` is the time from the request to
the connected page in a Chromium, if one and Playwright are installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import threading
import time
from importlib import import_module
from statistics import median
from types import TracebackType

import httpx
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from holdfast.bench.machine import processor_seconds
from holdfast.bench.served import ServerProcess

PAGE_LOADS = 5
PAGE_TOKENS = 16
SESSION_TOKENS = 16_000
SESSION_UNITS = SESSION_TOKENS // PAGE_TOKENS


class FilledServer:
    """A server whose pool is filled with sessions."""

    def __init__(self, units: int) -> None:
        sizes = (
            "--kv-tokens",
            str(units * PAGE_TOKENS),
            "--max-sessions",
            "20000",
            "--tenant-sessions",
            "100000",
        )
        self._server = ServerProcess("echo", *sizes, "--storm")
        self.url = self._server.url
        self.http = httpx.Client(base_url=self.url, timeout=120)

    def __enter__(self) -> FilledServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.http.close()
        self._server.stop()

    def fill(self, units: int) -> int:
        """Open sessions with long histories until most units are held; returns how many."""
        sessions = 0
        while self.held() < min(0.85 * units, units - 2 * SESSION_UNITS):
            self.http.post("/v1/sessions", json={"id": f"s{sessions}", "ttl": 3600}).raise_for_status()
            turn = {"input": f"{sessions:08d}" * (SESSION_TOKENS // 8), "sampling": {"max_tokens": 1}}
            self.http.post(f"/v1/sessions/s{sessions}/turns", json=turn).raise_for_status()
            sessions += 1
        return sessions

    def held(self) -> int:
        """Units that are not free."""
        pools = self.http.get("/v1/memory").json()["pools"]
        return sum(pool["units"] - pool["holders"]["FREE"] for pool in pools)

    def cores(self, seconds: float) -> float:
        """The mean number of cores that the server uses during the next seconds."""
        before, began = processor_seconds(self._server.pid), time.monotonic()
        time.sleep(seconds)
        return (processor_seconds(self._server.pid) - before) / (time.monotonic() - began)


class Viewer:
    """A viewer of the map in a thread; counts the pictures that it receives."""

    def __init__(self, url: str) -> None:
        self.pictures = 0
        self.connection = connect(url.replace("http", "ws") + "/v1/memory/live")
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()

    def _watch(self) -> None:
        try:
            for message in self.connection:
                self.pictures += isinstance(message, bytes)
        except ConnectionClosed:
            return

    def close(self) -> None:
        """Disconnect."""
        self.connection.close()
        self.thread.join()


def page_load(url: str) -> float | None:
    """Median seconds until the page is connected; None without a browser."""
    found = shutil.which("chromium")
    if found is None or importlib.util.find_spec("playwright") is None:
        return None
    with import_module("playwright.sync_api").sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        times = []
        for _ in range(PAGE_LOADS):
            page = browser.new_page()
            began = time.monotonic()
            page.goto(url)
            page.wait_for_selector("#status[data-state=up]")
            times.append(time.monotonic() - began)
            page.close()
        browser.close()
    return median(times)


class Report:
    """Prints figures, as text or as JSON."""

    def __init__(self, units: int, as_json: bool) -> None:
        self._units = units
        self._as_json = as_json

    def tell(self, name: str, value: float, unit: str, **more: object) -> None:
        """Print one figure."""
        line = {"name": name, "value": round(value, 4), "unit": unit, "units": self._units, **more}
        print(json.dumps(line) if self._as_json else f"{name}: {value:.4f} {unit} {more}", flush=True)


def measure(server: FilledServer, units: int, seconds: float, report: Report) -> None:
    """Measure the map on an idle server, then on a busy one, then the page."""
    sessions = server.fill(units)
    bare = server.cores(seconds)
    viewer = Viewer(server.url)
    time.sleep(1)
    report.tell("map_idle", server.cores(seconds) - bare, "cores", sessions=sessions)
    viewer.close()
    storm = {"sessions": 20, "seconds": 4 * seconds + 5}
    server.http.post("/v1/storm", json=storm).raise_for_status()
    time.sleep(2)
    before = server.cores(seconds)
    viewer = Viewer(server.url)
    time.sleep(1)
    pictures = viewer.pictures
    watched = server.cores(seconds)
    rate = (viewer.pictures - pictures) / seconds
    viewer.close()
    unwatched = (before + server.cores(seconds)) / 2
    more = {"unwatched": round(unwatched, 3), "pictures_per_second": rate}
    report.tell("map_busy", watched - unwatched, "cores", **more)
    server.http.delete("/v1/storm")
    loaded = page_load(server.url)
    if loaded is not None:
        report.tell("page_load", loaded, "s")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--units", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with FilledServer(options.units) as server:
        measure(server, options.units, options.seconds, Report(options.units, options.json))


if __name__ == "__main__":
    main()
