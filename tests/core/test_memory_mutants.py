"""Every planted bug of the memory core is caught, by whom it should be, naming whom it concerns.

A scenario is played three times: without the bug it is clean to the end; with it the faulty site is reached,
and the drop check, the census or the reader of memory notices; after it everything is as it was before.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from holdfast.core.layout import Component, named_layout
from holdfast.core.ledger import OutOfUnits
from holdfast.sim.mutants import MUTANTS, planted
from tests.core.device import WrongContent
from tests.core.world import World

PROMPT = list(range(100, 141))
Scenario = Callable[[World], Iterator[None]]


# --- scenarios: the audit looks after every event -----------------------------------------------------


def one_life(world: World) -> Iterator[None]:
    """Two turns, a checkpoint, and the end; then somebody else with the same prompt."""
    chat = world.open("first")
    world.begin(chat, PROMPT, checkpoint=True)
    yield
    world.compute(chat)
    world.commit(chat)
    yield
    world.begin(chat, [3] * 9)
    yield
    world.compute(chat)
    world.commit(chat)
    yield
    world.close(chat)
    yield
    world.turn(world.open("second"), PROMPT, [1])
    yield


def interrupted(world: World) -> Iterator[None]:
    """A turn is rolled back, another is cut short, and the talk goes on after each."""
    chat = world.open("first")
    world.turn(chat, PROMPT, [1, 2])
    yield
    world.begin(chat, [3] * 19)
    world.compute(chat)
    yield
    world.rollback(chat)
    yield
    world.turn(chat, [4] * 3, [5])
    yield
    world.begin(chat, [6] * 9)
    world.compute(chat)
    for _ in range(8):
        world.say(chat, 7)
        world.compute(chat)
    yield
    world.keep(chat, chat.input_end + 3)
    yield
    world.turn(chat, [8] * 3, [9])
    yield


def retracted(world: World) -> Iterator[None]:
    """A turn gives its memory back and starts again."""
    chat = world.open("first")
    world.turn(chat, PROMPT, [1, 2])
    world.begin(chat, [3] * 19)
    world.compute(chat)
    yield
    world.retract(chat)
    yield
    world.compute(chat)
    world.commit(chat)
    yield


def drafted(world: World) -> Iterator[None]:
    """Drafts of which some, and then all, stand."""
    chat = world.open("first")
    world.begin(chat, PROMPT)
    world.compute(chat)
    for accepted in (2, 9):
        world.draft(chat, [5] * 9, accepted)
        yield
        world.compute(chat)
    world.commit(chat)
    yield


def starved(world: World) -> Iterator[None]:
    """A row finds pages and no slot, and works the second time."""
    chat = world.open("first")
    world.begin(chat, PROMPT)
    pool = world.ledger.pool(Component.STATE)
    pool.guard(lambda pool, count: False)
    with pytest.raises(OutOfUnits):
        world.plan_row(chat, 17)
    pool.guard(None)
    yield
    world.compute(chat)
    world.commit(chat)
    yield


def same_prompt_twice(world: World) -> Iterator[None]:
    """Two compute the same prompt before either publishes it; a third then takes fresh pages."""
    chats = [world.open("first"), world.open("second")]
    for chat in chats:
        world.begin(chat, PROMPT)
        world.compute(chat)
    for chat in chats:
        world.publish(chat, 40)
        yield
    world.settle()
    third = world.open("third")
    world.begin(third, [9] * 41)
    world.compute(third)
    yield
    for chat in chats:
        world.say(chat, 5)
        world.compute(chat)
        world.commit(chat)
        yield


def overlapped(world: World) -> Iterator[None]:
    """A chat ends while a step that reads its memory is in flight, and another one starts."""
    first = world.open("first")
    world.turn(first, PROMPT, [1])
    world.settle()
    world.begin(first, [2] * 5)
    world.compute(first)
    world.rollback(first)
    world.close(first)
    yield
    world.begin(world.open("second"), [7] * 41)
    world.compute(world.chats[-1])
    yield


def read_and_evicted(world: World) -> Iterator[None]:
    """A prompt lies in the tree, is leased again, and memory runs short."""
    first = world.open("first")
    world.turn(first, PROMPT, [1])
    yield
    world.close(first, leave=True)
    yield
    second = world.open("second")
    world.begin(second, [*PROMPT, 9])
    yield
    world.tree.flush()
    yield
    world.compute(second)
    world.commit(second)
    yield
    world.close(second)
    world.tree.flush()
    yield


def left_and_found(world: World) -> Iterator[None]:
    """A session leaves its history, and another goes on from the last whole page of it."""
    first = world.open("first")
    world.turn(first, PROMPT, [1] * 5)
    world.close(first, leave=True)
    yield
    second = world.open("second")
    world.turn(second, [*PROMPT, 1, 1, 1, 77, 78], [1])
    yield
    third = world.open("third")
    world.turn(third, [*PROMPT, 1, 1, 1, 1, 1, 78], [1])
    yield


def leaned_on_and_left(world: World) -> Iterator[None]:
    """Two sessions lean on one prompt, and one of them leaves with what is its own."""
    first = world.open("first")
    world.begin(first, PROMPT)
    world.compute(first)
    world.publish(first, len(PROMPT))
    world.commit(first)
    yield
    second = world.open("second")
    world.turn(second, [*PROMPT, 9], [1])
    yield
    world.reclaim(first)
    yield


def two_tenants(world: World) -> Iterator[None]:
    """Two tenants say the same."""
    first = world.open("first", tenant="one")
    world.turn(first, PROMPT, [1])
    world.close(first, leave=True)
    yield
    second = world.open("second", tenant="two")
    world.turn(second, [*PROMPT, 5], [1])
    yield


class Case(NamedTuple):
    """Which scenario shows the bug, who notices, what they call it, and whom they name."""

    scenario: Scenario
    detector: str
    what: str
    holder: str
    layout: str = "full+window+state"


CASES = {
    "close-forgets-state-slot": Case(one_life, "drop check", "dropped hold", "SESSION first"),
    "close-forgets-checkpoints": Case(one_life, "census", "unclaimed", "CHECKPOINT first"),
    "close-keeps-its-lease": Case(one_life, "census", "lock without a lessee", "first"),
    "close-frees-a-placeholder": Case(one_life, "census", "foreign unit", "the free list"),
    "release-frees-twice": Case(one_life, "census", "claimed while free", "the free list"),
    "move-leaves-the-old-hold-alive": Case(one_life, "drop check", "dropped hold", "TURN turn of first"),
    "fences-are-ignored": Case(overlapped, "content", "in flight", "TURN turn of second", "dense"),
    "counter-is-not-lowered": Case(one_life, "census", "counter", "ledger"),
    "turn-and-session-both-hold": Case(one_life, "census", "claimed twice", "TURN turn of first"),
    "failed-extend-keeps-its-pages": Case(starved, "census", "books", "TURN turn of first"),
    "drafts-keep-their-spare-slot": Case(drafted, "census", "unclaimed", "TURN turn of first"),
    "drafts-are-not-trimmed": Case(drafted, "census", "books", "TURN turn of first"),
    "trim-rounds-down": Case(drafted, "census", "books", "TURN turn of first"),
    "window-of-the-mark-is-freed": Case(interrupted, "census", "books", "SESSION first"),
    "rollback-keeps-the-turns-slot": Case(interrupted, "census", "unclaimed", "TURN turn of first"),
    "rollback-keeps-the-turns-state": Case(interrupted, "content", "STATE", "TURN turn of first"),
    "cut-ignores-the-state": Case(interrupted, "content", "STATE", "TURN turn of first", "hybrid"),
    "retract-moves-the-mark": Case(retracted, "census", "books", "TURN turn of first"),
    "duplicate-insert-leaks": Case(same_prompt_twice, "census", "unclaimed", "TURN turn of second"),
    "duplicate-insert-frees-the-trees-page": Case(
        same_prompt_twice, "census", "claimed while free", "TREE tenant"
    ),
    "publish-leaves-stale-tables": Case(same_prompt_twice, "content", "stale", "TURN turn of second"),
    "leased-leaf-is-evicted": Case(read_and_evicted, "census", "claimed while free", "second", "dense"),
    "lease-forgets-its-lock": Case(read_and_evicted, "census", "lock without a lessee", "first"),
    "release-keeps-the-lock": Case(read_and_evicted, "census", "lock without a lessee", "TREE tenant"),
    "release-keeps-window-locks": Case(read_and_evicted, "census", "lock without a lessee", "TREE tenant"),
    "a-spill-takes-what-others-lease": Case(
        leaned_on_and_left, "census", "claimed while free", "second", "dense"
    ),
    "match-crosses-tenants": Case(two_tenants, "content", "FULL", "TURN turn of second"),
    "state-is-left-at-the-wrong-length": Case(left_and_found, "content", "STATE", "TURN turn of second"),
}


class Caught(NamedTuple):
    """What was noticed first."""

    detector: str
    what: str
    holder: str


def play(scenario: Scenario, layout: str) -> list[Caught]:
    """Play a scenario until somebody notices something; nobody does where all is well."""
    world = World(named_layout(layout, 4, 7), pages=200, slots=30)
    try:
        for _ in scenario(world):
            found = world.census()
            if found:
                return [
                    Caught("drop check" if "dropped" in f.kind else "census", f.kind, f.holder) for f in found
                ]
    except WrongContent as wrong:
        return [Caught("content", wrong.what, wrong.holder)]
    world.finish()
    return []


def test_every_memory_mutant_has_a_case() -> None:
    assert set(CASES) == {name for name, mutant in MUTANTS.items() if mutant.level == "memory"}


@pytest.mark.parametrize("name", CASES)
def test_the_mutant_is_caught_and_named(name: str) -> None:
    case = CASES[name]
    assert play(case.scenario, case.layout) == [], "clean without the bug"
    with planted(name) as patcher:
        caught = play(case.scenario, case.layout)
        assert patcher.reached, "the faulty site was never reached"
    assert any(
        report.detector == case.detector and case.what in report.what and case.holder in report.holder
        for report in caught
    ), caught
    assert play(case.scenario, case.layout) == [], "and clean again after it"


@pytest.mark.parametrize(
    "scenario", dict.fromkeys(case.scenario for case in CASES.values()), ids=lambda each: each.__name__
)
@pytest.mark.parametrize("layout", ["dense", "hybrid", "full+window+state"])
def test_the_scenarios_are_clean_in_every_layout_they_fit(scenario: Scenario, layout: str) -> None:
    if scenario is starved and layout == "dense":
        pytest.skip("needs a state to be short of")
    assert play(scenario, layout) == []


def test_most_mutants_change_one_statement_and_all_tell_a_story() -> None:
    one = [mutant for mutant in MUTANTS.values() if mutant.changes_one_statement]
    assert len(one) > 0.9 * len(MUTANTS)
    assert all(mutant.story[0] in "ABC" and mutant.story[1:].isdigit() for mutant in MUTANTS.values())


def test_an_unknown_mutant_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="close-forgets-state-slot"), planted("no such bug"):
        pass
