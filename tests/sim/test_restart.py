"""Deaths of the process in the simulated world: clients find again what they were told, and nothing else."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from holdfast.core.layout import LAYOUT_NAMES
from holdfast.core.scheduler import Scheduler
from holdfast.sim.content import next_token
from holdfast.sim.reference import Conversation
from holdfast.sim.world import Setup, World

VOCABULARY = 50


def talk(conversation: Conversation, said_in: tuple[int, ...], count: int) -> None:
    """A turn in which the model says `count` tokens; it is left in flight."""
    conversation.begin("t", said_in)
    for _ in range(count):
        conversation.hear([next_token(conversation.contents[-1], VOCABULARY)])


def test_a_conversation_knows_its_turns_whatever_was_cut() -> None:
    conversation = Conversation("s", VOCABULARY)
    talk(conversation, (1, 2, 3), 4)
    conversation.end(2)
    talk(conversation, (4,), 3)
    conversation.end(3)
    talk(conversation, (), 2)
    conversation.end(2)
    assert [(said_in, len(said_out)) for said_in, said_out in conversation.turns()] == [
        ([1, 2, 3], 2),
        ([4], 3),
        ([], 2),
    ]
    assert [token for said in conversation.turns() for part in said for token in part] == conversation.tokens
    conversation.cut_last(1)
    assert len(conversation.turns()[-1][1]) == 1
    child = conversation.fork("c", 2)
    conversation.rewind(1)
    assert [len(said_out) for _, said_out in conversation.turns()] == [2]
    assert [len(said_out) for _, said_out in child.turns()] == [2, 3]


def test_what_was_in_flight_never_was() -> None:
    conversation = Conversation("s", VOCABULARY)
    talk(conversation, (1, 2, 3), 4)
    conversation.end(4)
    before = list(conversation.tokens)
    talk(conversation, (7, 8), 1)
    conversation.come_back()
    assert (conversation.tokens, conversation.turn_id) == (before, None)
    assert (conversation.last, conversation.said) == ((0, 3), 4)
    fresh = Conversation("s", VOCABULARY)
    talk(fresh, (7, 8), 1)
    fresh.come_back()
    assert (fresh.tokens, fresh.last, fresh.turns()) == ([], None, [])


@pytest.mark.parametrize(
    "seeds", [(4, 6, 11, 13), pytest.param(range(32), marks=pytest.mark.soak)], ids=["few", "many"]
)
@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_a_world_whose_process_dies_all_the_time_finds_nothing(
    layout: str, seeds: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    adopted: list[int] = []
    original = Scheduler.adopt

    def counted(self: Scheduler, session_id: str, length: int) -> bool:
        done = original(self, session_id, length)
        adopted.append(length if done else 0)
        return done

    monkeypatch.setattr(Scheduler, "adopt", counted)
    deaths = turns = 0
    for seed in seeds:
        world = World(Setup(seed, layout, 4, "agents", faults=0.05))
        world.workload = replace(world.workload, deaths=1.0)
        world.run(150)
        world.close_down()
        deaths += world.faults.counts["process killed"]
        turns += world.turns
    assert deaths > 4 * len(seeds) and turns > 12 * len(seeds)
    assert any(adopted), "some have come back with a file"


def test_without_faults_nobody_dies() -> None:
    world = World(Setup(5, "hybrid", 4, "mix", faults=0.0))
    world.run(300)
    assert world.faults.counts["process killed"] == 0
