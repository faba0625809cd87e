"""Memory on another tier that comes back when a turn is expected, and not only when it is there."""

from pathlib import Path

import pytest

from holdfast.core.layout import Tier
from holdfast.engine.engine import Engine
from tests.engine.conftest import Make
from tests.engine.direct import direct
from tests.engine.test_disk_tier import conversation, options, run, said, state, talk
from tests.engine.tiny import greedy


def away(engine: Engine, tier: Tier) -> None:
    run(engine)
    assert direct(engine.loop, "spill", "s", tier)
    run(engine)
    assert state(engine) == "SPILLED"


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_a_client_that_connects_finds_its_memory(make: Make, tmp_path: Path, tier: Tier) -> None:
    expected = make.once(conversation)[:3]
    engine = make(**options(tmp_path, host_memory=8 << 20))
    session = engine.session(id="s")
    talk(session, range(2))
    away(engine, tier)
    engine.carry_out(engine.verbs.hear, "s", None)
    assert engine.loop.active, "there is something to bring back"
    run(engine)
    assert state(engine) == "IDLE"
    copied = dict(engine.loop.executor.host_tier.bytes_copied)
    turn = session.say(said(2), greedy(9))
    assert turn.token_ids == expected[2] and turn.usage.computed_tokens <= 21 + 9
    assert engine.loop.executor.host_tier.bytes_copied == copied


def test_a_session_that_is_closed_while_it_comes_back_leaves_nothing(make: Make, tmp_path: Path) -> None:
    engine = make(**options(tmp_path))
    session = engine.session(id="s")
    talk(session, range(2))
    away(engine, Tier.DISK)
    engine.carry_out(engine.verbs.hear, "s", None)
    for _ in range(100):
        if state(engine) != "RESTORING":
            engine.drive()
        else:
            break
    session.close()
    run(engine)
    assert engine.audit() == []


def test_an_engine_without_room_does_not_spin(make: Make) -> None:
    engine = make(host_memory=8 << 20)
    session = engine.session(id="s")
    talk(session, range(2))
    away(engine, Tier.HOST)
    registry = engine.loop.scheduler.registry
    for pool in registry.ledger.pools.values():
        if pool.tier is Tier.DEVICE:
            pool.guard(lambda _pool, _count: False)
    engine.carry_out(engine.verbs.hear, "s", None)
    for _ in range(10):
        engine.drive()
    assert not engine.loop.active and state(engine) == "SPILLED"
    for pool in registry.ledger.pools.values():
        if pool.tier is Tier.DEVICE:
            pool.guard(None)
