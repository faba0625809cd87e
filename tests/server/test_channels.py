"""What a server keeps of realtime connections that are gone, without sockets: bounded, and nobody waits."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.server.http.keys import Caller
from holdfast.server.http.problems import Problem
from holdfast.server.link import wire
from holdfast.server.routes import realtime_channels
from holdfast.server.routes.realtime import Conversation
from holdfast.server.routes.realtime_channel import REPLAY_BYTES_MAX, REPLAY_LAST_BYTES_MAX, Channel
from holdfast.server.routes.realtime_channels import Channels
from holdfast.server.routes.realtime_messages import OpenMessage
from holdfast.server.routes.realtime_outbox import BYTES_LOW, Outbox
from holdfast.server.seeds import Seeds
from holdfast.server.service import Service
from holdfast.server.sessions import SessionRecord, SessionTable

CONNECTIONS = 12
KEPT = 4


def session(name: str) -> SessionRecord:
    """A session as an API process knows it."""
    view = wire.SessionView(f"a/{name}", 0, None, 0)
    return SessionRecord("a", name, view, Seeds(None).of_session("a", name))


def made(channels: Channels, name: str) -> tuple[Channel, Outbox]:
    """The channel of a session, and a connection to it."""
    channel = channels.of(session(name))
    outbox = Outbox()
    channel.attach(outbox, {}, None)
    return channel, outbox


@pytest.fixture
def few_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(realtime_channels, "DETACHED_MAX", KEPT)
    monkeypatch.setattr(realtime_channels, "TRIM_SECONDS", 0.01)


def new_channels() -> Channels:
    service: Any = SimpleNamespace(table=SessionTable())
    return Channels(cast(Service, service))


@pytest.mark.usefixtures("few_kept")
def test_many_connections_are_lost_at_once_while_all_of_them_speak() -> None:
    """Whoever is over the bound is let go when its turn has ended, and not waited for."""

    async def lose() -> tuple[int, int]:
        channels = new_channels()
        over = asyncio.Event()

        async def under_way() -> None:
            await over.wait()

        lost = [made(channels, f"s{number}") for number in range(CONNECTIONS)]
        for channel, _ in lost:
            channel.hurry(under_way, {})
        for channel, outbox in lost:
            channels.detach(channel, outbox)
        speaking = len(channels)
        over.set()
        await asyncio.sleep(0.2)
        return speaking, len(channels)

    assert asyncio.run(asyncio.wait_for(lose(), 10)) == (CONNECTIONS, KEPT)


@pytest.mark.usefixtures("few_kept")
def test_the_oldest_connection_is_forgotten_first() -> None:
    async def lose() -> list[bool]:
        channels = new_channels()
        lost = [made(channels, f"s{number}") for number in range(CONNECTIONS)]
        for channel, outbox in lost:
            channels.detach(channel, outbox)
        return [made(channels, channel.name)[0] is channel for channel, _ in reversed(lost)]

    assert asyncio.run(lose()) == [True] * KEPT + [False] * (CONNECTIONS - KEPT)


def test_who_waits_for_a_reader_that_is_gone_waits_no_longer() -> None:
    async def lose() -> None:
        channels = new_channels()
        channel, outbox = made(channels, "slow")
        channel.emit("response.delta", {"text": "a" * (BYTES_LOW + 1)})
        waiting = asyncio.create_task(outbox.room())
        await asyncio.sleep(0)
        assert not waiting.done()
        channels.detach(channel, outbox)
        await asyncio.wait_for(waiting, 1)

    asyncio.run(lose())


# --- coming back ------------------------------------------------------------------------------------


def test_a_long_end_of_a_turn_is_kept_and_an_endless_one_is_not() -> None:
    """No message before one that is not kept can be replayed: a replay leaves nothing out."""
    channel, _ = made(new_channels(), "long")
    channel.emit("response.delta", {"text": "a" * REPLAY_BYTES_MAX})
    channel.emit("response.done", {"text": "b" * (REPLAY_LAST_BYTES_MAX - 100)})
    assert [seq for seq, _ in channel.kept] == [2]
    channel.emit("response.done", {"text": "c" * REPLAY_LAST_BYTES_MAX})
    assert channel.kept == []
    channel.emit("session.rewound", {})
    assert [seq for seq, _ in channel.kept] == [4]
    heard = []
    for last in (2, 3):
        outbox = Outbox()
        channel.attach(outbox, {}, last)
        heard.append(json.loads(outbox._texts[0]))
    assert [(each["resumed"], each["seq"]) for each in heard] == [(False, 4), (True, 3)]


def conversation(service: Any) -> Conversation:
    """A connection of tenant `a` to a server."""
    service.listening = SimpleNamespace(expect=lambda _: None)
    service.options = SimpleNamespace(body_limit=1 << 20)
    service.prompts = SimpleNamespace(room=SimpleNamespace(text_bytes=1 << 20))
    service.facts = SimpleNamespace(context_length=1 << 10, vocabulary=1 << 8)
    channels = Channels(cast(Service, service))
    nothing = cast(Any, None)
    return Conversation(nothing, cast(Service, service), Caller("a", admin=False), channels, Outbox())


@pytest.mark.parametrize("reopened", [False, True])
def test_nobody_is_attached_to_a_session_that_ends_while_it_is_described(reopened: bool) -> None:
    """Its end was told before: whoever were attached now would never hear of it."""
    table, record = SessionTable(), session("gone")
    table.add(record)

    async def known(_tenant: str, _name: str) -> SessionRecord:
        return record

    async def describe(_record: SessionRecord) -> dict[str, Any]:
        table.remove("a/gone", "closed")
        if reopened:
            table.add(session("gone"))
        return {"id": "gone"}

    sessions = SimpleNamespace(known=known, describe=describe)
    caller = conversation(SimpleNamespace(table=table, sessions=sessions, engines=None))
    with pytest.raises(Problem) as refused:
        asyncio.run(caller._open(OpenMessage(id="gone", resume_after_seq=0)))
    assert (refused.value.status, refused.value.param) == (404, "session_id")
    assert caller.channel is None and caller.pending is None and len(caller.channels) == 0


def test_messages_that_come_for_a_session_that_has_ended_are_not_kept() -> None:
    """The next session of its name would have them."""
    table, record = SessionTable(), session("gone")
    table.add(record)

    async def call(_command: wire.Command, number: int) -> wire.Done:
        table.remove("a/gone", "closed")
        return wire.Done(number, answer=(7, [(7, "an old message")]))

    link = SimpleNamespace(number=lambda: 1, call=call)
    service: Any = SimpleNamespace(table=table, link=link, engines=object())
    channels = Channels(cast(Service, service))
    asyncio.run(channels.fetch(record))
    assert len(channels) == 0
