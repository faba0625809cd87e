"""Several engines as one: where something new goes, who has a session, and what reports add up to."""

import asyncio
import ssl
from dataclasses import dataclass
from typing import cast

import numpy as np
import pytest

from holdfast.engine.options import OptionError
from holdfast.engine.reports.memory_map import FIRST_NAMED
from holdfast.server.http.problems import engine_unavailable
from holdfast.server.link import wire
from holdfast.server.link.addresses import split_address
from holdfast.server.link.directory import AskedDirectory
from holdfast.server.link.engine_client import EngineObserver
from holdfast.server.link.joined_reports import JoinedPictures, joined_memory, joined_pulse
from holdfast.server.link.placement import room, roomiest
from holdfast.server.link.remote_engine import RemoteEngine
from holdfast.server.link.remote_engines import RemoteEngines
from holdfast.server.options import EngineProcessOptions, ServerOptions


def pulse(free: int, tree: int = 0, used: int = 0, sessions: int = 0, **more: object) -> wire.Pulse:
    holders = [("full", "device", "FREE", free), ("full", "device", "TREE", tree)]
    holders += [("full", "device", "SESSION", used), ("full", "host", "FREE", 1 << 20)]
    return wire.Pulse(1, 0, 0, sessions, {"spills": 1}, holders, 0, **more)  # type: ignore[arg-type]


@dataclass
class Spot:
    """An engine that something may be placed at."""

    last_pulse: wire.Pulse | None
    placed: int = 0
    draining: bool = False


def test_the_engine_with_most_room_is_chosen() -> None:
    small, large = Spot(pulse(10)), Spot(pulse(20))
    assert roomiest([small, large]) is large
    assert roomiest([Spot(pulse(10, tree=15)), large]).last_pulse == pulse(10, tree=15), "cached is room"
    large.draining = True
    assert roomiest([small, large]) is small
    assert roomiest([large]) is None


def test_what_was_placed_counts_before_the_next_pulse() -> None:
    spots = [Spot(pulse(100, used=30, sessions=3)), Spot(pulse(95, used=30, sessions=3))]
    chosen = []
    for _ in range(6):
        spot = roomiest(spots)
        assert spot is not None
        spot.placed += 1
        chosen.append(spots.index(spot))
    assert chosen == [0, 1, 0, 1, 0, 1]


def test_room_is_that_of_the_fullest_pool_on_the_device() -> None:
    holders = [
        *pulse(90, used=10).holders,
        ("state", "device", "FREE", 2),
        ("state", "device", "SESSION", 30),
    ]
    assert room(wire.Pulse(1, 0, 0, 1, {}, holders, 0), 0) == 2
    # What is free on the host is no room: it is the fullest pool by its share, and has more units.
    assert room(pulse(2, used=98), 0) == 2
    assert room(wire.Pulse(1, 0, 0, 0, {}, [], 0), 3) == 0.0


def test_a_directory_asks_for_what_it_does_not_know() -> None:
    asked: list[str] = []
    stored = wire.StoredSession(wire.SessionView("ann/there", 0, None, 0), "ann", None, {}, 0.0)

    async def ask(session: str) -> tuple[str, wire.StoredSession] | None:
        asked.append(session)
        return ("b", stored) if session == "ann/there" else None

    async def story() -> None:
        directory = AskedDirectory(ask)
        directory.note("ann/here", "a")
        assert directory.owner("ann/here") == "a" and directory.owner("ann/there") is None
        assert await directory.look_up("ann/there") == ("b", stored)
        assert directory.owner("ann/there") == "b" and directory.owned("b") == {"ann/there"}
        assert await directory.look_up("ann/nowhere") is None
        directory.note("ann/here", "b")
        assert (directory.owned("a"), directory.owned("b")) == (set(), {"ann/here", "ann/there"})
        directory.forget("ann/here")
        directory.forget("ann/here")
        assert directory.owner("ann/here") is None

    asyncio.run(story())
    assert asked == ["ann/there", "ann/nowhere"]


def test_pulses_add_up() -> None:
    both = joined_pulse(
        [
            pulse(10, sessions=2, graphs=(1, 2), leased={"full": 2}),
            pulse(5, used=4, sessions=1, draining=True, leased={"full": 1}),
        ]
    )
    assert both is not None
    assert (both.sessions, both.counters, both.graphs, both.draining) == (3, {"spills": 2}, (1, 2), False)
    assert both.leased == {"full": 3}
    assert ("full", "device", "FREE", 15) in both.holders and ("full", "device", "SESSION", 4) in both.holders
    assert joined_pulse([]) is None


def report(units: int, held: int, tenant: str) -> dict[str, object]:
    pool = {
        "component": "full",
        "tier": "device",
        "units": units,
        "holders": {"FREE": units - held, "TURN": held},
    }
    row = {"component": "full", "tier": "device", "units": held, "limit": units}
    return {
        "step": 2,
        "pools": [pool],
        "top": [{"holder": f"session {tenant}/s", "full": held}],
        "listening": [],
        "tenants": [{"tenant": tenant, "pools": [row]}],
        "audit": {"mode": "on", "steps": 3, "last_full_census_step": 1},
        "findings": [{"kind": "leak"}] if held > 5 else [],
    }


def test_memory_reports_add_up() -> None:
    joined = joined_memory({"a": report(100, 4, "ann"), "b": report(50, 6, "ann"), "c": report(10, 0, "bob")})
    (pool,) = joined["pools"]
    assert (pool["units"], pool["holders"]) == (160, {"FREE": 150, "TURN": 10})
    assert [(each["engine"], each["full"]) for each in joined["top"]] == [("b", 6), ("a", 4), ("c", 0)]
    assert joined["tenants"][0]["pools"] == [
        {"component": "full", "tier": "device", "units": 10, "limit": 150}
    ]
    assert [each["engine"] for each in joined["findings"]] == ["b"]
    assert [each["engine"] for each in joined["engines"]] == ["a", "b", "c"]


def picture(*numbers: int) -> dict[str, object]:
    named = sorted({number for number in numbers if number >= FIRST_NAMED})
    cells = np.array(numbers, dtype=np.uint16).tobytes()
    return {
        "step": 1,
        "pools": [("full", "device", cells)],
        "holders": [(number, 3, f"ann/{number}", "") for number in named],
    }


def test_pictures_are_joined_with_numbers_that_stay() -> None:
    pictures, first = JoinedPictures(), FIRST_NAMED
    joined = pictures.join({"a": picture(0, first, first), "b": picture(first, 0)})
    ((component, tier, cells),) = joined["pools"]
    shown = np.frombuffer(cells, dtype=np.uint16).tolist()
    assert (component, tier) == ("full", "device")
    assert shown == [0, first, first, first + 1, 0], "two engines' holders are two"
    assert pictures.leased("b", {0: [0, 1]}) == {0: [3, 4]}
    again = pictures.join({"a": picture(0, 0, 0), "b": picture(first, first)})
    assert np.frombuffer(again["pools"][0][2], dtype=np.uint16).tolist() == [0, 0, 0, first + 1, first + 1]
    later = pictures.join({"a": picture(first + 3, 0, 0), "b": picture(first, first)})
    assert np.frombuffer(later["pools"][0][2], dtype=np.uint16).tolist()[0] == first, "a number that is free"


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("10.0.0.2:7000", ("10.0.0.2", 7000)),
        ("[::1]:0", ("::1", 0)),
        ("engine-1.local:65535", ("engine-1.local", 65535)),
    ],
)
def test_addresses(written: str, read: tuple[str, int]) -> None:
    assert split_address("engine", written) == read


@pytest.mark.parametrize("written", ["", "host", ":7000", "host:", "host:65536", "::1:7000", "http://host:1"])
def test_bad_addresses_are_named(written: str) -> None:
    with pytest.raises(OptionError, match="HOST:PORT"):
        split_address("engine", written)


@pytest.mark.parametrize(
    ("fields", "option"),
    [
        ({"engine": ("a:1",)}, "engine"),
        ({"link_keys": "f"}, "link_keys"),
        ({"engine": ("a:1", "a:1"), "link_keys": "f"}, "engine"),
        ({"link_seconds": 0.0}, "link_seconds"),
        ({"link_seconds": 1e9}, "link_seconds"),
        ({"link_seconds": float("nan")}, "link_seconds"),
    ],
)
def test_options_of_links_that_cannot_be(fields: dict[str, object], option: str) -> None:
    with pytest.raises(OptionError) as refused:
        ServerOptions(**fields)  # type: ignore[arg-type]
    assert refused.value.option == option


@pytest.mark.parametrize(
    ("fields", "option"),
    [
        ({}, "link_keys"),
        ({"link_keys": "f", "engine_id": "a b"}, "engine_id"),
        ({"link_keys": "f", "drain_seconds": 0}, "drain_seconds"),
        ({"link_keys": "f", "link_seconds": 1e9}, "link_seconds"),
    ],
)
def test_options_of_an_engine_that_cannot_be(fields: dict[str, object], option: str) -> None:
    with pytest.raises(OptionError) as refused:
        EngineProcessOptions(**fields)  # type: ignore[arg-type]
    assert refused.value.option == option


# --- silent engines --------------------------------------------------------------------------------------


class Indifferent(EngineObserver):
    """Hears everything and does nothing."""


class Other:
    """An engine that serves, and answers for the journal."""

    address = name = "e1"
    up = True
    welcome = None

    def __init__(self, answer: list[dict[str, object]] | None) -> None:
        self.client, self._answer = self, answer

    async def call(self, command: wire.Command, number: int) -> wire.Done:
        assert isinstance(command, wire.Ask) and command.call == number
        if self._answer is None:
            raise engine_unavailable()
        return wire.Done(number, None, self._answer)


def life(name: str, lease: float, state: str = "live") -> dict[str, object]:
    return {"life": 1, "name": name, "life_state": state, "lease_seconds": lease, "owned": 2, "epoch": 1}


@pytest.mark.parametrize(
    ("answer", "gone"),
    [
        ([life("e0", 9.6), life("e1", 9.9)], False),  # a long step
        ([life("e0", 7.9), life("e1", 9.9)], True),
        ([life("e0", -3.0, "dead"), life("e0", 9.8)], False),  # an earlier life
        ([life("e0", 7.0, "dead"), life("e1", 9.9)], True),
        ([life("e1", 9.9)], True),  # over, and owning nothing
        (None, False),
    ],
)
@pytest.mark.parametrize("shared", [True, False])
def test_a_silent_engine_is_gone_if_the_journal_has_not_heard_of_it(
    answer: list[dict[str, object]] | None, gone: bool, shared: bool
) -> None:
    """Never where the engines share none: silence is all that is known of them."""
    remotes = RemoteEngines(ssl.create_default_context(), 10.0, lambda _: Indifferent())
    remotes.use(["127.0.0.1:1"])
    silent = next(iter(remotes.engines.values()))
    silent.welcome = wire.Welcome(wire.PROTOCOL, "e0", "x", "m", {}, "journal" if shared else "")
    remotes._judge(silent, silent.welcome)
    remotes.engines["e1"] = cast("RemoteEngine", Other(answer))
    assert asyncio.run(remotes._is_gone(silent)) is (gone and shared)


def test_alone_a_silent_engine_is_not_gone() -> None:
    """Nobody can ask the journal, not even the engine itself."""
    remotes = RemoteEngines(ssl.create_default_context(), 10.0, lambda _: Indifferent())
    remotes.use(["127.0.0.1:1"])
    silent = next(iter(remotes.engines.values()))
    silent.welcome = wire.Welcome(wire.PROTOCOL, "e0", "x", "m", {}, "journal")
    remotes._judge(silent, silent.welcome)
    assert not asyncio.run(remotes._is_gone(silent))
