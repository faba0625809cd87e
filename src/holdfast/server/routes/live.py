"""`WS /v1/memory/live`: who holds the memory, pushed as it changes.

Text messages are JSON: `memory.pools` when a map begins (or begins again, with another engine process),
`memory.holders` when holders come or go, `memory.report` once a second (what `GET /v1/memory` answers),
`health` once a second for the admin, `engine` when the engine goes or comes back. Binary messages are
differences between two maps, as `live.difference` writes them.

A client may send `{"type": "look", "session": NAME}` to get with each report (`memory.leased`) the shared
units that the session leases; without a name it gets none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.websockets import WebSocket, WebSocketDisconnect

from holdfast.core.ledger import Kind
from holdfast.server.http.bodies import decode_large
from holdfast.server.http.keys import Caller
from holdfast.server.http.problems import Problem
from holdfast.server.routes.access import caller_of
from holdfast.server.routes.realtime import accept
from holdfast.server.routes.status import memory_of, tenant_memory
from holdfast.server.sessions import engine_name
from holdfast.server.telemetry.live import LiveMemory, Picture, difference, shown_holders

__all__ = ["router"]

log = logging.getLogger("holdfast.server")

router = APIRouter()

_encoder = msgspec.json.Encoder()


class LookMessage(msgspec.Struct, tag="look", tag_field="type", forbid_unknown_fields=True):
    """Choose the session whose leased units are shown."""

    session: str | None = None


class Viewer:
    """One connection that watches the memory."""

    def __init__(self, websocket: WebSocket, live: LiveMemory, caller: Caller) -> None:
        self.websocket = websocket
        self.live = live
        self.caller = caller
        self.whose = memory_of(caller)
        self.picture: Picture | None = None
        self.holders: dict[int, list[Any]] = {}
        self.report: dict[str, Any] | None = None
        self.up: bool | None = None
        self.session: str | None = None

    async def run(self) -> None:
        """Send changes until the client disconnects."""
        self.live.enter(self.whose)
        showing = asyncio.create_task(self._until_closed(self._show()))
        watching = asyncio.create_task(self._until_closed(self._watch()))
        try:
            await asyncio.wait({showing, watching}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.live.leave(self.whose)
            for task in (showing, watching):
                task.cancel()
            results = await asyncio.gather(showing, watching, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _watch(self) -> None:
        while (message := await self.websocket.receive())["type"] != "websocket.disconnect":
            try:
                content = (message.get("text") or "").encode("utf-8", "surrogatepass")
                reading = self.live.service.reading(self.caller)
                self.session = (await decode_large(content, LookMessage, reading)).session
                await self._show_leased()
            except Problem as problem:
                await self._say("error", problem.body())

    async def _until_closed(self, work: Coroutine[Any, Any, None]) -> None:
        """Run until the connection is closed."""
        try:
            await work
        except (WebSocketDisconnect, RuntimeError) as error:
            log.debug("connection closed: %s", type(error).__name__)

    async def _show(self) -> None:
        while True:
            await self.live.news()
            await self._show_news()

    async def _show_news(self) -> None:
        live = self.live
        if live.up is not self.up:
            self.up = live.up
            await self._say("engine", {"up": live.up})
        picture, report = live.seen(self.caller, self.whose), live.reports.get(self.whose)
        if picture is not None and picture is not self.picture:
            await self._show_picture(picture)
        if report is not None and report is not self.report:
            self.report = report
            await self._say("memory.report", tenant_memory(report, self.caller))
            if self.caller.admin:
                storm = self.websocket.app.state.storm
                await self._say("health", {**live.figures.shown(), "storm": storm.shown()})
            await self._show_leased()

    async def _show_picture(self, picture: Picture) -> None:
        before = self.picture
        if before is not None and (before.life, before.pools) != (picture.life, picture.pools):
            before = None
        if before is None:
            self.holders = {}
            pools = [{"component": c, "tier": t, "units": n} for c, t, n in picture.pools]
            await self._say("memory.pools", {"pools": pools, "kinds": [kind.name for kind in Kind]})
        holders = shown_holders(picture.holders, self.caller)
        if holders != self.holders:
            come = [[number, *each] for number, each in holders.items() if self.holders.get(number) != each]
            gone = [number for number in self.holders if number not in holders]
            self.holders = holders
            await self._say("memory.holders", {"come": come, "gone": gone})
        self.picture = picture
        changes = difference(before, picture)
        await self.websocket.send({"type": "websocket.send", "bytes": changes})

    async def _show_leased(self) -> None:
        """Send the shared units that the chosen session leases; only the admin may choose others'."""
        name = self.session
        if name is None:
            return
        key = name if self.caller.admin and "/" in name else engine_name(self.caller.tenant, name)
        try:
            leased = await self.live.service.ask("leased", key)
        except Problem:
            leased = {}  # There is no such session.
        units = {pool: self._places(int(pool), each) for pool, each in leased.items()}
        await self._say("memory.leased", {"session": name, "units": units})

    def _places(self, pool: int, units: list[int]) -> list[int]:
        """The places of units in this viewer's map, without those that it does not show yet."""
        picture = self.picture
        if picture is None or pool >= len(picture.cells):
            return []
        places = (picture.place_of(pool, unit) for unit in units)
        return [place for place in places if place is not None]

    async def _say(self, kind: str, body: dict[str, Any]) -> None:
        text = _encoder.encode({"type": kind, **body}).decode()
        await self.websocket.send({"type": "websocket.send", "text": text})


@router.websocket("/v1/memory/live")
async def live_memory(websocket: WebSocket) -> None:
    live = websocket.app.state.live
    assert isinstance(live, LiveMemory)
    await accept(websocket)
    await Viewer(websocket, live, caller_of(websocket)).run()
