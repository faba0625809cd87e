"""Talking: drafts computed ahead, edits, other answers, sessions in a row, files, and the keyboard."""

import json
import re
from pathlib import Path

from playwright.sync_api import Page, expect

from tests.server.serving import Server
from tests.web.conftest import OpenPage, Serve
from tests.web.test_page import ENDLESS, expect_answers, finished, say, set_limit


def frames(page: Page) -> list[dict[str, object]]:
    """What the page sends from now on; the page is loaded again for it."""
    sent: list[dict[str, object]] = []
    page.on(
        "websocket",
        lambda socket: socket.on("framesent", lambda frame: sent.append(json.loads(str(frame)))),
    )
    page.reload()
    expect(page.locator("#status")).to_have_text("Connected")
    return sent


def turns(server: Server) -> list[int]:
    return sorted(session["turns"] for session in server.get("/v1/sessions").json()["sessions"])


def test_what_is_typed_is_computed_while_it_is_typed(server: Server, open_page: OpenPage) -> None:
    page = open_page(server)
    sent = frames(page)
    page.focus("#said")
    page.keyboard.type("a long question that is typed slowly, with a 🙂 in it, ")
    expect(page.locator("#ahead")).to_have_text(re.compile(r"listening: \d+ tokens heard, [1-9]\d* computed"))
    page.keyboard.press("Backspace")
    page.keyboard.type("and ends")
    page.keyboard.press("Enter")
    finished(page, 1)
    expect_answers(page, "a long question that is typed slowly, with a 🙂 in it,and ends")
    expect(page.locator(".facts")).to_have_text(re.compile(r"\d+ computed, [1-9]\d* while you typed"))
    expect(page.locator("#ahead")).to_have_text("")
    # What was told once is not told again: the pieces are shorter than the whole.
    told = sum(len(str(each["text"])) for each in sent if each["type"] == "input.replace")
    assert told < 2 * len("a long question that is typed slowly, with a 🙂 in it,and ends")


def test_nothing_is_told_before_it_is_sent_where_a_person_does_not_want_it(
    server: Server, open_page: OpenPage
) -> None:
    page = open_page(server)
    page.click("#settings-open")
    page.uncheck("#listens")
    page.keyboard.press("Escape")
    sent = frames(page)
    page.focus("#said")
    page.keyboard.type("in private ")
    page.wait_for_timeout(400)
    assert [each for each in sent if each["type"] == "input.replace"] == []
    page.keyboard.press("Enter")
    expect_answers(page, "in private")


def test_a_cut_says_what_was_rolled_back_and_that_nothing_is_computed_again(
    server: Server, open_page: OpenPage
) -> None:
    page = open_page(server)
    set_limit(page, "30000")
    say(page, ENDLESS)
    expect(page.locator(".turn[data-state=speaking] .answer")).to_have_text(re.compile(".{9}"))
    page.press("#said", "Escape")
    note = page.locator(".note")
    expect(note).to_have_text(re.compile(r"^Cut after \d+ tokens; \d+ rolled back, 0 to recompute\.$"))
    kept = re.search(r"after (\d+)", note.text_content() or "")
    assert kept is not None
    expect(page.locator(".facts")).to_contain_text(f"cut after {kept[1]} tokens, and kept")
    expect(page.locator("#events li").first).to_contain_text(f"Cut after {kept[1]} tokens")


def test_an_edited_message_goes_on_in_a_fork(server: Server, open_page: OpenPage) -> None:
    page = open_page(server)
    for number, text in enumerate(("first", "second", "third"), 1):
        say(page, text)
        finished(page, number)
    page.locator(".turn").nth(1).get_by_text("Edit", exact=True).click()
    page.fill(".editor textarea", "another second")
    page.keyboard.press("Enter")
    expect_answers(page, "first", "another second")
    expect(page.locator(".note")).to_have_text(
        re.compile(r"^Forked from s-\w+ at turn 1; \d+ tokens shared, 0 to recompute")
    )
    expect(page.locator("#session-list li")).to_have_count(2)
    expect(page.locator("[aria-current=true]")).to_have_text("another second")
    assert turns(server) == [2, 3]
    page.locator("#session-list .choose").first.click()
    expect_answers(page, "first", "second", "third")
    # The first message, too: the fork begins without a turn.
    page.locator(".turn").first.get_by_text("Edit", exact=True).click()
    page.keyboard.press("Escape")
    expect(page.locator(".editor")).to_have_count(0)
    page.locator(".turn").first.get_by_text("Edit", exact=True).click()
    page.fill(".editor textarea", "another first")
    page.get_by_text("Send in a fork").click()
    expect_answers(page, "another first")
    assert turns(server) == [1, 2, 3]


def test_another_answer_takes_the_place_of_the_last(server: Server, open_page: OpenPage) -> None:
    page = open_page(server)
    for number, text in enumerate(("first", "second"), 1):
        say(page, text)
        finished(page, number)
    before = server.get("/v1/sessions").json()["sessions"][0]["tokens"]["known"]
    page.locator(".turn").last.get_by_text("Regenerate").click()
    expect(page.locator(".note")).to_have_text(
        re.compile(r"^Went back to turn 1; \d+ tokens rolled back, 0 to recompute\.$")
    )
    finished(page, 2)
    expect_answers(page, "first", "second")
    assert server.get("/v1/sessions").json()["sessions"][0]["tokens"]["known"] == before
    expect(page.locator(".turn").first.get_by_text("Regenerate")).to_be_hidden()


def test_sessions_stand_in_a_row_and_survive_a_reload(server: Server, open_page: OpenPage) -> None:
    page = open_page(server)
    say(page, "in the first")
    finished(page, 1)
    page.fill("#said", "half a thought")
    page.click("#fresh")
    expect(page.locator("#said")).to_have_value("")
    say(page, "in the second")
    finished(page, 1)
    page.reload()
    expect(page.locator("#session-list li")).to_have_count(2)
    expect_answers(page, "in the second")
    expect(page.locator("#session-list li[data-state=idle]")).to_have_count(2)
    page.locator("#session-list .choose").first.click()
    expect_answers(page, "in the first")
    expect(page.locator("#said")).to_have_value("half a thought")
    say(page, "and on")
    finished(page, 2)
    expect(page.locator(".facts").last).to_have_text(re.compile(r"[1-9]\d* cached"))
    page.locator("#session-list .shut").first.click()
    expect(page.locator("#session-list li")).to_have_count(1)
    expect_answers(page, "in the second")
    assert turns(server) == [1]


def test_a_reload_keeps_what_an_answer_had_said(server: Server, open_page: OpenPage) -> None:
    page = open_page(server)
    set_limit(page, "30000")
    say(page, ENDLESS)
    expect(page.locator(".turn[data-state=speaking] .answer")).to_have_text(re.compile(".{9}"))
    page.reload()
    expect(page.locator(".turn[data-state=cut]")).to_have_count(1)
    kept = page.locator(".answer").text_content() or ""
    assert 8 < len(kept) < len(ENDLESS)
    assert ENDLESS.startswith(kept)
    say(page, "go on")
    finished(page, 2)
    expect_answers(page, kept, "go on")


def test_two_pages_have_sessions_of_their_own(server: Server, open_page: OpenPage) -> None:
    one = open_page(server)
    say(one, "in one page")
    finished(one, 1)
    other = one.context.new_page()
    other.goto(server.url)
    say(other, "in another")
    finished(other, 1)
    say(one, "again in one")
    finished(one, 2)
    expect_answers(one, "in one page", "again in one")
    expect_answers(other, "in another")
    assert turns(server) == [1, 2]


def test_a_conversation_is_written_to_a_file_and_read_from_it(
    server: Server, open_page: OpenPage, tmp_path: Path
) -> None:
    page = open_page(server)
    for number, text in enumerate(("first", "second"), 1):
        say(page, text)
        finished(page, number)
    with page.expect_download() as download:
        page.keyboard.press("Alt+e")
    assert download.value.suggested_filename == "first.json"
    path = tmp_path / "conversation.json"
    download.value.save_as(path)
    written = json.loads(path.read_text())
    assert [(turn["input"], turn["text"]) for turn in written["turns"]] == [
        ("first", "first"),
        ("second", "second"),
    ]
    other = open_page(server)
    other.set_input_files("#import-file", path)
    expect(other.locator(".turn[data-state=past]")).to_have_count(2)
    sent = frames(other)
    say(other, "third")
    finished(other, 1)
    expect_answers(other, "first", "second", "third")
    (appended,) = [each["messages"] for each in sent if each["type"] == "input.append"]
    assert [(each["role"], each["content"]) for each in appended] == [  # type: ignore[attr-defined]
        ("user", "first"),
        ("assistant", "first"),
        ("user", "second"),
        ("assistant", "second"),
        ("user", "third"),
    ]
    say(other, "fourth")
    finished(other, 2)
    assert len([each for each in sent if each["type"] == "input.append"]) == 1


def test_a_file_that_is_no_conversation_is_refused(
    server: Server, open_page: OpenPage, tmp_path: Path
) -> None:
    page = open_page(server)
    page.click("#settings-open")
    good = {"format": "holdfast-conversation", "version": 1, "turns": [{"input": "a", "text": "b"}]}
    for text, problem in (
        ("{", "This is not JSON"),
        ("{}", "This is not a conversation"),
        (json.dumps({**good, "version": 2}), "This is not a conversation"),
        (json.dumps({**good, "turns": [{"input": "a", "text": "b"}, {"input": 1}]}), "Turn 2 of the file"),
        (
            json.dumps({**good, "turns": [{"input": "a", "text": "b", "calls": [{"id": {}}]}]}),
            "Turn 1 of the file",
        ),
        (json.dumps({**good, "tools": [{"type": "web"}]}), "Tool 1 must be"),
        (json.dumps({**good, "turns": [{"input": "", "text": ""}] * 2001}), "has 2001 turns, at most 2000"),
        ("null", "This is not a conversation"),
    ):
        path = tmp_path / "file.json"
        path.write_text(text)
        page.set_input_files("#import-file", path)
        expect(page.locator("#import-problem")).to_contain_text(problem)
        expect(page.locator(".turn")).to_have_count(0)
    path.write_text(json.dumps(good))
    page.set_input_files("#import-file", path)
    expect(page.locator(".turn[data-state=past]")).to_have_count(1)


READ = "(text) => import('/web/transfer.js').then(({ read }) => read(text))"


def test_every_field_of_a_file_is_checked_and_kept(server: Server, open_page: OpenPage) -> None:
    page = open_page(server)
    call = {"id": "c", "name": "look", "arguments": "{}", "result": "seen"}
    turn = {"input": "a", "text": "b", "reasoning": "because", "calls": [{**call, "more": 1}]}
    turn["messages"] = [{"role": "user", "content": "a"}]

    def read(**changed: object) -> dict[str, object]:
        file = {
            "format": "holdfast-conversation",
            "version": 1,
            "system": "Be brief.",
            "turns": [{**turn, **changed}],
        }
        found: dict[str, object] = page.evaluate(READ, json.dumps(file))
        return found

    (kept,) = read()["given"]["past"]  # type: ignore[index]
    assert {name: kept[name] for name in turn} == {**turn, "calls": [call]}
    for field, wrong in (
        ("input", 1),
        ("text", None),
        ("reasoning", ["x"]),
        ("calls", {}),
        ("calls", [{**call, "name": 1}]),
        ("calls", [{**call, "arguments": {}}]),
        ("calls", [{**call, "result": 5}]),
        ("messages", "x"),
        ("messages", [{"role": "user", "content": []}]),
        ("messages", [{"role": 1, "content": "a"}]),
    ):
        assert read(**{field: wrong})["problem"] == "Turn 1 of the file is not a turn.", (field, wrong)


def test_sampling_and_the_system_prompt_are_sent(server: Server, open_page: OpenPage) -> None:
    page = open_page(server)
    page.click("#settings-open")
    for field, value in (
        ("temperature", "0.7"),
        ("top_p", ""),
        ("top_k", "20"),
        ("seed", "3"),
        ("limit", "50"),
    ):
        page.fill(f"#{field}", value)
    page.fill("#system", "You are terse.")
    page.select_option("#thinking", "off")
    page.keyboard.press("Escape")
    sent = frames(page)
    page.keyboard.press("Alt+n")
    say(page, "hello")
    finished(page, 1)
    (commit,) = [each for each in sent if each["type"] == "input.commit"]
    assert commit["sampling"] == {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "seed": 3, "max_tokens": 50}
    assert commit["thinking"] is False
    opened = [each["system"] for each in sent if each["type"] == "session.open" and "system" in each]
    assert opened == ["You are terse."]


def test_everything_has_a_key(server: Server, open_page: OpenPage) -> None:
    page = open_page(server)
    say(page, "first")
    finished(page, 1)
    page.keyboard.press("Alt+r")
    expect(page.locator("#events li")).to_have_count(1)
    finished(page, 1)
    page.keyboard.press("Alt+f")
    expect(page.locator("#session-list li")).to_have_count(2)
    page.keyboard.press("Alt+,")
    expect(page.locator("#session-list .choose").first).to_have_attribute("aria-current", "true")
    page.keyboard.press("Alt+.")
    expect(page.locator("#session-list .choose").nth(1)).to_have_attribute("aria-current", "true")
    page.keyboard.press("Alt+w")
    expect(page.locator("#session-list li")).to_have_count(1)
    page.keyboard.press("ArrowUp")
    expect(page.locator(".editor textarea")).to_be_focused()
    page.keyboard.press("Escape")
    page.keyboard.press("Alt+s")
    expect(page.locator("#settings")).to_be_visible()
    page.keyboard.press("Escape")
    for number, view in enumerate(("talk", "timeline", "memory", "health"), 1):
        page.keyboard.press(f"Alt+{number}")
        expect(page.locator(f"#{view}")).to_be_visible()
    page.keyboard.press("?")
    expect(page.locator("#help")).to_be_visible()
    expect(page.locator("#keys dt")).to_have_count(19)
    page.keyboard.press("Escape")
    looks = []
    for _ in range(3):
        page.keyboard.press("Alt+l")
        looks.append(page.evaluate("getComputedStyle(document.documentElement).colorScheme"))
    assert looks == ["dark", "light", "light dark"]


def test_the_look_that_was_chosen_is_there_after_a_reload(server: Server, open_page: OpenPage) -> None:
    page = open_page(server, color_scheme="light")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.click("#look")
    dark = page.evaluate(ground)
    assert dark != light
    page.reload()
    assert page.evaluate(ground) == dark


def test_a_session_that_is_lost_is_begun_again_with_what_was_said(serve: Serve, open_page: OpenPage) -> None:
    server = serve("--kv-tokens", "65536")
    page = open_page(server)
    say(page, "before")
    finished(page, 1)
    (session,) = server.get("/v1/sessions").json()["sessions"]
    server.http.delete(f"/v1/sessions/{session['id']}")
    expect(page.locator("#branch")).to_have_text("This session is closed.")
    say(page, "after")
    expect_answers(page, "before", "after")
