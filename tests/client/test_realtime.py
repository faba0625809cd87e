"""Realtime conversations with a real server, in both clients: full duplex, cutting in, lost connections."""

import asyncio
import socket
from itertools import pairwise

import pytest

from holdfast.client import (
    AsyncClient,
    AsyncRealtime,
    BadRequest,
    Client,
    ConnectionFailed,
    NotFound,
    Realtime,
    RealtimeEvent,
    Retries,
)
from holdfast.client.dialogue import Dialogue

LONG = 30_000
AT_ONCE = Retries(attempts=3, first_seconds=0.0, longest_seconds=0.0)


def until(realtime: Realtime, kind: str, turn_id: str | None = None) -> list[RealtimeEvent]:
    """Everything up to an event of this kind."""
    heard = []
    for event in realtime:
        heard.append(event)
        if event.type == kind and turn_id in (None, event.turn_id):
            return heard
    raise AssertionError(f"it ended without {kind}: {[event.type for event in heard]}")


def drop(realtime: Realtime) -> None:
    """Break the connection as a network would: without a word."""
    assert realtime._connection is not None
    realtime._connection.socket.shutdown(socket.SHUT_RDWR)


def drop_async(realtime: AsyncRealtime) -> None:
    assert realtime._connection is not None
    realtime._connection.transport.abort()


def words(events: list[RealtimeEvent], turn_id: str) -> str:
    return "".join(e.text for e in events if e.type == "response.delta" and e.turn_id == turn_id)


def test_input_is_appended_while_the_model_speaks(client: Client) -> None:
    with client.session() as session, session.realtime() as realtime:
        realtime.append("one ")
        realtime.append("two")
        first = realtime.commit(max_tokens=50)
        realtime.append("three")
        second = realtime.commit(max_tokens=50)
        events = until(realtime, "response.done", second)
        assert (words(events, first), words(events, second)) == ("one two", "three")
        assert [e.type for e in events if e.type != "response.delta"] == [
            "session.opened", "response.started", "response.done", "response.started", "response.done",
        ]  # fmt: skip
        assert events[-1].result.usage.cached_tokens > 0
        numbers = [event.seq for event in events[1:] if event.seq is not None]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert realtime.last_seq == numbers[-1]
        assert session.turns == 2


def test_cutting_in(client: Client) -> None:
    with client.session() as session, session.realtime() as realtime:
        realtime.append("on and on ")
        first = realtime.commit(max_tokens=LONG, ignore_eos=True)
        heard = until(realtime, "response.delta", first)
        realtime.interrupt()
        rest = until(realtime, "response.done", first)
        ended = rest[-1].result
        assert ended.finish_reason == "abort"
        assert (words(heard + rest, first)).startswith(ended.text)
        realtime.append("again and again ")
        second = realtime.commit(max_tokens=LONG, ignore_eos=True)
        until(realtime, "response.delta", second)
        realtime.append("stop")
        third = realtime.commit(mode="interrupt", max_tokens=50)
        events = until(realtime, "response.done", third)
        assert words(events, third) == "stop"
        cut = next(e for e in events if e.type == "response.done" and e.turn_id == second)
        assert cut.result.finish_reason == "abort"
        assert session.turns == 3


def test_rewind_fork_and_close(client: Client) -> None:
    with client.session() as session, session.realtime() as realtime:
        for text in ("one", "two"):
            realtime.append(text)
            until(realtime, "response.done", realtime.commit(max_tokens=50))
        child = realtime.fork(at_turn=1)
        assert until(realtime, "session.forked")[-1].body["id"] == child
        realtime.rewind(0)
        rewound = until(realtime, "session.rewound")[-1]
        assert (rewound.body["turns"], rewound.error) == (0, None)
        with client.resume(child) as other:
            assert other.turns == 1
        realtime.append("")
        realtime.commit()
        wrong = until(realtime, "error")[-1].error
        assert isinstance(wrong, BadRequest)
        assert wrong.code == "empty_turn"
        realtime.close_session()
        assert [event.type for event in realtime] == ["session.closed"]
    with pytest.raises(NotFound):
        session.view()


def test_a_dropped_connection_goes_on_after_the_last_event(client: Client) -> None:
    with client.session() as session, session.realtime() as realtime:
        realtime.append("before ")
        first = realtime.commit(max_tokens=50)
        events = until(realtime, "response.done", first)
        drop(realtime)
        realtime.append("after")
        second = realtime.commit(max_tokens=50)
        events += until(realtime, "response.done", second)
        assert (words(events, first), words(events, second)) == ("before ", "after")
        numbered = [e.seq for e in events if e.seq is not None and e.type != "session.opened"]
        assert numbered == sorted(set(numbered)), "nothing twice, nothing out of order"
        assert sum(event.type == "session.opened" for event in events) == 2
        assert session.turns == 2


def test_a_drop_in_the_middle_of_a_turn_ends_it_once(client: Client) -> None:
    with client.session() as session, session.realtime() as realtime:
        realtime.append("long ")
        turn = realtime.commit(max_tokens=LONG, ignore_eos=True, on_abort="keep")
        events = until(realtime, "response.delta", turn)
        drop(realtime)
        events += until(realtime, "response.done", turn)
        deltas = [e for e in events if e.type == "response.delta"]
        places = [(e.body["index"], len(e.token_ids)) for e in deltas]
        assert all(at + size == following for (at, size), (following, _) in pairwise(places))
        assert sum(event.type == "response.started" for event in events) == 1
        assert events[-1].result.text.startswith(words(events, turn)[:10])
        assert session.turns == 1


def test_another_connection_hears_what_came_after(client: Client) -> None:
    with client.session() as session:
        with session.realtime() as realtime:
            realtime.append("one")
            until(realtime, "response.done", realtime.commit(max_tokens=50))
            seen = realtime.last_seq
            realtime.append("two")
            second = realtime.commit(max_tokens=50)
            until(realtime, "response.done", second)
        with client.resume(session.id).realtime(resume_after=seen) as again:
            events = until(again, "response.done")
            assert events[0].body["resumed"] is True
            assert (events[-1].turn_id, words(events, second)) == (second, "two")


def test_nobody_there() -> None:
    with Client("http://127.0.0.1:1", retries=AT_ONCE) as nobody:
        realtime = Realtime(nobody.url, {}, Dialogue("s"), AT_ONCE)
        with pytest.raises(ConnectionFailed, match="127"):
            realtime.__enter__()


def test_asynchronous(client: Client, url: str) -> None:
    async def run() -> None:
        async with (
            AsyncClient(url) as remote,
            await remote.session() as session,
            session.realtime() as realtime,
        ):
            await realtime.append("hello")
            first = await realtime.commit(max_tokens=50)
            said, second = "", ""
            async for event in realtime:
                said += event.text if event.type == "response.delta" else ""
                if event.type == "response.done" and event.turn_id == first:
                    drop_async(realtime)
                    await realtime.append(" again")
                    second = await realtime.commit(max_tokens=50)
                elif event.type == "response.done" and event.turn_id == second:
                    break
            assert said == "hello again"
            await realtime.rewind(1)
            await realtime.fork(at_turn=1)
            child = ""
            async for event in realtime:
                if event.type == "session.forked":
                    child = event.body["id"]
                    await realtime.append("on ")
                    await realtime.commit(max_tokens=LONG, ignore_eos=True)
                elif event.type == "response.delta":
                    await realtime.interrupt("none")
                elif event.type in ("response.done", "error"):
                    assert (event.type, event.result.token_ids) == ("response.done", ())
                    break
            await (await remote.resume(child)).close()
            assert (await session.view()).turns == 1
            await realtime.close_session()
            assert [event.type async for event in realtime][-1] == "session.closed"

    asyncio.run(run())


def test_a_rewind_and_a_fork_are_answered_by_the_next_connection(client: Client) -> None:
    with client.session() as session, session.realtime() as realtime:
        for said in ("one", "two"):
            realtime.append(said)
            until(realtime, "response.done", realtime.commit(max_tokens=20))
        # Said into a connection that is lost before anybody reads it.
        sent, realtime._send = realtime._send, lambda message: None  # type: ignore[method-assign]
        child = realtime.fork(at_turn=1)
        realtime.rewind(1)
        realtime._send = sent  # type: ignore[method-assign]
        drop(realtime)
        assert until(realtime, "session.forked")[-1].body["id"] == child
        assert until(realtime, "session.rewound")[-1].body["turns"] == 1
        assert session.turns == 1
        client.resume(child).close()


def test_a_fork_and_a_rewind_that_are_said_again_are_carried_out_once(client: Client) -> None:
    with client.session() as session, session.realtime() as realtime:
        for said in ("one", "two"):
            realtime.append(said)
            until(realtime, "response.done", realtime.commit(max_tokens=20))
        fork = {"type": "session.fork", "request_id": "r-fork"}
        made = [realtime._send(fork) or until(realtime, "session.forked")[-1].body["id"] for _ in range(2)]
        assert made[0] == made[1]
        assert len(client.sessions()) == 2
        rewind = {"type": "session.rewind", "to_turn": 1, "request_id": "r-rewind"}
        realtime._send(rewind)
        assert until(realtime, "session.rewound")[-1].body["turns"] == 1
        realtime.append("three")
        until(realtime, "response.done", realtime.commit(max_tokens=20))
        realtime._send(rewind)
        assert until(realtime, "session.rewound")[-1].body["turns"] == 2, "it had been carried out before"
        client.resume(made[0]).close()
