"""The table of turns: every pair of state and event, and the few things that a turn works out."""

import pytest

from holdfast.core.errors import IllegalTransition
from holdfast.core.layout import MemoryLayout
from holdfast.core.ledger import Kind
from holdfast.core.turn import OVER, TURN_TABLE, Turn, TurnRequest, TurnState
from tests.core.world import make_ledger

EVENTS = sorted({event for _, event in TURN_TABLE})

# The same table in another form, written out so that a change of one needs a change of the other.
EXPECTED = {
    "QUEUED": {"admit": "RUNNING", "abort": "ABORTED", "fail": "FAILED"},
    "RUNNING": {"retract": "QUEUED", "finish": "FINISHED", "abort": "ABORTED", "fail": "FAILED"},
    "FINISHED": {},
    "ABORTED": {},
    "FAILED": {},
}


def make_turn(tokens: tuple[int, ...] = (1, 2, 3)) -> Turn:
    """A turn that has just arrived."""
    holder = make_ledger(MemoryLayout(4)).holder(Kind.TURN, "t1 of a")
    return Turn(TurnRequest("t1", tokens, 5), "a", 7, 1.5, holder)


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", TurnState)
def test_every_pair_of_state_and_event(state: TurnState, event: str) -> None:
    turn = make_turn()
    turn.state = state
    after = EXPECTED[state.name].get(event)
    if after is None:
        with pytest.raises(IllegalTransition, match=f"turn t1: {event} while {state.value}"):
            turn.on(event)
        assert turn.state is state
    else:
        turn.on(event)
        assert turn.state is TurnState[after]


def test_an_event_that_nobody_knows_is_a_fault() -> None:
    turn = make_turn()
    with pytest.raises(IllegalTransition):
        turn.on("nonsense")


def test_the_table_names_only_states_that_lead_somewhere() -> None:
    assert {state for state, _ in TURN_TABLE} == set(TurnState) - OVER
    assert set(TURN_TABLE.values()) >= OVER, "every end can be reached"


def test_a_turn_is_over_once_it_has_ended() -> None:
    turn = make_turn()
    for state in TurnState:
        turn.state = state
        assert turn.over is (state.name in ("FINISHED", "ABORTED", "FAILED"))


def test_the_end_of_the_input_counts_from_what_was_known() -> None:
    turn = make_turn((4, 5))
    assert (turn.known_before, turn.input_end) == (0, 2)
    turn.known_before = 30
    assert turn.input_end == 32


def test_a_fresh_turn_has_come_nowhere() -> None:
    turn = make_turn()
    assert turn.state is TurnState.QUEUED and turn.ending is None and turn.first_token is None
    assert (turn.generated, turn.awaiting, turn.cached, turn.computed) == (0, 0, 0, 0)
    assert (turn.failures, turn.retracts, turn.number, turn.arrived) == (0, 0, 7, 1.5)
