"""What is over leaves nothing behind, in the engine or the API process: no entry of any table, list or heap.

All verbs are carried out on sessions that are closed afterwards, some by expiring, again and again.
Everything that can be reached from the engine's commands, or from the service, is walked, and entries of
containers are counted.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter, deque
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import pytest

from holdfast.core.deadlines import DUE_MAX
from holdfast.core.registry import EXPIRED_KEPT
from holdfast.server.http.problems import Problem
from holdfast.server.link import wire
from holdfast.server.sessions import GONE_KEPT
from holdfast.server.turn_request import Input, SessionGiven
from tests.server.joined import ANN, Joined, joined
from tests.server.test_one_end import VERBS, House

CYCLES = 12
CODE = (type, ModuleType, FunctionType, BuiltinFunctionType)
KEPT = {"Registry.expired": EXPIRED_KEPT, "SessionTable._gone": GONE_KEPT}
"""What is kept of sessions that are gone, and how many entries that may have."""


def entries(root: object) -> Counter[str]:
    """How many entries the containers have that can be reached, by class and attribute."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    pending: list[tuple[object, str]] = [(root, "")]
    while pending:
        each, place = pending.pop()
        if id(each) in seen or isinstance(each, CODE):
            continue
        seen.add(id(each))
        if isinstance(each, dict):
            found[place] += len(each)
            pending += [(inner, place) for pair in each.items() for inner in pair]
        elif isinstance(each, list | tuple | set | frozenset | deque):
            found[place] += len(each)
            pending += [(inner, place) for inner in each]
        elif type(each).__module__.startswith("holdfast"):
            pending += [(value, f"{type(each).__name__}.{name}") for name, value in attributes(each)]
        elif callable(each):  # A bound method, a partial: what it keeps.
            pending += [(inner, place) for inner in gc.get_referents(each)]
    return found


def attributes(each: object) -> list[tuple[str, Any]]:
    """The attributes of an object of ours, in slots or not."""
    slots = [name for kind in type(each).__mro__ for name in kind.__dict__.get("__slots__", ())]
    named = [(name, object.__getattribute__(each, name)) for name in slots if hasattr(each, name)]
    return [*named, *vars(each).items()] if hasattr(each, "__dict__") else named


async def cycle(house: House) -> None:
    """Every verb, alone and one after the other, on sessions that end."""
    await house.reset()
    for verb, act in VERBS.items():
        if verb != "engine loss":
            act(house)
            await house.round()
    house.call(lambda number: wire.OpenSession(number, f"{house.name}-brief", "ann", ttl=0.001))
    for _ in range(2 * DUE_MAX):  # Each with a deadline of its own, and gone before it.
        house.start(session=False, max_tokens=2, timeout=3600.0)
    await house.settled("a cycle")
    registry = house.loop.scheduler.registry
    while f"{house.name}-brief" in registry.sessions:
        house.loop.scheduler.tick(house.loop.now())
    for name in list(registry.sessions):
        house.call(lambda number, name=name: wire.CloseSession(number, name))
    house.call(lambda number: wire.Ask(number, "flush"))
    await house.settled("closed")
    assert not registry.sessions


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
def test_what_is_over_leaves_no_entry_anywhere(overlap: bool) -> None:
    async def cycles() -> tuple[Counter[str], Counter[str]]:
        house = House(overlap)
        counts = []
        for _ in range(2):
            for _ in range(CYCLES):
                await cycle(house)
            counts.append(entries(house.commands))
        house.loop.shut_down()
        return counts[0], counts[1]

    first, second = asyncio.run(cycles())
    assert {"Registry.sessions", "Deadlines._live", "EngineCommands.turns"} <= set(first), "it is walked"
    assert first["Registry.expired"], "sessions have expired"
    require_no_growth(first, second)


def require_no_growth(first: Counter[str], second: Counter[str]) -> None:
    # What is left in each cycle is left as often. A few entries come and go with rings of recent events.
    grown = {place: (first[place], n) for place, n in second.items() if n >= first[place] + CYCLES}
    kept = {place: grown.pop(place) for place in KEPT if place in grown}
    assert not grown, f"entries after {CYCLES} cycles and after {2 * CYCLES}: {grown}"
    assert all(after <= KEPT[place] for place, (_, after) in kept.items())


async def clients(world: Joined) -> None:
    """What clients do by the service: sessions, chats that are sent whole, requests; all of it ends."""
    service, said = world.service, [{"role": "user", "content": "hello"}]
    record = await service.sessions.open(ANN, None, SessionGiven(metadata={"a": "b"}))
    for _ in range(2):
        await world.say(record, said, max_tokens=4)
    await service.sessions.update(record, {"c": "d"})
    await service.sessions.change(record, {"ttl": 60.0})
    await service.sessions.compact(record, (1, 1), Input(messages=said), "compact")
    forked = await service.sessions.fork(record, None, 1, "fork")
    await service.sessions.rewind(forked, 0, "rewind")
    service.listening.hear(record, Input(text="spoken words "))
    await world.rest()
    feed = await service.start_turn(record, world.asked(said, max_tokens=100, ignore_eos=True))
    await service.sessions.interrupt(record, None, 2, "interrupt")
    await world.end_of(feed)
    left = await service.start_turn(record, world.asked(said, max_tokens=100, ignore_eos=True))
    service.leave(left, False)
    await world.end_of(left)
    await service.sessions.move(record, None)
    await service.sessions.describe(record)
    end = await world.chat(said, max_tokens=4)
    longer = [*said, {"role": "assistant", "content": end.text}, *said]
    await world.chat(longer, max_tokens=4)
    brief = await service.sessions.open(ANN, None, SessionGiven(ttl=0.001))
    for wrong in (SessionGiven(ttl=-1.0), SessionGiven(system="x" * 10_000_000)):
        with pytest.raises(Problem):
            await service.sessions.open(ANN, None, wrong)
    await service.sessions.close_record(record)
    await service.sessions.close_record(forked)
    await service.flush()
    await world.rest()
    registry = world.loop.scheduler.registry
    while registry.sessions:
        registry_now = world.loop.now()
        world.loop.scheduler.tick(registry_now)
        world.loop.dispatcher.tell()
        await asyncio.sleep(0.001)
    while service.table.get(brief.tenant, brief.name) is not None:
        await asyncio.sleep(0.001)


def test_what_is_over_leaves_no_entry_in_the_api_process() -> None:
    counts: list[Counter[str]] = []

    async def story(world: Joined) -> None:
        await clients(world)
        for _ in range(2):
            for _ in range(CYCLES):
                await clients(world)
            world.sent.clear()
            counts.append(entries(world.service))

    joined(story)
    assert {"SessionTable._records", "Conversations._by_name"} <= set(counts[0]), sorted(counts[0])
    require_no_growth(*counts)


def test_an_entry_that_is_left_is_seen() -> None:
    async def left() -> tuple[Counter[str], Counter[str]]:
        house = House(overlap=False)
        before = entries(house.commands)
        house.loop.scheduler.registry.deadlines.add(-99, 1e9, "gone")
        house.loop.shut_down()
        return before, entries(house.commands)

    before, after = asyncio.run(left())
    assert after["Deadlines._live"] > before["Deadlines._live"]
