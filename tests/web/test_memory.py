"""The map of memory: arrangements, the last five minutes, and what a session holds on every tier."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Page, expect

from tests.server.serving import Server
from tests.web.conftest import OpenPage, Serve

# The kinds of the cells of a pool in the order in which they are drawn, told by their colours: each run once.
RUNS = """async (pool) => {
  const { colours } = await import('/web/draw.js');
  const { KINDS } = await import('/web/holders.js');
  const canvas = document.querySelector(`#pool-${pool} canvas`);
  const drawing = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const pixels = new Uint32Array(drawing.data.buffer);
  const known = colours(KINDS);
  const drawn = [...pixels].filter(Boolean).map((each) => KINDS[known.indexOf(each)]);
  return drawn.filter((each, place) => each !== drawn[place - 1]);
}"""

READING = ("Multiple readback operations",)
"""What Chromium says of the test's own reading of a canvas."""

RECORDER = """async () => {
  const { Recorder } = await import('/web/recorder.js');
  const { MemoryModel } = await import('/web/memory-model.js');
  const [model, recorder] = [new MemoryModel(), new Recorder({ seconds: 60, bytesMax: 200_000 })];
  model.begin([{ component: "full", tier: "device", units: 1000 }]);
  let random = 7;
  const next = (below) => (random = (random * 1103515245 + 12345) % 2147483648) % below;
  const kept = [];
  let [longest, largest] = [0, 0];
  for (let tick = 0; tick < 2000; tick++) {
    const first = next(1000);
    const buffer = new Uint32Array([tick, 0, 1, first, 1 + next(1000 - first), next(8)]).buffer;
    model.apply(buffer);
    recorder.note("apply", buffer, model, tick / 10);
    if (tick % 7 === 0) {
      const names = { come: [[8 + next(4), 3, `s${tick}`, ""]], gone: [] };
      model.name(names);
      recorder.note("name", names, model, tick / 10);
    }
    const holders = JSON.stringify([...model.holders]);
    kept.push({ at: tick / 10, cells: [...model.pools[0].cells], holders });
    longest = Math.max(longest, tick / 10 - recorder.first);
    largest = Math.max(largest, recorder.bytes);
  }
  const wrong = [];
  const look = (each) => {
    const shown = recorder.at(each.at);
    const same = each.cells.every((cell, unit) => cell === shown.pools[0].cells[unit]);
    if (!same || JSON.stringify([...shown.holders]) !== each.holders) wrong.push(each.at);
  };
  const there = kept.filter((each) => each.at >= recorder.first);
  there.forEach(look);
  for (let tries = 0; tries < 200; tries++) look(there[next(there.length)]);
  return { wrong, longest, largest, parts: recorder.parts.length, there: there.length };
}"""


def test_what_is_kept_of_the_past_is_exact_and_bounded(server: Server, open_page: OpenPage) -> None:
    page = open_page(server)
    kept = page.evaluate(RECORDER)
    assert kept["wrong"] == []
    assert kept["there"] > 300
    assert kept["longest"] <= 60 + 5, "the recorder forgets a part when the next one is old enough"
    assert kept["largest"] <= 200_000 + 1000 * 2 + 12 * 120
    assert kept["parts"] <= 14


def test_units_can_be_arranged_by_who_holds_them(server: Server, open_page: OpenPage) -> None:
    page = open_page(server, "/#memory", expected=READING)
    for name in ("anna", "bert", "anna", "bert"):
        if name not in {each["id"] for each in server.get("/v1/sessions").json()["sessions"]}:
            server.open(name)
        server.say(name, name * 80)
    held = {name: server.state(name)["memory"]["full"]["units"] for name in ("anna", "bert")}
    expect(page.locator("#holders button")).to_have_count(2)
    # The two sessions lie among each other and the prefixes, until they are arranged.
    wait_for_runs(page, lambda runs: len(runs) > len(set(runs)) > 2)
    page.locator("#arrange").get_by_text("Holder").click()
    expect(page.locator("input[value=kind]")).to_be_checked()
    wait_for_runs(page, lambda runs: len(runs) == len(set(runs)) and runs[-1] == "free")
    page.locator("#arrange").get_by_text("Session").click()
    wait_for_runs(page, lambda runs: runs[0] == "session")
    page.hover("#pool-0 canvas", position={"x": 2, "y": 2})
    expect(page.locator("#pointed")).to_contain_text("session anna")
    page.locator("#arrange").get_by_text("Tenant").click()
    expect(page.locator("#holders-title")).to_have_text("Tenants with memory")
    expect(page.locator("#holders button")).to_have_text([f"this key · {sum(held.values())}"])
    page.locator("#legend [data-kind=tree] button").click()
    expect(page.locator("#legend [data-kind=tree] button")).to_have_attribute("aria-pressed", "true")


def test_a_session_lights_up_on_every_tier_and_its_moves_are_told(
    serve: Serve, open_page: OpenPage, tmp_path: Path
) -> None:
    server = serve("--kv-tokens", "16384", "--host-memory", "8MiB", "--disk", str(tmp_path / "disk"))
    page = open_page(server, "/#memory", expected=READING)
    reports = heard_reports(page)
    name = server.open("moves")
    server.say(name, "x" * 1500)
    chip = page.locator("#holders button[data-session=moves]")
    expect(chip).to_have_text(re.compile(r"moves · \d\d"))
    chip.click()
    units = server.state(name)["memory"]["full"]["units"]
    wait_lit(page, "device", units)
    wait_for_another(page, reports)
    assert server.post(f"/v1/sessions/{name}/spill", {"tier": "host"}).status_code == 200
    wait_lit(page, "device", 0)
    expect(page.locator("#events li").first).to_contain_text(
        re.compile("units of moves spilled from device to host")
    )
    moved = page.evaluate("document.querySelectorAll('#events li').length")
    assert server.post(f"/v1/sessions/{name}/restore", {}).status_code == 200
    expect(page.locator("#events li").first).to_contain_text("restored from host")
    assert page.locator("#events li").count() == moved + 1
    # The past shows where it was, the present where it is.
    page.locator("#when").focus()
    page.keyboard.press("Home")
    expect(page.locator("#live")).to_have_attribute("aria-pressed", "false")
    expect(page.locator("#when-shown")).to_have_text(re.compile(r"\d+ s ago"))
    expect(page.locator("#legend [data-kind=session] b")).to_have_text(" 0")
    page.click("#play")
    expect(page.locator("#legend [data-kind=session] b")).not_to_have_text(" 0")
    page.click("#live")
    expect(page.locator("#when-shown")).to_have_text("now")
    wait_lit(page, "device", units)


def wait_for_runs(page: Page, expected: Callable[[list[str]], bool]) -> None:
    """Wait until the first map is drawn as it should be."""
    deadline = time.monotonic() + 30
    while not expected(runs := page.evaluate(RUNS, 0)):
        assert time.monotonic() < deadline, runs
        page.wait_for_timeout(20)


def heard_reports(page: Page) -> list[object]:
    """The memory reports that the page hears from now on; the page is loaded again for it."""
    heard: list[object] = []

    def look(frame: str | bytes) -> None:
        if isinstance(frame, str) and (message := json.loads(frame))["type"] == "memory.report":
            heard.append(message)

    page.on("websocket", lambda socket: socket.on("framereceived", look))
    page.reload()
    return heard


def wait_for_another(page: Page, reports: list[object]) -> None:
    """Wait until the page has looked at a report that came from now on: moves are told from two looks."""
    before = len(reports)
    deadline = time.monotonic() + 30
    while len(reports) <= before + 1:
        assert time.monotonic() < deadline, "the server reports every second"
        page.wait_for_timeout(20)


def wait_lit(page: Page, tier: str, units: int) -> None:
    """Wait until so many cells that are not of shared prefixes are lit in the pools of a tier."""
    lit = f"""(units) => {{
      const found = [...document.querySelectorAll(".pool[data-tier={tier}] canvas")].map((canvas) => {{
        const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        let count = 0;
        for (let place = 3; place < pixels.length; place += 4) if (pixels[place] === 255) count++;
        return count;
      }});
      const count = found.reduce((sum, each) => sum + each, 0);
      return units === 0 ? count === 0 : count >= units;
    }}"""
    page.wait_for_function(lit, arg=units)
