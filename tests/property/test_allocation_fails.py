"""The n-th allocation fails, for every n: nothing more is held than before, and the same act then works.

The scenario uses every operation that takes units: rows, drafts, resume points, leaning on a tail, forks, and
cuts inside a leased prefix. It is played once to count its allocations, and then once for each of them.
"""

from collections.abc import Callable, Iterator

import pytest

from holdfast.core.layout import named_layout
from holdfast.core.ledger import OutOfUnits, Pool
from tests.core.world import LAYOUTS, Chat, World

PROMPT = list(range(100, 141))
Act = Callable[[], object]


class NthFails:
    """A gate for all pools that refuses one allocation, and counts them."""

    def __init__(self, world: World, fails: int) -> None:
        self.fails = fails
        self.asked = 0
        for pool in world.ledger.pools.values():
            pool.guard(self)

    def __call__(self, pool: Pool, count: int) -> bool:
        self.asked += 1
        return self.asked != self.fails


def rows(world: World, chat: Chat, largest: int = 1000) -> Iterator[Act]:
    """Row after row until all that is known is computed."""
    while world.row_limit(chat) > 0:
        yield lambda: world.plan_row(chat, min(world.row_limit(chat), largest))
        world.settle_rows(chat)


def scenario(world: World) -> Iterator[Act]:
    """Acts, one at a time; what lies between them takes nothing."""
    first = world.open("first")
    yield lambda: world.begin(first, PROMPT, checkpoint=True)
    yield from rows(world, first, largest=17)
    world.publish(first, 41)
    world.say(first, 1)
    yield from rows(world, first)
    world.commit(first)
    yield lambda: world.begin(first, [2] * 9)
    yield from rows(world, first)
    for accepted in (4, 2):
        yield lambda accepted=accepted: world.draft(first, [3, 4, 5, 6], accepted)
        yield from rows(world, first)
    yield lambda: world.keep(first, first.input_end + 1)
    for turn in range(2):
        yield lambda turn=turn: world.begin(first, [turn] * 5)
        yield from rows(world, first)
        world.commit(first)
    world.publish(first, first.sequence.computed)
    forks = []
    for end in (first.ends[0], first.ends[-1], 39):
        yield lambda end=end: forks.append(world.fork(first, end, f"fork at {end}"))
        child = forks[-1]
        yield lambda child=child: world.begin(child, [8] * 3)
        yield from rows(world, child)
        world.commit(child)
    yield lambda: world.rewind(first, 39)
    yield lambda: world.begin(first, [7] * 4)
    yield from rows(world, first)
    world.retract(first)
    yield from rows(world, first)
    world.commit(first)
    history = first.sequence.tokens.slice(0, first.sequence.known)
    world.close(first, leave=True)
    heir = world.open("heir")
    yield lambda: world.begin(heir, [*history, 5])
    yield from rows(world, heir)
    world.rollback(heir)
    heir.sequence.drop_memory()


def play(world: World, gate: NthFails) -> int:
    """Play the scenario; where an act fails, nothing has changed, and the second time it works."""
    failures = 0
    for act in scenario(world):
        held, claims = world.held(), world.claims()
        try:
            act()
        except OutOfUnits:
            failures += 1
            assert gate.asked == gate.fails
            assert world.held() == held
            assert world.claims() == claims
            world.check()
            act()
        world.check()
        world.settle()
    for pool in world.ledger.pools.values():
        pool.guard(None)
    world.finish()
    return failures


PAGE_SIZES = (1, 3, 16, 64)


@pytest.mark.parametrize(
    ("name", "page_size"),
    [
        pytest.param(name, page_size, marks=() if (place + turn) % 2 == 0 else pytest.mark.soak)
        for place, name in enumerate(LAYOUTS)
        for turn, page_size in enumerate(PAGE_SIZES)
    ],
)
def test_every_allocation_can_fail_and_nothing_is_left_behind(name: str, page_size: int) -> None:
    layout = named_layout(name, page_size, 7)

    def fresh() -> World:
        return World(layout, pages=2000 // page_size + 20, slots=40)

    counted = NthFails(world := fresh(), fails=0)
    assert play(world, counted) == 0
    assert counted.asked > 5
    raised = 0
    for fails in range(1, counted.asked + 1):
        gate = NthFails(world := fresh(), fails)
        raised += play(world, gate)
        assert gate.asked >= fails
    # A resume point that finds no slot is done without; every other allocation is one that somebody hears of.
    assert raised > counted.asked // 2
