"""One engine over TCP, as an API process reaches it: the link is made, watched, and made again if it breaks.

    connect, TLS --> Greeting, Welcome, Ready --> commands and reports --> broken or silent --> wait, connect

Both ends send heartbeats. A link of which nothing was heard for too long is broken: silence is counted in
time that this process was running, as the supervisor counts it. An engine in a long step is silent too, but
goes on renewing its life in the journal: where another engine can ask a journal that they share, a silent one
that does not is given up early. When a link breaks, every call and turn on it fails; the engine ends those
turns at its end. Everything here runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
from collections.abc import Awaitable, Callable

import msgspec

from holdfast.server.http.problems import Problem, engine_unavailable, link_lost
from holdfast.server.link import wire
from holdfast.server.link.addresses import split_address
from holdfast.server.link.channel import Channel
from holdfast.server.link.engine_client import EngineClient, TurnFeed
from holdfast.server.link.lived_time import LivedTime
from holdfast.server.link.secure_socket import BoundedFrames, FrameTooLong, reason_of, set_timeouts

__all__ = ["UNSENT_MAX", "LinkBroken", "RemoteEngine", "turn_lost"]

log = logging.getLogger("holdfast.server")

CONNECT_SECONDS = 10.0
RECONNECT_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
BEAT_SECONDS = 0.5
SUSPECT_SECONDS = 2.0
"""Silence after which the journal is asked for the engine's life, which is renewed every half second."""
UNSENT_MAX = 64 << 20
"""Bytes that wait for an engine; commands that begin something are refused beyond."""

ALWAYS_SENT = (wire.EndTurn, wire.CloseSession, wire.Interrupt, wire.Hear)
"""Commands that make room at the engine, or take something back."""


class LinkBroken(RuntimeError):
    """A link has ended; the message says why."""


class LinkChannel(Channel):
    """The API process's end of one connection."""

    def __init__(self, hear: Callable[[bytes], None], alive: Callable[[], None]) -> None:
        super().__init__(hear)
        self._alive = alive
        self._frames = BoundedFrames()

    @property
    def unsent(self) -> int:
        """Bytes that the network has not taken."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def data_received(self, data: bytes) -> None:
        self._alive()
        super().data_received(data)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        why = "the engine closed the link" if error is None else told_error(error)
        self.break_off(why)

    def break_off(self, why: str) -> None:
        """End the link."""
        if not self.ended.done():
            self.ended.set_exception(LinkBroken(why))


class RemoteEngine:
    """One engine at one address."""

    def __init__(
        self,
        address: str,
        client: EngineClient,
        context: ssl.SSLContext,
        link_seconds: float,
        greeting: Callable[[str], wire.Greeting],
        judge: Callable[[RemoteEngine, wire.Welcome], str | None],
        is_gone: Callable[[RemoteEngine], Awaitable[bool]] | None = None,
    ) -> None:
        """`judge` says why an engine that welcomes this process is not wanted; None if it is.

        `is_gone` says whether the journal has not heard of the engine either; None where nobody can ask it.
        """
        self.address = address
        self.client = client
        self.welcome: wire.Welcome | None = None
        """What the engine said of itself last."""
        self.facts: wire.ModelFacts | None = None
        self.lost = 0
        """How often a link that served broke."""
        self.placed = 0
        """Sessions and requests that were placed here since the last pulse."""
        self._host, self._port = split_address("engine", address)
        self._context = context
        self._link_seconds = link_seconds
        self._greeting = greeting
        self._judge = judge
        self._is_gone = is_gone
        self._tick = min(BEAT_SECONDS, link_seconds / 4)
        self._silence = LivedTime(self._tick)
        self._complained = ""

    @property
    def name(self) -> str:
        """The engine's own name, once it is known."""
        return self.address if self.welcome is None else self.welcome.engine

    @property
    def up(self) -> bool:
        """Whether the engine serves."""
        return self.client.connected

    @property
    def last_pulse(self) -> wire.Pulse | None:
        """The engine's last heartbeat."""
        return self.client.pulse

    @property
    def draining(self) -> bool:
        """Whether the engine takes nothing new."""
        return self.client.pulse is not None and self.client.pulse.draining

    async def run(self) -> None:
        """Keep a link to the engine until cancelled."""
        failures = 0
        while True:
            served = self.lost
            try:
                await self._one_link()
            except (LinkBroken, FrameTooLong, OSError, TimeoutError) as error:
                self._complain(told_error(error))
            except msgspec.MsgspecError as error:
                self._complain(f"a message that cannot be read: {error}")
            except Exception as error:
                # One engine's mistake is not the others'.
                log.error("a report of the engine at %s failed", self.address, exc_info=error)
            failures = 0 if self.lost > served else failures + 1
            pause = RECONNECT_SECONDS[min(failures, len(RECONNECT_SECONDS) - 1)]
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))

    async def _one_link(self) -> None:
        """One link from its start to its end, which is raised."""
        loop = asyncio.get_running_loop()
        channel = LinkChannel(lambda frame: self._hear(frame, channel), self._silence.reset)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                transport, _ = await loop.create_connection(
                    lambda: channel, self._host, self._port, ssl=self._context
                )
            set_timeouts(transport.get_extra_info("socket"), self._link_seconds)
            self._silence.reset()
            channel.send(wire.encode(self._greeting(self.address)))
            watching = asyncio.create_task(self._watch(channel))
            try:
                await channel.ended
            finally:
                watching.cancel()
        finally:
            turns, served = self.client.turns, self.up
            self.lost += served
            self.client.lose()
            channel.close()
            if served:
                fields = {"engine": self.name, "address": self.address, "turns": turns}
                log.warning("the link to an engine is lost", extra={"fields": fields})

    def _hear(self, frame: bytes, channel: LinkChannel) -> None:
        """One report of the engine."""
        report = wire.decode_report(frame)
        match report:
            case wire.Welcome():
                refused = self._judge(self, report)
                if refused is not None:
                    raise LinkBroken(refused)
                self.welcome = report
            case wire.Unable():
                raise LinkBroken(f"the engine refused the link: {report.message}")
            case wire.Ready():
                if self.welcome is None:
                    raise LinkBroken("the engine did not say who it is")
                self.facts = report.facts
                self.placed = 0
                self._complained = ""
                log.info(
                    "an engine is connected",
                    extra={"fields": {"engine": self.name, "address": self.address}},
                )
                self.client.connect(lambda command: self._post(channel, command))
                self.client.hear(report)
            case wire.Progress():
                pass
            case wire.Pulse():
                self.placed = 0
                self.client.hear(report)
            case _:
                self.client.hear(report)

    def _post(self, channel: LinkChannel, command: wire.Command) -> None:
        if channel.unsent > UNSENT_MAX and not isinstance(command, ALWAYS_SENT):
            raise engine_unavailable()
        channel.send(wire.encode(command))

    async def _watch(self, channel: LinkChannel) -> None:
        """Send heartbeats, and break a link of which nothing is heard for too long."""
        while True:
            await asyncio.sleep(self._tick)
            channel.send(wire.encode(wire.Beat()))
            silent = self._silence.tick()
            if silent > self._link_seconds:
                channel.break_off(f"nothing was heard of it for {silent:.1f} s")
            elif silent > SUSPECT_SECONDS and self._is_gone is not None and await self._is_gone(self):
                channel.break_off(f"neither this process nor the journal has heard of it for {silent:.1f} s")

    def _complain(self, why: str) -> None:
        """Log why there is no link, once for each reason in a row."""
        level = logging.DEBUG if why == self._complained else logging.WARNING
        self._complained = why
        log.log(level, "no link to the engine at %s: %s", self.address, why)


def told_error(error: BaseException) -> str:
    """Why a connection failed."""
    if isinstance(error, ssl.SSLError):
        return reason_of(error)
    if isinstance(error, TimeoutError) and not str(error):
        return f"no answer within {CONNECT_SECONDS:.0f} s"
    return str(error) or type(error).__name__


def turn_lost(feed: TurnFeed) -> Problem:
    """The error of a turn whose link has broken; it names the turn."""
    return link_lost(feed.name.rpartition("#")[2])
