"""What an operator may do with engines that share a journal: look, drain, move and rebalance.

    status      the table of lives in the journal, with what each engine last said of itself
    move        one session at rest goes to another engine, with its memory
    rebalance   sessions at rest leave engines under memory pressure (`cluster.placement`)
    drain       all sessions of an engine go elsewhere, and it ends

Called by the routes of the admin, on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from holdfast.cluster.lives import ALIVE
from holdfast.cluster.placement import rebalance
from holdfast.server.http.problems import Problem, bad_field, engine_unavailable
from holdfast.server.link import wire
from holdfast.server.link.engine_set import EngineSet
from holdfast.server.link.loads import load_of
from holdfast.server.link.remote_engine import RemoteEngine
from holdfast.server.link.wire import Question

__all__ = ["ClusterControl"]

MOVED_MAX = 64
"""Sessions that one rebalancing moves from an engine."""

HEARD_SECONDS = 2.5
"""How long a rebalancing waits for the next heartbeats; engines send one a second."""

HEARD_TICK = 0.05

NOT_MOVED = frozenset({"session_busy", "session_not_found", "session_moved", "engine_not_found"})
"""Refusals of a move after which a rebalancing goes on with the next session."""


class ClusterControl:
    """The operator's hand on the engines of an API process."""

    def __init__(self, engines: EngineSet) -> None:
        self._engines = engines
        self._remotes = engines.remotes

    def _require_shared(self) -> None:
        if not self._remotes.shared:
            said = "the engines do not share a journal: give each `--journal postgresql://…`"
            raise Problem(409, "journal_not_shared", said)

    def _named(self, name: str) -> RemoteEngine:
        found = self._remotes.named(name)
        if found is None:
            known = ", ".join(sorted(each.name for each in self._remotes.engines.values()))
            raise bad_field("engine", f"is not an engine of this server; it has {known}", "engine_not_found")
        if not found.up:
            raise engine_unavailable()
        return found

    async def status(self) -> dict[str, Any]:
        """All engines: those of this process, and others that the journal knows.

        `fault` is why the journal could not be asked for them, None if it was.
        """
        known, fault = await self._remotes.lives() if self._remotes.shared else ([], None)
        unclaimed = sum(life["owned"] for life in known if life["life_state"] not in ALIVE)
        lives = {life.pop("name"): life for life in known if life["life_state"] in ALIVE}
        rows = [self._row(engine, lives.pop(engine.name, {})) for engine in self._remotes.engines.values()]
        others = [{"engine": name, "state": "unknown", **life} for name, life in lives.items()]
        shared, engines = self._remotes.shared, [*rows, *others]
        return {"shared": shared, "engines": engines, "unclaimed": unclaimed, "fault": fault}

    def _row(self, engine: RemoteEngine, life: dict[str, Any]) -> dict[str, Any]:
        state = "down" if not engine.up else "draining" if engine.draining else "up"
        row: dict[str, Any] = {"engine": engine.name, "address": engine.address, "state": state}
        pulse = engine.last_pulse
        if pulse is not None:
            load = load_of(0, pulse)
            row |= {
                "sessions": pulse.sessions,
                "running": pulse.running,
                "waiting": pulse.queued,
                "units_free": load.units - load.used,
                "units": load.units,
            }
        return {**row, **{name: value for name, value in life.items() if name != "address"}}

    async def move(self, session: str, engine: str) -> dict[str, Any]:
        """Hand a session over to an engine; how many bytes of memory were moved."""
        self._require_shared()
        self._named(engine)
        return await self._hand_over(session, engine)

    async def _hand_over(self, session: str, engine: str) -> dict[str, Any]:
        number = self._remotes.number()
        before = await self._engines.places.found(session)
        if before.name == engine:
            return {"session": session, "from": engine, "to": engine, "bytes": 0}
        done = await self._engines.call(wire.HandOver(number, session, engine), number)
        self._engines.places.directory.note(session, self._named(engine).address)
        self._engines.places.events.add(
            "moved", engine, session=session, origin=before.name, bytes=done.answer
        )
        return {"session": session, "from": before.name, "to": engine, "bytes": done.answer}

    async def drain(self, engine: str) -> None:
        """Let an engine hand its sessions over and end."""
        await self._remotes.ask(self._named(engine), wire.Drain(0))
        self._engines.places.events.add("drain", engine)

    async def rebalance(self) -> list[dict[str, Any]]:
        """Move sessions at rest away from engines under pressure; what was moved."""
        self._require_shared()
        up = [each for each in self._remotes.serving if each.last_pulse is not None and not each.draining]
        reports = [await self._reports(each) for each in up]
        pulses = enumerate(each.last_pulse for each in up)
        loads = {number: load_of(number, pulse) for number, pulse in pulses if pulse is not None}
        moved: list[dict[str, Any]] = []
        for number, load in loads.items():
            others = [other for life, other in loads.items() if life != number]
            idle = idle_first(reports[number])
            units = dict(idle)
            for move in rebalance(load, idle, others)[:MOVED_MAX]:
                try:
                    moved.append(await self._hand_over(move.session, up[move.target].name))
                except Problem as problem:
                    if problem.code not in NOT_MOVED:
                        raise
                    continue
                load.used -= units[move.session]
                loads[move.target].used += units[move.session]
        if moved:
            await self._heard_again(up)
        return moved

    async def _heard_again(self, engines: list[RemoteEngine]) -> None:
        """Wait for a heartbeat of each engine: a rebalancing that follows counts what this one has moved."""
        before = [each.last_pulse for each in engines]
        for _ in range(int(HEARD_SECONDS / HEARD_TICK)):
            if all(
                each.last_pulse is not old or not each.up for each, old in zip(engines, before, strict=True)
            ):
                return
            await asyncio.sleep(HEARD_TICK)

    async def _reports(self, engine: RemoteEngine) -> list[dict[str, Any]]:
        """An engine's sessions, as it reports them."""
        names = sorted(self._engines.places.directory.owned(engine.address))
        found: list[dict[str, Any]] = (
            await self._remotes.ask(engine, wire.Ask(0, Question.SESSIONS, names=names))
        ).answer
        return found


def idle_first(reports: Iterable[dict[str, Any]]) -> list[tuple[str, int]]:
    """Sessions at rest on the device with their units, the longest idle first."""
    resting = [each for each in reports if each["state"] == "IDLE"]
    resting.sort(key=lambda each: -float(each["idle_seconds"]))
    return [(each["id"], units_of(each)) for each in resting]


def units_of(report: dict[str, Any]) -> int:
    """The units that a session needs: its own, and those that it leases from the prefix tree."""
    held = report["memory"]
    most = max(int(held[name]["units"]) for name in ("window", "state"))
    return max(1, int(held["full"]["units"]) + int(held["leased"]["full"]), most)
