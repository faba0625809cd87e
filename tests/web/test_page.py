"""The page as a person uses it: talk, interrupt, go back, fork, see the memory, lose the server."""

import json
import re
import time
from pathlib import Path

from playwright.sync_api import Page, Route, expect

from tests.server.serving import Server
from tests.web.conftest import OpenPage, Serve

LONG = "many words that take a while to be said again " * 40
ENDLESS = "words that nobody waits for the end of " * 600
"""What takes so long to be said again that a slow machine, too, can cut in."""

# The cells of the first pool that are drawn in full colour, as columns and rows.
LIT_CELLS = """() => {
  const canvas = document.querySelector("#pool-0 canvas");
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const lit = [];
  for (let place = 0; place < pixels.length / 4; place++) {
    const at = [place % canvas.width, Math.floor(place / canvas.width)];
    if (pixels[place * 4 + 3] === 255) lit.push(at);
  }
  return lit;
}"""


def say(page: Page, text: str) -> None:
    page.fill("#said", text)
    page.press("#said", "Enter")


def set_limit(page: Page, tokens: str) -> None:
    """Let answers be so long."""
    page.click("#settings-open")
    page.fill("#limit", tokens)
    page.keyboard.press("Escape")
    expect(page.locator("#settings")).to_be_hidden()


def answers(page: Page) -> list[str]:
    return page.locator(".turn .answer").all_text_contents()


def expect_answers(page: Page, *expected: str) -> None:
    """Wait until these are the answers that are shown, to the letter."""
    deadline = time.monotonic() + 30
    while answers(page) != list(expected):
        assert time.monotonic() < deadline, answers(page)
        page.wait_for_timeout(20)


def finished(page: Page, count: int) -> None:
    """Wait until so many turns are over."""
    expect(page.locator(".turn[data-state=done], .turn[data-state=cut]")).to_have_count(count)


def test_a_conversation_streams_in_and_shows_what_it_cost(server: Server, open_page: OpenPage) -> None:
    page = open_page(server)
    expect(page.locator("#status")).to_have_text("Connected")
    say(page, "hello there")
    finished(page, 1)
    say(page, "and again")
    finished(page, 2)
    expect_answers(page, "hello there", "and again")
    foot = page.locator(".facts").last.text_content() or ""
    shown = re.match(r"(\d+) computed · (\d+) cached · first token .* · (\d+) tokens in", foot)
    assert shown is not None, foot
    session = server.get("/v1/sessions").json()["sessions"][0]
    assert sum(map(int, shown.groups())) == session["tokens"]["known"]
    assert int(shown[2]) > 0


def test_where_the_model_suggests_nothing_it_is_sampled_pleasantly(
    server: Server, open_page: OpenPage
) -> None:
    sent: list[str] = []
    page = open_page(server)
    page.on("websocket", lambda socket: socket.on("framesent", lambda frame: sent.append(str(frame))))
    with page.expect_response("**/v1/models"):
        page.reload()
    say(page, "what was that")
    expect(page.locator(".answer")).to_have_text("what was that")
    commits = [json.loads(frame) for frame in sent if '"input.commit"' in frame]
    assert [commit["sampling"] for commit in commits] == [
        {"temperature": 0.2, "top_p": 0.9, "max_tokens": 400}
    ]


def test_one_can_type_on_while_the_model_speaks(server: Server, open_page: OpenPage) -> None:
    page = open_page(server)
    set_limit(page, "4000")
    say(page, LONG)
    say(page, "queued behind")
    expect(page.locator(".turn")).to_have_count(2)
    finished(page, 2)
    expect_answers(page, LONG.strip(), "queued behind")


def test_what_is_said_before_the_server_has_answered_is_not_lost(server: Server, open_page: OpenPage) -> None:
    page = open_page(server)
    held: list[Route] = []

    def hold(route: Route) -> None:
        held.append(route)

    page.route("**/v1/sessions", hold)
    page.reload()
    page.keyboard.press("Escape")
    say(page, "early words")
    expect(page.locator(".turn[data-state=waiting] .said")).to_have_text("early words")
    held[0].continue_()
    finished(page, 1)
    expect_answers(page, "early words")


def test_escape_cuts_at_the_word_last_shown_and_the_conversation_goes_on_from_there(
    server: Server, open_page: OpenPage
) -> None:
    page = open_page(server)
    set_limit(page, "30000")
    say(page, ENDLESS)
    expect(page.locator(".turn[data-state=speaking] .answer")).to_have_text(re.compile(".{9}"))
    page.press("#said", "Escape")
    expect(page.locator(".turn[data-state=cut]")).to_have_count(1)
    kept = answers(page)[0]
    assert 8 < len(kept) < len(ENDLESS)
    assert ENDLESS.startswith(kept)
    known = server.get("/v1/sessions").json()["sessions"][0]["tokens"]["known"]
    say(page, "go on")
    finished(page, 2)
    expect_answers(page, kept, "go on")
    # Nothing that was kept is computed again, and nothing else is there.
    expect(page.locator(".facts").last).to_contain_text(f"{known} cached")


def test_cutting_in_replaces_the_turn_that_speaks(server: Server, open_page: OpenPage) -> None:
    page = open_page(server)
    set_limit(page, "30000")
    say(page, ENDLESS)
    expect(page.locator(".turn[data-state=speaking] .answer")).to_have_text(re.compile(".{9}"))
    page.fill("#said", "listen")
    page.press("#said", "Control+Enter")
    finished(page, 2)
    kept = answers(page)[0]
    assert len(kept) < len(ENDLESS)
    expect_answers(page, kept, "listen")


def test_the_map_shows_who_holds_what_and_lights_up_a_session(server: Server, open_page: OpenPage) -> None:
    page = open_page(
        server, "/#memory", expected=("Multiple readback operations",)
    )  # The test's own reading.
    expect(page.locator("#pool-0 h2")).to_contain_text("of 4096 held")
    expect(page.locator("#legend [data-kind=session] b")).to_have_text(" 0")
    name = server.open("seen")
    server.say(name, "x" * 1000)
    expect(page.locator("#holders button")).to_have_text(re.compile(r"seen · \d+"))
    held = server.state(name)["memory"]["full"]["units"]
    expect(page.locator("#legend [data-kind=session] b")).to_have_text(f" {held}")
    page.click("#holders button")
    expect(page.locator("#holders button")).to_have_attribute("aria-pressed", "true")
    # What the session shares with others is lit when the server has told which units those are.
    due = held + server.state(name)["memory"]["leased"]["full"]
    page.wait_for_function(f"due => ({LIT_CELLS})().length === due", arg=due)
    lit = page.evaluate(LIT_CELLS)
    cell = page.evaluate("const c = document.querySelector('#pool-0 canvas'); c.clientWidth / c.width")
    columns = page.evaluate("document.querySelector('#pool-0 canvas').width")
    pointed = set()
    for column, row in lit:
        page.hover("#pool-0 canvas", position={"x": (column + 0.5) * cell, "y": (row + 0.5) * cell})
        expect(page.locator("#pointed")).to_contain_text(f"unit {row * columns + column}:")
        pointed.add((page.text_content("#pointed") or "").partition(": ")[2])
    assert pointed == {"session seen", "shared prefixes"}
    page.focus("#pool-0 canvas")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#pointed")).to_have_text(re.compile("unit 1:"))
    server.http.delete(f"/v1/sessions/{name}")
    expect(page.locator("#legend [data-kind=session] b")).to_have_text(" 0")


def test_a_session_that_listens_is_shown_with_what_it_has_heard(server: Server, open_page: OpenPage) -> None:
    page = open_page(server, "/#memory")
    name = server.open("hearing")
    said = {"text": "many words that are computed before the last one has been said "}
    assert server.post(f"/v1/sessions/{name}/input", said).status_code == 200
    chip = page.locator("#holders button[data-session=hearing]")
    expect(chip).to_have_text(re.compile(r"hearing · \d+ · listening: \d+ tokens heard, [1-9]\d* computed"))
    expect(chip).to_have_attribute("data-state", "listening")
    heard = server.state(name)["tokens"]["heard"]
    expect(chip).to_contain_text(f"listening: {heard} tokens heard")
    server.say(name, "something else")
    expect(chip).to_have_text(re.compile(r"hearing · \d+$"))
    server.http.delete(f"/v1/sessions/{name}")
    expect(page.locator("#holders button")).to_have_count(0)


def test_the_names_of_others_are_not_shown(serve: Serve, open_page: OpenPage) -> None:
    environment = {"HOLDFAST_API_KEYS": "ann:secret-a,bob:secret-b"}
    server = serve("--kv-tokens", "8192", environment=environment)  # What others hold is shown in sixteenths.
    with_key = {"Authorization": "Bearer secret-b"}
    opened = server.post("/v1/sessions", {"id": "private-to-bob"}, headers=with_key)
    assert opened.status_code == 201
    turn = {"input": "y" * 500}
    assert server.post("/v1/sessions/private-to-bob/turns", turn, headers=with_key).status_code == 200
    page = open_page(server, "/#memory", expected=("401",))
    page.fill("#key", "secret-a")
    page.press("#key", "Enter")
    expect(page.locator("#legend [data-kind=session] b")).not_to_have_text(" 0")
    expect(page.locator("#holders button")).to_have_count(0)
    page.click("#tab-health")
    expect(page.locator("#no-figures")).to_be_visible()
    assert "private-to-bob" not in page.content()
    assert server.http.delete("/v1/sessions/private-to-bob", headers=with_key).status_code == 200


def test_a_server_with_keys_asks_for_one(serve: Serve, open_page: OpenPage) -> None:
    server = serve("--kv-tokens", "65536", environment={"HOLDFAST_API_KEYS": "ann:the/key=+ü"})
    page = open_page(server, expected=("401",))
    expect(page.locator("#key-dialog")).to_be_visible()
    page.fill("#key", "wrong")
    page.press("#key", "Enter")
    expect(page.locator("#key-wrong")).to_be_visible()
    page.fill("#key", "the/key=+ü")
    page.press("#key", "Enter")
    expect(page.locator("#key-dialog")).to_be_hidden()
    expect(page.locator("#said")).to_be_focused()
    expect(page.locator("#status")).to_have_text("Connected")
    say(page, "let in")
    finished(page, 1)
    expect_answers(page, "let in")


def test_a_server_that_goes_away_is_seen_and_comes_back(serve: Serve, open_page: OpenPage) -> None:
    server = serve("--kv-tokens", "65536")
    page = open_page(server, expected=("ERR_CONNECTION_REFUSED", "WebSocket"))
    say(page, "before")
    finished(page, 1)
    server.stop()
    expect(page.locator("#offline")).to_contain_text("cannot be reached")
    expect(page.locator("#status")).to_have_attribute("data-state", "down")
    serve("--kv-tokens", "65536", "--port", server.url.rpartition(":")[2])
    expect(page.locator("#status")).to_have_text("Connected")
    expect(page.locator("#offline")).to_be_hidden()
    expect(page.locator("#branch")).to_contain_text("no such session")
    say(page, "after")  # The session is gone with the server: another one is opened, and told what was said.
    finished(page, 1)
    expect(page.locator(".turn[data-state=past]")).to_have_count(1)
    expect_answers(page, "before", "after")
    spoken = page.locator(".turn[data-state=done] .facts").text_content() or ""
    computed = re.match(r"(\d+) computed", spoken)
    assert computed is not None and int(computed[1]) > len("before after"), spoken


def test_a_session_of_a_journal_goes_on_after_a_restart(
    serve: Serve, open_page: OpenPage, tmp_path: Path
) -> None:
    arguments = ("--kv-tokens", "65536", "--journal", str(tmp_path / "sessions.journal"))
    server = serve(*arguments)
    page = open_page(server, expected=("ERR_CONNECTION_REFUSED", "WebSocket", "503"))
    say(page, "before")
    finished(page, 1)
    server.stop()
    expect(page.locator("#status")).to_have_attribute("data-state", "down")
    say(page, "said while it was away")
    again = serve(*arguments, "--port", server.url.rpartition(":")[2])
    finished(page, 2)
    expect_answers(page, "before", "said while it was away")
    assert [session["turns"] for session in again.get("/v1/sessions").json()["sessions"]] == [2]


def test_hostile_text_is_only_text(server: Server, open_page: OpenPage) -> None:
    page = open_page(server)
    page.evaluate("window.harmed = false")
    hostile = [
        "<img src=x onerror='window.harmed = true'>",
        "<script>window.harmed = true</script>",
        '</div><a href="javascript:window.harmed=true">x</a>',
        "\u202e<svg/onload=window.harmed=true>\u0000",
        "{{constructor.constructor('window.harmed=true')()}}",
    ]
    for number, text in enumerate(hostile, 1):
        say(page, text)
        finished(page, number)
    assert [text.replace("\ufffd", "\u0000") for text in answers(page)] == hostile
    page.click("#tab-timeline")
    expect(page.locator(".node")).to_have_count(len(hostile))
    assert page.evaluate("window.harmed") is False
    page.locator(".node").first.click()
    expect(page.locator("#turn-card .answer")).to_have_text(hostile[0])
    assert page.evaluate("window.harmed") is False
    assert page.locator("main img, main script, #talk article svg, main a, main foreignObject").count() == 0


def test_the_files_are_served_with_the_headers_that_keep_them_safe(server: Server) -> None:
    names = re.findall(r"/web/([a-z.]+)", server.get("/").text)
    assert {"main.js", "style.css", "icon.svg"} <= set(names)
    for path in ("/", *(f"/web/{name}" for name in (*names, "memory.js"))):
        answer = server.get(path)
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        again = server.get(path, headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    for path in ("/web/../gate.py", "/web/%2e%2e/gate.py", "/web/nothing.js", "/web/"):
        assert server.get(path).status_code in (404, 405), path


def test_a_storm_can_be_watched_and_leaves_nothing(server: Server, open_page: OpenPage) -> None:
    page = open_page(server, "/#health")
    page.click("#storm-button")
    expect(page.locator("#storm-state")).to_contain_text(re.compile(r"\d+ s left · \d\d+ turns"))
    page.click("#tab-memory")
    expect(page.locator("#legend [data-kind=session] b")).not_to_have_text(" 0")
    page.click("#tab-health")
    expect(page.locator("#latency tbody tr").first.locator("td").last).not_to_have_text("0")
    deadline = time.monotonic() + 30
    while not server.get("/v1/storm").json()["interrupts"]:
        assert time.monotonic() < deadline, "nobody interrupts"
        page.wait_for_timeout(100)
    page.click("#storm-button")
    expect(page.locator("#storm-state")).to_contain_text("Calm")
    expect(page.locator("#audit")).to_contain_text("No findings")


def test_a_storm_needs_its_option_and_the_admin(serve: Serve) -> None:
    environment = {"HOLDFAST_API_KEYS": "ann:secret-a", "HOLDFAST_ADMIN_KEY": "boss"}
    server = serve("--kv-tokens", "65536", environment=environment)
    for key, status in (("secret-a", 403), ("boss", 403), ("wrong", 401)):
        answer = server.post("/v1/storm", {}, headers={"Authorization": f"Bearer {key}"})
        assert answer.status_code == status
    assert answer.json()["error"]["code"] == "invalid_api_key"
    off = server.post("/v1/storm", {}, headers={"Authorization": "Bearer boss"})
    assert off.json()["error"]["code"] == "storm_off"
