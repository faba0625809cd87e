"""The registry of engines, without Ray: what API processes are told, and when. Time is the test's."""

import asyncio

from holdfast.replicas.registry import Registry

SETTLED = 100.0


class Clock:
    """A time that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def settled() -> tuple[Registry, Clock]:
    clock = Clock()
    registry = Registry(clock)
    clock.now = SETTLED
    return registry, clock


def test_api_processes_hear_of_engines_as_they_come_and_move() -> None:
    async def story() -> None:
        registry, _ = await settled()
        assert await registry.take("a", 2) == 0
        asking = asyncio.create_task(registry.engines(0))
        await asyncio.sleep(0)
        assert not asking.done(), "nobody serves yet"
        await registry.hold("a", 0, "m:1", 2)
        version, expected, known = await asking
        assert (expected, known) == (2, {"engine-0": "m:1"})
        assert await registry.take("b", 2) == 1
        assert await registry.take("c", 2) is None, "there are two"
        await registry.hold("b", 1, "m:2", 2)
        await registry.hold("a", 0, "m:3", 2)
        later, _, known = await registry.engines(version)
        assert later > version
        assert known == {"engine-0": "m:3", "engine-1": "m:2"}

    asyncio.run(story())


def test_a_dead_engine_keeps_its_place_until_another_takes_it() -> None:
    async def story() -> None:
        registry, clock = await settled()
        for holder in ("a", "b"):
            number = await registry.take(holder, 2)
            assert number is not None
            await registry.hold(holder, number, f"m:{number}", 2)
        clock.now += 4
        await registry.hold("b", 1, "m:1", 2)
        clock.now += 4
        assert await registry.take("c", 2) == 0
        assert (await registry.engines(0))[2] == {"engine-0": "m:0", "engine-1": "m:1"}
        assert not await registry.hold("a", 0, "m:0", 2), "the one that was silent hears of it"
        assert (await registry.engines(0))[2] == {"engine-0": "m:0", "engine-1": "m:1"}
        await registry.release("a")
        assert await registry.hold("c", 0, "n:0", 2)
        assert (await registry.engines(0))[2] == {"engine-0": "n:0", "engine-1": "m:1"}

    asyncio.run(story())


def test_a_registry_that_was_lost_tells_nothing_before_it_has_heard_all() -> None:
    async def story() -> None:
        clock = Clock()
        registry = Registry(clock)
        await registry.hold("a", 0, "m:0", 2)
        asking = asyncio.create_task(registry.engines(17))
        await asyncio.sleep(0)
        await registry.hold("b", 1, "m:1", 2)
        clock.now = SETTLED
        _, expected, known = await asking
        assert (expected, known) == (2, {"engine-0": "m:0", "engine-1": "m:1"})

    asyncio.run(story())


def test_what_a_registry_knows_after_a_restart_is_told_whatever_the_caller_knew() -> None:
    async def story() -> None:
        versions = []
        for address in ("m:0", "n:0"):
            registry, _ = await settled()
            await registry.hold("a", 0, address, 1)
            version, _, known = await registry.engines(versions[-1] if versions else 0)
            versions.append(version)
            assert known == {"engine-0": address}
        assert versions[0] != versions[1], "a caller that knows the first is told the second"

    asyncio.run(story())


def test_fewer_engines_are_expected() -> None:
    async def story() -> None:
        registry, _ = await settled()
        for holder in ("a", "b"):
            number = await registry.take(holder, 1 if holder == "a" else 2)
            assert number is not None
            await registry.hold(holder, number, f"m:{number}", 1)
        await registry.release("b")
        await registry.expect(1)
        assert (await registry.engines(0))[1:] == (1, {"engine-0": "m:0"})

    asyncio.run(story())


def test_a_silent_engine_is_forgotten_when_fewer_are_expected() -> None:
    async def story() -> None:
        registry, clock = await settled()
        for number, holder in enumerate(("a", "b")):
            await registry.hold(holder, number, f"m:{number}", 2)
        clock.now += 4
        await registry.expect(1)
        assert len((await registry.engines(0))[2]) == 2, "it may live"
        await registry.hold("a", 0, "m:0", 1)
        clock.now += 4
        await registry.expect(1)
        assert (await registry.engines(0))[2] == {"engine-0": "m:0"}

    asyncio.run(story())


def test_api_processes_are_known_while_they_ask() -> None:
    async def story() -> None:
        registry, clock = await settled()
        await registry.hold("a", 0, "m:0", 1)
        await registry.engines(0, "n:30000")
        await registry.engines(0, "n:30001")
        assert await registry.apis() == ["n:30000", "n:30001"]
        clock.now += 20
        await registry.engines(0, "n:30001")
        clock.now += 15
        assert await registry.apis() == ["n:30001"]

    asyncio.run(story())


def test_only_the_last_deployment_is_deleted_by_its_command() -> None:
    async def story() -> None:
        registry, _ = await settled()
        first = await registry.deployed()
        assert await registry.deployed(first) is True
        second = await registry.deployed()
        assert [await registry.deployed(each) for each in (first, second)] == [False, True]

    asyncio.run(story())
