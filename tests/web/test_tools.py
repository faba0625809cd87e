"""Reasoning and tool calls on the page: the model repeats what it is told, so the user says them."""

import json

from playwright.sync_api import Page, expect

from tests.server.serving import Server
from tests.web.conftest import OpenPage, Serve
from tests.web.test_page import expect_answers, finished, say

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    for name in ("price", "weather")
]
THOUGHT = "<think>a city far away</think>"


def call(name: str, city: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"city": "{city}"}}}}\n</tool_call>'


def serve_reasoning(serve: Serve) -> Server:
    return serve("--kv-tokens", "65536", "--audit", "strict", "--reasoning-parser", "think")


def offer(page: Page, text: str) -> None:
    """Open a session with tools."""
    if not page.locator("#settings").is_visible():
        page.click("#settings-open")
    page.fill("#tools", text)
    page.click("#settings-begin")


def test_reasoning_is_folded_and_can_be_opened(serve: Serve, open_page: OpenPage) -> None:
    page = open_page(serve_reasoning(serve))
    say(page, f"{THOUGHT}Rome")
    finished(page, 1)
    expect_answers(page, "Rome")
    folded = page.locator(".turn .reasoning")
    expect(folded.locator("summary")).to_have_text("Thought: 15 characters")
    expect(folded.locator("div")).to_be_hidden()
    folded.locator("summary").click()
    expect(folded.locator("div")).to_have_text("a city far away")


def test_a_call_is_a_card_and_its_result_is_sent(serve: Serve, open_page: OpenPage) -> None:
    server = serve_reasoning(serve)
    page = open_page(server)
    offer(page, json.dumps(TOOLS))
    expect(page.locator("#branch")).to_contain_text("tools: price, weather")
    say(page, f"{THOUGHT}I look. {call('price', 'Rome')}")
    finished(page, 1)
    card = page.locator(".call")
    expect(card.locator("strong")).to_have_text("price")
    expect(card.locator(".arguments")).to_have_text('{\n  "city": "Rome"\n}')
    expect_answers(page, "I look.")
    card.locator("input").fill("120 <b>euros</b>")
    card.locator("button").click()
    finished(page, 2)
    expect(card.locator(".result")).to_have_text("120 <b>euros</b>")
    expect(card.locator("form")).to_be_hidden()
    # The turn with the result has no words of the user, and repeats what the model was told.
    expect(page.locator(".turn").last.locator(".said")).to_be_hidden()
    expect(page.locator(".turn").last.locator(".answer")).to_contain_text("120 <b>euros</b>")
    assert [session["turns"] for session in server.get("/v1/sessions").json()["sessions"]].count(2) == 1


def test_all_calls_are_answered_together(serve: Serve, open_page: OpenPage) -> None:
    page = open_page(serve_reasoning(serve))
    sent: list[str] = []
    page.on("websocket", lambda socket: socket.on("framesent", lambda frame: sent.append(str(frame))))
    page.reload()
    offer(page, json.dumps(TOOLS))
    say(page, f"{call('price', 'Rome')}\n{call('weather', 'Oslo')}")
    finished(page, 1)
    expect(page.locator(".call")).to_have_count(2)
    for place, result in enumerate(("120", "sunny")):
        card = page.locator(".call").nth(place)
        card.locator("input").fill(result)
        card.locator("input").press("Enter")
    finished(page, 2)
    appended = [json.loads(frame) for frame in sent if '"messages"' in frame]
    assert [[(each["role"], each["content"]) for each in one["messages"]] for one in appended] == [
        [("tool", "120"), ("tool", "sunny")]
    ]
    opened = [json.loads(frame) for frame in sent if '"session.open"' in frame and '"tools"' in frame]
    assert [one["tools"] for one in opened] == [TOOLS]


def test_saying_something_else_leaves_calls_unanswered(serve: Serve, open_page: OpenPage) -> None:
    page = open_page(serve_reasoning(serve))
    offer(page, json.dumps(TOOLS))
    say(page, call("price", "Rome"))
    finished(page, 1)
    expect(page.locator(".call form")).to_be_visible()
    say(page, "never mind")
    finished(page, 2)
    expect(page.locator(".call form")).to_be_hidden()


def test_tools_are_checked_before_a_session_is_opened(serve: Serve, open_page: OpenPage) -> None:
    server = serve_reasoning(serve)
    page = open_page(server)
    expect(page.locator("#status")).to_have_text("Connected")
    expect(page.locator("#branch")).to_contain_text("Session ")
    before = page.text_content("#branch")
    for text, problem in (
        ("[{]", "This is not JSON"),
        ("{}", "must be an array"),
        ('[{"type": "web"}]', "Tool 1 must be"),
        ("[null]", "Tool 1 must be"),
    ):
        offer(page, text)
        expect(page.locator("#tools-problem")).to_contain_text(problem)
        assert page.text_content("#branch") == before
    offer(page, "")
    expect(page.locator("#tools-problem")).to_be_hidden()
    expect(page.locator("#branch")).not_to_have_text(before or "")


def test_markup_in_calls_and_reasoning_is_only_text(serve: Serve, open_page: OpenPage) -> None:
    page = open_page(serve_reasoning(serve))
    page.evaluate("window.harmed = false")
    offer(page, json.dumps(TOOLS))
    hostile = "<img src=x onerror='window.harmed = true'>"
    say(page, f"<think>{hostile}</think>{call('price', hostile)}")
    finished(page, 1)
    expect(page.locator(".reasoning div")).to_have_text(hostile)
    expect(page.locator(".call .arguments")).to_contain_text(hostile)
    assert page.evaluate("window.harmed") is False
    assert page.locator("main img, main script").count() == 0
