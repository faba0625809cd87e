"""How sessions are kept, over HTTP: settings, hidden sessions that give way, prompts computed ahead."""

import asyncio
import time
from typing import Any

import httpx
import pytest

from holdfast.client import AsyncClient, Client
from holdfast.server.closed_sessions import TURN_SIZE, ClosedSessions
from holdfast.server.hidden_sessions import HiddenSessions
from holdfast.server.link import wire
from holdfast.server.seeds import Seeds
from holdfast.server.sessions import SessionRecord, SessionTable, hidden_name
from tests.server.conftest import Serve
from tests.server.serving import Server
from tests.server.talking import Talk

SETTINGS = ("ttl", "pin", "priority", "keep_reasoning")


def settings(shown: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(shown[name] for name in SETTINGS)


def patch(server: Server, name: str, **change: Any) -> httpx.Response:
    return server.http.patch(f"/v1/sessions/{name}", json=change)


# --- settings -----------------------------------------------------------------------------------------


def test_settings_are_given_shown_changed_and_inherited(echo: Server) -> None:
    name = echo.open("kept", ttl=60, pin=True, priority=3, keep_reasoning=False)
    assert settings(echo.state(name)) == (60, True, 3, False)
    plain = echo.open("plain")
    assert settings(echo.state(plain)) == (3600, False, 0, True)
    changed = patch(echo, name, priority=-4, metadata={"a": 1})
    assert changed.status_code == 200
    assert settings(changed.json()) == (60, True, -4, False) and changed.json()["metadata"] == {"a": 1}
    assert settings(patch(echo, name, ttl=None, pin=False).json()) == (3600, False, -4, False)
    assert echo.state(name)["metadata"] == {"a": 1}
    child = echo.post(f"/v1/sessions/{name}/fork", {"id": "child"}).json()
    assert settings(child) == (3600, False, -4, False)
    listed = {each["id"]: settings(each) for each in echo.get("/v1/sessions").json()["sessions"]}
    assert listed["kept"] == (3600, False, -4, False)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ttl", 0),
        ("ttl", -1),
        ("ttl", 1e9),
        ("pin", "yes"),
        ("priority", 5),
        ("priority", 1.5),
        ("keep_reasoning", 1),
        ("colour", "red"),
    ],
)
def test_a_bad_setting_gets_400_with_its_name(echo: Server, field: str, value: object) -> None:
    name = echo.open()
    for answer in (patch(echo, name, **{field: value}), echo.post("/v1/sessions", {field: value})):
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == field
    assert settings(echo.state(name)) == (3600, False, 0, True)
    assert patch(echo, "nobody", pin=True).status_code == 404


def test_a_connection_opens_and_changes_a_session(echo: Server) -> None:
    with Talk(echo) as talk:
        opened = talk.open("talk", ttl=600, pin=True, priority=1)
        assert settings(opened) == (600, True, 1, True)
        talk.say("session.change", priority=2, ttl=None)
        changed = talk.hear("session.changed")
        assert settings(changed) == (3600, True, 2, True)
        talk.say("session.change", priority=9)
        assert talk.hear("error")["error"]["param"] == "priority"
    assert settings(echo.state("talk")) == (3600, True, 2, True)


def test_both_clients_change_settings(echo: Server) -> None:
    with Client(echo.url) as client, client.session(pin=True, keep_reasoning=False) as session:
        view = session.update(priority=2, ttl=90)
        assert (view.ttl, view.pin, view.priority, view.keep_reasoning) == (90, True, 2, False)
        assert session.update(ttl=None).ttl == 3600

    async def story() -> None:
        async with AsyncClient(echo.url) as client:
            session = await client.session(priority=-1)
            view = await session.update(pin=True, metadata={"b": 2})
            assert (view.pin, view.priority, view.metadata) == (True, -1, {"b": 2})
            await session.close()

    asyncio.run(story())


# --- hidden sessions ----------------------------------------------------------------------------------


def table_of(**held: tuple[int, int]) -> SessionTable:
    """Tenants with so many sessions of their own, and so many hidden ones."""
    table = SessionTable()
    for tenant, (own, hidden) in held.items():
        names = [f"s{number}" for number in range(own)]
        for name in [*names, *(hidden_name(str(number)) for number in range(hidden))]:
            view = wire.SessionView(f"{tenant}/{name}", 0, None, 0)
            table.add(SessionRecord(tenant, name, view, Seeds(1).of_session(tenant, name)))
    return table


def test_the_own_hidden_session_gives_way_then_that_of_a_tenant_beyond_its_share() -> None:
    hidden = HiddenSessions(table_of(ann=(1, 2), bob=(4, 3), cid=(0, 2), dan=(1, 0)))

    def names(tenant: str) -> tuple[str, str] | None:
        victim = hidden.victim(tenant)
        return None if victim is None else (victim.tenant, victim.name)

    assert names("ann") == ("ann", "~0"), "its own, although others have more"
    hidden.busy |= {("ann", "~0")}
    assert names("ann") == ("ann", "~1")
    assert names("dan") == ("bob", "~0"), "3.25 each: only one tenant has more"
    hidden.busy |= {("bob", f"~{number}") for number in range(3)}
    assert names("dan") is None, "cid has less than its share"


def test_what_is_kept_of_closed_hidden_sessions_is_forgotten() -> None:
    table = table_of(ann=(1, 2))
    heard: list[tuple[str, str]] = []
    table.subscribe(lambda key, why: heard.append((key, why)))
    table.remove("ann/~0", "closed")
    assert heard == [("ann/~0", "closed")]
    assert table.counts() == {"ann": 2}


def ask(server: Server, said: str, **fields: Any) -> httpx.Response:
    return server.post("/v1/responses", {"input": said, "max_output_tokens": 5, **fields})


def test_hidden_sessions_give_way_to_those_that_clients_open(serve: Serve) -> None:
    server = serve("echo", "--max-sessions", "4", "--audit", "strict")
    talk = server.post("/v1/conversations", {}).json()["id"]
    responses = [ask(server, f"word {number}").json()["id"] for number in range(3)]
    assert server.get(f"/v1/responses/{responses[0]}").status_code == 200, "it is the last to go now"
    names = [server.open() for _ in range(3)]
    assert len(server.get("/v1/sessions").json()["sessions"]) == 3
    found = [server.get(f"/v1/responses/{each}").json() for each in responses]
    assert [each["id"] for each in found] == responses, "what was said is kept"
    assert server.get(f"/v1/conversations/{talk}").status_code == 404
    more = ask(server, "and then?", previous_response_id=responses[0])
    assert more.status_code == 200
    forked = server.post(f"/v1/sessions/{names[0]}/fork", {})
    assert forked.status_code == 201
    assert server.get(f"/v1/responses/{responses[0]}").status_code == 200
    refused = server.post("/v1/sessions", {})
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_sessions")
    refused = ask(server, "no room")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_sessions")
    assert ask(server, "no room", store=False).status_code == 200


def items_of(server: Server, response: str) -> list[Any]:
    listed = server.get(f"/v1/responses/{response}/input_items").json()["data"]
    return [*listed, *server.get(f"/v1/responses/{response}").json()["output"]]


def test_a_response_goes_on_after_its_session_was_closed_for_room(serve: Serve) -> None:
    server = serve("echo", "--max-sessions", "3", "--audit", "strict")
    first = ask(server, "one and two").json()
    second = ask(server, "three", previous_response_id=first["id"]).json()
    before = [items_of(server, each["id"]) for each in (first, second)]
    names = [server.open() for _ in range(3)]
    assert len(server.get("/v1/sessions").json()["sessions"]) == 3
    for name in names[1:]:
        assert server.http.delete(f"/v1/sessions/{name}").status_code == 200
    assert [items_of(server, each["id"]) for each in (first, second)] == before
    third = ask(server, "four", previous_response_id=second["id"]).json()
    again = [(first, "one and two"), (second, "three")]
    whole: list[dict[str, Any]] = []
    for response, said in again:
        whole += [{"role": "user", "content": said}]
        whole += [{"role": "assistant", "content": response["output"][0]["content"][0]["text"]}]
    stateless = server.post(
        "/v1/responses",
        {"input": [*whole, {"role": "user", "content": "four"}], "max_output_tokens": 5, "store": False},
    ).json()
    assert third["usage"]["input_tokens"] == stateless["usage"]["input_tokens"], "all of it was rendered"
    assert third["output"][0]["content"] == stateless["output"][0]["content"]
    fourth = ask(server, "five", previous_response_id=third["id"]).json()
    assert fourth["usage"]["input_tokens_details"]["cached_tokens"] == third["usage"]["total_tokens"]
    other = ask(server, "other", previous_response_id=first["id"]).json()
    assert other["usage"]["input_tokens"] < third["usage"]["input_tokens"], "it branches off"
    referred = {"input": [{"type": "item_reference", "id": before[0][0]["id"]}], "max_output_tokens": 5}
    assert server.post("/v1/responses", referred).status_code == 200
    for each in (first, second):
        assert server.http.delete(f"/v1/responses/{each['id']}").status_code == 200
        assert server.get(f"/v1/responses/{each['id']}").status_code == 404
        gone = ask(server, "gone", previous_response_id=each["id"])
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "previous_response_not_found")
    assert server.get(f"/v1/responses/{third['id']}").status_code == 200


def noted(name: str, size: int) -> wire.NotedTurn:
    return wire.NotedTurn(1, name, "n" * size, "finished", "stop", "", 1, 0, 1)


def test_what_closed_sessions_said_is_bounded_for_each_tenant() -> None:
    closed = ClosedSessions(3 * (TURN_SIZE + 100))
    for number in range(4):
        closed.keep("ann", f"~{number}", {}, [noted("t", 100)])
    closed.keep("bob", "~0", {}, [noted("t", 100)])
    closed.keep("bob", "~1", {}, [])
    closed.keep("bob", "~2", {}, [noted("t", 10_000)])
    assert [closed.find("ann", f"~{number}") is not None for number in range(4)] == [False, True, True, True]
    assert [closed.find("bob", f"~{number}") is not None for number in range(3)] == [True, False, False]
    found = closed.find("ann", "~2")
    assert found is not None and [turn.name for turn in found.turns] == ["t"]
    closed.forget(found)
    closed.keep("ann", "~4", {}, [noted("t", 100)])
    assert [closed.find("ann", f"~{number}") is not None for number in (1, 2, 4)] == [True, False, True]


def test_responses_are_kept_longer_than_sessions(serve: Serve) -> None:
    server = serve("echo", "--session-ttl", "0.2")
    kept = ask(server, "one").json()["id"]
    name = server.open()
    deadline = time.monotonic() + 30
    while server.get(f"/v1/sessions/{name}").status_code == 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    more = ask(server, "two", previous_response_id=kept).json()
    assert more["usage"]["input_tokens_details"]["cached_tokens"] > 0, "its session is open"


# --- prompts computed ahead ---------------------------------------------------------------------------

WORDS = "Of the rivers that we know, most run to the sea and some of them do not. " * 8


def test_a_prompt_is_computed_ahead_and_its_answer_computes_the_difference(echo: Server) -> None:
    told = {"instructions": WORDS, "input": "Name one."}
    warmed = echo.post("/v1/responses", {**told, "prompt_cache_options": {"prewarm": True}}).json()
    assert (warmed["status"], warmed["output"], warmed["incomplete_details"]) == ("completed", [], None)
    usage = warmed["usage"]
    assert (usage["output_tokens"], usage["input_tokens_details"]["cached_tokens"]) == (0, 0)
    assert warmed["store"] is False
    assert echo.get(f"/v1/responses/{warmed['id']}").status_code == 404
    answered = echo.post("/v1/responses", {**told, "max_output_tokens": 9}).json()
    assert answered["usage"]["input_tokens"] == usage["input_tokens"]
    left = usage["input_tokens"] - answered["usage"]["input_tokens_details"]["cached_tokens"]
    assert 1 <= left <= 16, "the last page at most"
    assert echo.http.delete(f"/v1/responses/{answered['id']}").status_code == 200
    other = echo.post("/v1/responses", {"instructions": WORDS, "input": "Another.", "store": False}).json()
    assert other["usage"]["input_tokens_details"]["cached_tokens"] >= len(WORDS) // 16 * 16 - 16


def test_a_prompt_computed_ahead_can_be_streamed(echo: Server) -> None:
    body = {"input": WORDS, "prompt_cache_options": {"prewarm": True}, "stream": True}
    with echo.http.stream("POST", "/v1/responses", json=body) as answer:
        kinds = [line.removeprefix("event: ") for line in answer.iter_lines() if line.startswith("event: ")]
    assert kinds == ["response.created", "response.in_progress", "response.completed"]


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("prompt_cache_options.prewarm", {"prompt_cache_options": {"prewarm": 1}}),
        ("previous_response_id", {"previous_response_id": "resp_x"}),
        ("conversation", {"conversation": "conv_x"}),
        ("background", {"background": True}),
    ],
)
def test_what_cannot_be_computed_ahead_is_refused(echo: Server, field: str, fields: dict[str, Any]) -> None:
    answer = echo.post("/v1/responses", {"input": "x", "prompt_cache_options": {"prewarm": True}, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
