"""All realtime channels of an API process: found by session, kept for a while without a connection.

A client may come back to another API process than the one that it left. That one is then asked for the
channel (`fetch`): it ends its own connection, if it has one still, and gives up what it has kept.
"""

from __future__ import annotations

import asyncio
from itertools import islice

from holdfast.server.link import wire
from holdfast.server.link.engine_client import GiveUp
from holdfast.server.routes.realtime_channel import Channel
from holdfast.server.routes.realtime_outbox import Outbox
from holdfast.server.service import Service
from holdfast.server.sessions import SessionRecord, engine_name

__all__ = ["Channels"]

REPLAY_SECONDS = 300.0
DETACHED_MAX = 1024
TRIM_SECONDS = 1.0


class Channels:
    """The channels of a server; detached ones are kept for a while."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._channels: dict[str, Channel] = {}
        self._detached: dict[str, asyncio.TimerHandle] = {}
        self._trimming: asyncio.TimerHandle | None = None
        self._fetching: dict[str, asyncio.Task[None]] = {}
        self._giving: set[asyncio.Task[None]] = set()
        service.table.subscribe(self._removed)
        service.table.give_up(self._taken_up, self._leave)

    def __len__(self) -> int:
        return len(self._channels)

    async def fetch(self, record: SessionRecord) -> None:
        """Have the channel of an open session here, if another API process has kept it until now."""
        key = engine_name(record.tenant, record.name)
        if self.service.engines is None or key in self._channels:
            return
        fetching = self._fetching.get(key)
        if fetching is None:
            fetching = self._fetching[key] = asyncio.create_task(self._fetch(key, record))
            fetching.add_done_callback(lambda _: self._fetching.pop(key))
        await asyncio.shield(fetching)

    async def _fetch(self, key: str, record: SessionRecord) -> None:
        number = self.service.link.number()
        done = await self.service.link.call(wire.FetchMissed(number, key), number)
        if done.answer is not None and self.service.table.get(record.tenant, record.name) is record:
            channel = self.of(record)
            channel.take_over(*done.answer)
            if channel.outbox is None:
                self._wait(channel)  # Its client may have gone meanwhile.

    def _taken_up(self, key: str, give: GiveUp) -> None:
        """The client of a session is at another API process now."""
        channel = self._channels.get(key)
        if channel is None:
            give(0, [])
            return
        giving = asyncio.create_task(self._give_up(channel, give))
        self._giving.add(giving)
        giving.add_done_callback(self._giving.discard)

    async def _give_up(self, channel: Channel, give: GiveUp) -> None:
        seq, kept = await channel.give_up()
        if channel.quiet and self._channels.get(channel.key) is channel:
            self._forget(channel.key)
        give(seq, kept)

    def _leave(self) -> None:
        """This process ends: engines keep for the others what their clients may have missed."""
        if self.service.engines is None:
            return
        for key, channel in self._channels.items():
            if channel.seq:
                self.service.link.send(wire.KeepMissed(key, channel.seq, channel.kept))

    def of(self, record: SessionRecord) -> Channel:
        """The channel of a session, made if it has none yet."""
        key = engine_name(record.tenant, record.name)
        timer = self._detached.pop(key, None)
        if timer is not None:
            timer.cancel()
        channel = self._channels.get(key)
        if channel is None:
            channel = self._channels[key] = Channel(self.service, record.tenant, record.name)
        return channel

    def last_number(self, record: SessionRecord) -> int:
        """The number of the last message of a session."""
        channel = self._channels.get(engine_name(record.tenant, record.name))
        return 0 if channel is None else channel.seq

    def detach(self, channel: Channel, outbox: Outbox) -> None:
        """Detach a connection; the channel stays until a reconnect or its timeout."""
        if channel.detach(outbox) and self._channels.get(channel.key) is channel:
            self._wait(channel)
            if self._trimming is None:
                self._trim()

    def _trim(self) -> None:
        """Forget the oldest quiet channels beyond the bound.

        Many connections may be lost at once while their turns run. Those turns end later, so the bound is
        checked again after a moment.
        """
        self._trimming = None
        over = max(0, len(self._detached) - DETACHED_MAX)
        quiet = (key for key in self._detached if self._channels[key].quiet)
        for key in list(islice(quiet, over)):
            self._forget(key)
        if len(self._detached) > DETACHED_MAX:
            self._trimming = asyncio.get_running_loop().call_later(TRIM_SECONDS, self._trim)

    def _wait(self, channel: Channel) -> None:
        loop = asyncio.get_running_loop()
        self._detached[channel.key] = loop.call_later(REPLAY_SECONDS, self._forget, channel.key)

    def _forget(self, key: str) -> None:
        timer = self._detached.pop(key, None)
        if timer is not None:
            timer.cancel()
        channel = self._channels[key]
        if channel.quiet:
            del self._channels[key]
        else:
            self._wait(channel)

    def _removed(self, key: str, why: str) -> None:
        """A session has ended."""
        timer = self._detached.pop(key, None)
        if timer is not None:
            timer.cancel()
        channel = self._channels.pop(key, None)
        if channel is not None:
            channel.end(why)
