"""What the live map costs the server, and how fast the page loads.

    python -m benchmarks.page_map [--units 100000] [--seconds 10] [--json]

Starts a server of the model without weights with a pool of so many pages, fills most of it with sessions, and
watches it over `/v1/memory/live`. `map_idle` and `map_busy` are the share of one core that the server's two
processes take for it: with no turn running, and the difference between watched and unwatched while sessions
talk and are interrupted. `page_load` is the time from the request to the connected page in a Chromium, where
there is one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

TICKS = os.sysconf("SC_CLK_TCK")


class Served:
    """A server in processes of its own."""

    def __init__(self, units: int) -> None:
        tokens = str(units * 16)
        arguments = [
            "serve",
            "echo",
            "--port",
            "0",
            "--kv-tokens",
            tokens,
            "--storm",
            "--tenant-sessions",
            "100000",
        ]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "holdfast.cli", *arguments, "--max-sessions", "20000"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            found = re.search(r"http://\S+", line)
            if found:
                self.url = found[0]
                break
        self.http = httpx.Client(base_url=self.url, timeout=120)

    def cpu_seconds(self) -> float:
        """What both processes have used."""
        used = 0
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        for pid in (str(self.process.pid), *children):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            used += int(fields[11]) + int(fields[12])
        return used / TICKS

    def fill(self, units: int) -> int:
        """Sessions of long histories until most units are held."""
        sessions = 0
        while self.held() < 0.85 * units:
            self.http.post("/v1/sessions", json={"id": f"s{sessions}", "ttl": 3600}).raise_for_status()
            turn = {"input": f"{sessions:08d}" * 2000, "sampling": {"max_tokens": 1}}
            self.http.post(f"/v1/sessions/s{sessions}/turns", json=turn).raise_for_status()
            sessions += 1
        return sessions

    def held(self) -> int:
        pools = self.http.get("/v1/memory").json()["pools"]
        return sum(pool["units"] - pool["holders"]["FREE"] for pool in pools)


class Watch:
    """A viewer in a thread, which counts what it is sent."""

    def __init__(self, served: Served) -> None:
        self.pictures = 0
        self.bytes = 0
        self.connection = connect(served.url.replace("http", "ws") + "/v1/memory/live").__enter__()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()

    def _watch(self) -> None:
        try:
            for message in self.connection:
                self.bytes += len(message)
                self.pictures += isinstance(message, bytes)
        except ConnectionClosed:
            return

    def close(self) -> None:
        self.connection.close()
        self.thread.join()


def share(served: Served, seconds: float) -> float:
    """The share of a core that is used meanwhile."""
    before, began = served.cpu_seconds(), time.monotonic()
    time.sleep(seconds)
    return (served.cpu_seconds() - before) / (time.monotonic() - began)


def page_load(url: str) -> float | None:
    """Seconds until the page is connected; None without a browser."""
    found = shutil.which("chromium")
    if found is None:
        return None
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - a browser is not needed for the rest

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        times = []
        for _ in range(5):
            page = browser.new_page()
            began = time.monotonic()
            page.goto(url)
            page.wait_for_selector("#status[data-state=up]")
            times.append(time.monotonic() - began)
            page.close()
        browser.close()
    return sorted(times)[2]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--units", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    served = Served(options.units)
    figures: list[dict[str, object]] = []

    def tell(name: str, value: float, unit: str, **more: object) -> None:
        figures.append({"name": name, "value": round(value, 4), "unit": unit, "units": options.units, **more})
        line = figures[-1]
        print(json.dumps(line) if options.json else f"{name}: {value:.4f} {unit} {more}", flush=True)

    try:
        sessions = served.fill(options.units)
        bare = share(served, options.seconds)
        watch = Watch(served)
        time.sleep(1)
        tell("map_idle", share(served, options.seconds) - bare, "cores", sessions=sessions)
        watch.close()
        storm = {"sessions": 20, "seconds": 4 * options.seconds + 5}
        served.http.post("/v1/storm", json=storm).raise_for_status()
        time.sleep(2)
        unwatched = share(served, options.seconds)
        watch = Watch(served)
        time.sleep(1)
        before = watch.pictures
        watched = share(served, options.seconds)
        rate = (watch.pictures - before) / options.seconds
        watch.close()
        unwatched = (unwatched + share(served, options.seconds)) / 2
        tell(
            "map_busy", watched - unwatched, "cores", unwatched=round(unwatched, 3), pictures_per_second=rate
        )
        served.http.delete("/v1/storm")
        loaded = page_load(served.url)
        if loaded is not None:
            tell("page_load", loaded, "s")
    finally:
        served.process.terminate()
        served.process.wait(60)


if __name__ == "__main__":
    main()
