"""The load in a heartbeat: what placement, hand-overs, the cluster's report and autoscaling read of it."""

from msgspec.structs import replace

from holdfast.cluster.placement import Load, rebalance
from holdfast.server.link import wire
from holdfast.server.link.loads import Fullest, fullest_pool, load_of
from holdfast.server.link.placement import room

SILENT = wire.Pulse(1, 0, 0, 0, {}, [], 0)
PULSE = wire.Pulse(
    1,
    running=2,
    queued=3,
    sessions=4,
    counters={},
    holders=[
        ("full", "device", "FREE", 50),
        ("full", "device", "TREE", 25),
        ("full", "device", "TURN", 25),
        ("window", "device", "FREE", 1),
        ("window", "device", "SESSION", 3),
        ("full", "host", "SESSION", 100),
        ("state", "device", "FREE", 0),
    ],
    findings=0,
)


def test_the_fullest_pool_is_that_of_the_device_with_the_smallest_free_share() -> None:
    assert fullest_pool(PULSE) == Fullest(1, 4), "not the host's, and not the pool without units"
    assert fullest_pool(PULSE).free_share == 0.25
    assert load_of(7, PULSE) == Load(7, 3, 4, 5)
    assert load_of(7, PULSE).share == 0.75
    assert room(PULSE, 0) == 1


def test_what_the_prefix_tree_could_give_up_counts_as_free() -> None:
    full = replace(PULSE, holders=[each for each in PULSE.holders if each[0] == "full"])
    assert fullest_pool(full) == Fullest(75, 100)
    leased = replace(full, leased={"full": 20, "window": 3})
    assert fullest_pool(leased) == Fullest(55, 100)
    assert load_of(7, leased).used == 45 and room(leased, 0) == 55


def test_an_engine_without_device_pools_is_neither_short_of_memory_nor_takes_sessions() -> None:
    unused = replace(SILENT, holders=[("full", "device", "FREE", 0), ("full", "host", "FREE", 9)])
    for pulse in (SILENT, unused):
        assert fullest_pool(pulse) == Fullest(0, 0)
        assert fullest_pool(pulse).free_share == 1.0
        assert load_of(2, pulse) == Load(2, 0, 0, 0)
        assert load_of(2, pulse).share == 0.0
        assert room(pulse, 3) == 0.0
        assert rebalance(Load(1, 100, 100), [("old", 1)], [load_of(2, pulse)]) == []
