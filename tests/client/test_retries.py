"""Broken connections and servers that ask for patience, over real sockets: nothing is said or done twice."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.client import (
    AnswerChanged,
    AsyncClient,
    AsyncTurn,
    Client,
    Conflict,
    ConnectionFailed,
    NotFound,
    ProtocolError,
    Retries,
    Turn,
    Unavailable,
)
from tests.client.scripted import Answer, Asked, Scripted, answer, delta, done, refusal, stream

AT_ONCE = Retries(attempts=4, first_seconds=0.0, longest_seconds=0.0)
OPENED = answer({"id": "s-1"})
SILENT = Answer(silent=True)
WHOLE = stream(delta("one ", 1), delta("two", 2), done("one two", 1, 2))


def talk(*answers: Answer) -> tuple[list[str], list[Asked], Turn]:
    """Open a session and say something; the pieces, and what the server was asked."""
    with Scripted(OPENED, *answers) as server, Client(server.url, "a-key", retries=AT_ONCE) as client:
        turn = client.session().say("hi", max_tokens=9)
        return list(turn), server.asked[1:], turn


def talk_async(*answers: Answer) -> tuple[list[str], list[Asked], AsyncTurn]:
    async def run() -> tuple[list[str], list[Asked], AsyncTurn]:
        with Scripted(OPENED, *answers) as server:
            async with AsyncClient(server.url, "a-key", retries=AT_ONCE) as client:
                turn = await (await client.session()).say("hi", max_tokens=9)
                return [piece async for piece in turn], server.asked[1:], turn

    return asyncio.run(run())


Talk = Callable[..., tuple[list[str], list[Asked], Any]]
both = pytest.mark.parametrize("talk", [talk, talk_async], ids=["sync", "async"])


@both
def test_a_turn_and_its_result(talk: Talk) -> None:
    pieces, asked, turn = talk(WHOLE)
    assert pieces == ["one ", "two"]
    assert (turn.text, turn.token_ids, turn.finish_reason) == ("one two", (1, 2), "stop")
    assert (turn.usage.cached_tokens, turn.usage.completion_tokens, turn.timing.ttft_ms) == (4, 2, 2.0)
    assert [call.path for call in asked] == [f"/v1/sessions/{asked[0].path.split('/')[3]}/turns"]
    assert asked[0].headers["authorization"] == "Bearer a-key"
    assert asked[0].body["sampling"] == {"max_tokens": 9}


@both
@pytest.mark.parametrize(
    "first",
    [SILENT, refusal(503, "draining", Retry_After="0"), refusal(429, "queue_full", Retry_After="0")],
    ids=["silent", "503", "429"],
)
def test_a_turn_that_does_not_get_through_is_sent_again(talk: Talk, first: Answer) -> None:
    pieces, asked, _ = talk(first, first, WHOLE)
    assert pieces == ["one ", "two"]
    assert len(asked) == 3
    assert len({call.body["turn_id"] for call in asked}) == 1, "the same turn, so that it is done once"
    assert asked[0].body == asked[1].body == asked[2].body


@both
def test_a_stream_that_breaks_goes_on_where_it_was(talk: Talk) -> None:
    broken = stream(delta("one ", 1), broken=True)
    pieces, asked, turn = talk(broken, refusal(409, "session_busy"), WHOLE)
    assert pieces == ["one ", "two"]
    assert turn.text == "one two"
    assert len({call.body["turn_id"] for call in asked}) == 1


@both
def test_a_stream_that_ends_too_early_counts_as_broken(talk: Talk) -> None:
    assert talk(stream(delta("one ", 1)), WHOLE)[0] == ["one ", "two"]


@both
def test_another_answer_is_an_error_and_not_glued_on(talk: Talk) -> None:
    other = stream(delta("uno ", 7), done("uno dos", 7, 8))
    with pytest.raises(AnswerChanged):
        talk(stream(delta("one ", 1), broken=True), other)


@both
def test_patience_ends(talk: Talk) -> None:
    with pytest.raises(Unavailable, match="it is draining") as caught:
        talk(*[refusal(503, "draining", Retry_After="0")] * 4)
    assert (caught.value.status, caught.value.retry_after) == (503, 0.0)
    with pytest.raises(ConnectionFailed):
        talk(*[SILENT] * 4)


@both
def test_patience_begins_anew_with_every_word(talk: Talk) -> None:
    """As many breaks as one likes, if there is something new before each of them."""
    said = [delta(f"{number} ", number) for number in range(8)]
    text = "".join(f"{number} " for number in range(8))
    broken = [stream(*said[: number + 1], broken=True) for number in range(8)]
    pieces, asked, _ = talk(*broken, stream(*said, done(text, *range(8))))
    assert "".join(pieces) == text
    assert len(asked) == 9


@both
def test_a_refusal_is_not_sent_again(talk: Talk) -> None:
    with pytest.raises(Conflict) as caught:
        talk(refusal(409, "session_busy"))
    assert (caught.value.code, caught.value.param, caught.value.type) == ("session_busy", "a_param", "a_type")


def test_a_session_whose_opening_was_answered_into_the_void_is_open() -> None:
    with (
        Scripted(SILENT, refusal(409, "session_exists")) as server,
        Client(server.url, retries=AT_ONCE) as client,
    ):
        session = client.session(id="mine")
        assert session.id == "mine"
        assert [call.body["id"] for call in server.asked] == ["mine", "mine"]
    with (
        Scripted(refusal(409, "session_exists")) as server,
        Client(server.url, retries=AT_ONCE) as client,
        pytest.raises(Conflict),
    ):
        client.session(id="somebody's")


def test_an_address_of_another_service_is_said_to_be_one() -> None:
    page = Answer(200, (b"<html>hello</html>",), {"content-type": "text/html"})
    other = answer({"object": "something else"})
    with Scripted(page, page, other, other) as server, Client(server.url, retries=AT_ONCE) as client:
        for act in (client.session, client.models, client.models, client.sessions):
            with pytest.raises(ProtocolError, match="is this the URL of a Holdfast server"):
                act()
        assert len(server.asked) == 4, "nothing is tried again"


def test_closing_twice_is_no_error() -> None:
    with (
        Scripted(OPENED, SILENT, refusal(404, "session_not_found")) as server,
        Client(server.url, retries=AT_ONCE) as client,
    ):
        client.session().close()
        assert [call.method for call in server.asked] == ["POST", "DELETE", "DELETE"]


@pytest.mark.parametrize("gone", [refusal(404, "session_not_found"), refusal(410, "session_expired")])
def test_leaving_a_session_that_is_no_more_is_no_error(gone: Answer) -> None:
    async def leave(url: str) -> None:
        async with AsyncClient(url, retries=AT_ONCE) as client, await client.session():
            pass

    with Scripted(OPENED, gone, OPENED, gone) as server:
        with Client(server.url, retries=AT_ONCE) as client, client.session():
            pass
        asyncio.run(leave(server.url))
        assert [call.method for call in server.asked] == ["POST", "DELETE"] * 2


def test_forks_and_rewinds_are_the_same_when_they_are_sent_again() -> None:
    view = {"id": "s", "state": "IDLE", "turns": 1, "tokens": {"known": 1, "computed": 1}}
    answers = (OPENED, SILENT, answer({"id": "x"}), SILENT, answer(view), answer(view))
    with Scripted(*answers) as server, Client(server.url, retries=AT_ONCE) as client:
        session = client.session()
        fork = session.fork(at_turn=1)
        assert session.rewind(1).turns == 1
        bodies = [call.body for call in server.asked[1:5]]
        assert bodies[0] == bodies[1]
        assert bodies[2] == bodies[3]
        assert fork.id == bodies[0]["id"]


def test_nobody_there() -> None:
    with (
        Client("http://127.0.0.1:1", retries=AT_ONCE) as client,
        pytest.raises(ConnectionFailed, match=r"127\.0\.0\.1:1"),
    ):
        client.models()


def test_resuming_what_is_not_there() -> None:
    with (
        Scripted(refusal(404, "session_not_found")) as server,
        Client(server.url, retries=AT_ONCE) as client,
        pytest.raises(NotFound),
    ):
        client.resume("s-9")


def test_a_turn_that_was_left_is_not_sent_again() -> None:
    begun = stream(delta("one ", 1), delta("two ", 2), broken=True)
    with Scripted(OPENED, begun) as server, Client(server.url, retries=AT_ONCE) as client:
        turn = client.session().say("hi")
        assert next(turn) == "one "
        turn.close()
        assert "".join(turn) in ("", "two "), "what had arrived may be read"
        with pytest.raises(ConnectionFailed, match="left before its end"):
            turn.wait()
        assert len(server.asked) == 2


def test_a_turn_that_was_left_is_not_sent_again_by_a_task() -> None:
    async def run() -> int:
        begun = stream(delta("one ", 1), delta("two ", 2), broken=True)
        with Scripted(OPENED, begun) as server:
            async with AsyncClient(server.url, retries=AT_ONCE) as client:
                async with await (await client.session()).say("hi") as turn:
                    assert await anext(turn) == "one "
                assert "".join([piece async for piece in turn]) in ("", "two ")
                with pytest.raises(ConnectionFailed, match="left before its end"):
                    _ = turn.result
                return len(server.asked)

    assert asyncio.run(run()) == 2


def shown(name: str) -> dict[str, object]:
    return {"id": name, "state": "IDLE", "turns": 0, "tokens": {"known": 0, "computed": 0}}


PAGES = (
    answer({"sessions": [shown("a"), shown("b")], "next": "2"}),
    answer({"sessions": [], "next": "7"}),
    answer({"sessions": [shown("c")], "next": None}),
)


def test_a_list_of_sessions_is_read_to_its_last_page() -> None:
    async def listed_async(url: str) -> list[str]:
        async with AsyncClient(url, retries=AT_ONCE) as client:
            return [view.id for view in await client.sessions()]

    with Scripted(*PAGES, *PAGES) as server:
        with Client(server.url, retries=AT_ONCE) as client:
            assert [view.id for view in client.sessions()] == ["a", "b", "c"]
        assert asyncio.run(listed_async(server.url)) == ["a", "b", "c"]
    paths = ["/v1/sessions", "/v1/sessions?after=2", "/v1/sessions?after=7"]
    assert [asked.path for asked in server.asked] == 2 * paths


@pytest.mark.parametrize("more", [{}, {"next": 7}])
def test_a_list_without_pages_is_whole_and_a_cursor_is_text(more: dict[str, object]) -> None:
    with Scripted(answer({"sessions": [shown("a")], **more})) as server, Client(server.url) as client:
        if more:
            with pytest.raises(ProtocolError):
                client.sessions()
        else:
            assert [view.id for view in client.sessions()] == ["a"]
