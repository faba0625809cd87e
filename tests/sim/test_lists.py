"""The scheduler's lists against its sessions: each difference is found, and health is never a finding."""

from collections.abc import Callable

import pytest

from holdfast.core.registry import Plan
from holdfast.core.session import Life, Session
from holdfast.core.turn import TurnRequest
from holdfast.sim.found import Found
from holdfast.sim.world import Setup, World

SEED = 1
"""Of a world that keeps checkpoints."""


def busy_world() -> World:
    """`rests` has a checkpoint, `runs` a row in flight, `waits` a turn; `seals` is not sealed yet."""
    world = World(Setup(SEED, "hybrid", 3, "mix", 0.0))
    scheduler = world.scheduler
    scheduler.planner.propose = None
    for name in ("rests", "seals", "runs", "waits"):
        scheduler.open(name, "red", 0.0)
    scheduler.submit("rests", TurnRequest("t1", (1, 2, 3, 4), 1), 0.0)
    advance(world, 3)
    scheduler.submit("rests", TurnRequest("t0", (5, 6), 1), 0.0)
    advance(world, 3)
    scheduler.submit("runs", TurnRequest("t2", (5, 6, 7), 9), 0.0)
    advance(world, 2)
    scheduler.submit("seals", TurnRequest("t3", (1, 2, 3), 1), 0.0)
    while session(world, "seals").life is not Life.SEALING:
        advance(world, 1)
    assert session(world, "seals") in world.scheduler.registry.seals
    scheduler.plan(1, 0.0)
    scheduler.submit("waits", TurnRequest("t4", (5, 6), 3), 0.0)
    world.lists.check()
    return world


def advance(world: World, steps: int) -> None:
    for _ in range(steps):
        plan = world.scheduler.plan(8, 0.0)
        world.numbers.update({row.number: row.turn.session_id for row in plan.rows})
        world.device.announce(plan)
        world.scheduler.settle(plan, world._execute(plan), 0.0)
        world.device.settled(plan)


def session(world: World, name: str) -> Session:
    return world.scheduler.registry.sessions[name]


def closed(world: World) -> Session:
    return Session(world.ledger, "gone", "red", 99, 0.0, None)


LIES: dict[str, tuple[str, Callable[[World], object]]] = {
    "a row that settled twice": ("rows in flight", lambda w: setattr(session(w, "runs"), "unsettled", 0)),
    "a row that was not counted": ("rows in flight", lambda w: setattr(session(w, "waits"), "unsettled", 1)),
    "a token that is awaited for ever": (
        "tokens that are awaited",
        lambda w: setattr(session(w, "runs").turn, "awaiting", 2),
    ),
    "a row without a fence": ("fence of a row", lambda w: setattr(session(w, "runs").sequence, "fence", 0)),
    "a turn that left the queue": ("place in the queue", lambda w: w.scheduler.registry.queue.clear()),
    "a session that runs unseen": ("those that run", lambda w: w.scheduler.registry.running.clear()),
    "a session that runs twice": (
        "those that run",
        lambda w: w.scheduler.registry.running.append(session(w, "runs")),
    ),
    "a turn that was not taken off": (
        "turn",
        lambda w: setattr(session(w, "rests"), "turn", session(w, "runs").turn),
    ),
    "a seal that is forgotten": ("the seals", lambda w: w.scheduler.registry.seals.clear()),
    "a session that rests unseen": ("those that rest", lambda w: w.scheduler.registry.resting.clear()),
    "a session that rests while it runs": (
        "those that rest",
        lambda w: w.scheduler.registry.resting.update({session(w, "runs"): None}),
    ),
    "a move of a session that is at home": (
        "the moves",
        lambda w: w.scheduler.registry.transits.update({0: session(w, "rests")}),
    ),
    "memory of a turn that is over": (
        "holder",
        lambda w: setattr(session(w, "rests").sequence, "holder", session(w, "runs").turn.holder),
    ),
    "a checkpoint that nobody sees": (
        "with checkpoints",
        lambda w: w.scheduler.registry.queues.checkpointed.clear(),
    ),
    "a closed session in a list": (
        "it is closed",
        lambda w: w.scheduler.registry.queues.tainted.update({closed(w): None}),
    ),
    "a tenant that is miscounted": ("miscounted", lambda w: w.scheduler.registry.tenants.update(red=1)),
    "a match of a turn that is gone": (
        "waits no more",
        lambda w: w.scheduler.planner.prompts.matches.update({999: (0, 0, b"")}),
    ),
}


@pytest.mark.parametrize(("words", "tell"), LIES.values(), ids=LIES.keys())
def test_every_lie_is_found(words: str, tell: Callable[[World], object]) -> None:
    world = busy_world()
    tell(world)
    with pytest.raises(Found, match=words) as caught:
        world.lists.check()
    assert caught.value.kind == "registry"


def test_a_turn_that_waits_for_a_session_that_does_not_is_found() -> None:
    world = busy_world()
    turn = session(world, "runs").turn
    assert turn is not None
    world.scheduler.registry.queue[999] = turn
    with pytest.raises(Found, match="whose session is running"):
        world.lists.check()


def test_a_copy_without_a_fence_is_found() -> None:
    world = busy_world()
    plan: Plan = Plan(world.ledger.step + 1)
    plan.copied.append(session(world, "rests"))
    world.scheduler.registry.flights.append(plan)
    with pytest.raises(Found, match="fence of a copy"):
        world.lists.check()
