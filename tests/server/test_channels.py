"""What a server keeps of realtime connections that are gone, without sockets: bounded, and nobody waits."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.server.link import wire
from holdfast.server.routes import realtime_channels
from holdfast.server.routes.realtime_channel import Channel
from holdfast.server.routes.realtime_channels import Channels
from holdfast.server.routes.realtime_outbox import BYTES_LOW, Outbox
from holdfast.server.seeds import Seeds
from holdfast.server.service import Service
from holdfast.server.sessions import SessionRecord, SessionTable

CONNECTIONS = 12
KEPT = 4


def made(channels: Channels, name: str) -> tuple[Channel, Outbox]:
    """The channel of a session, and a connection to it."""
    view = wire.SessionView(f"a/{name}", 0, None, 0)
    channel = channels.of(SessionRecord("a", name, view, Seeds(None).of_session("a", name)))
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
