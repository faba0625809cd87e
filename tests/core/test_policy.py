"""Choices: the order of the queue, and whose turn gives way."""

from types import SimpleNamespace

from holdfast.core.policy import Policy, queue_order, retraction_victim
from holdfast.core.turn import Ending
from holdfast.core.waiting import Waiting


def waiting(number: int, priority: int = 0, arrived: float = 0.0, cached: int = 0) -> SimpleNamespace:
    """A turn that waits, as far as the order of the queue looks at it."""
    request = SimpleNamespace(priority=priority)
    return SimpleNamespace(number=number, arrived=arrived, cached=cached, request=request)


def queue(turns: list[SimpleNamespace]) -> Waiting:
    """These turns, of one tenant, waiting."""
    waiting = Waiting()
    for turn in turns:
        waiting.add(turn, "red")
    return waiting


def order(turns: list[SimpleNamespace], now: float = 0.0, **policy: object) -> list[int]:
    """The numbers of the turns in the order of the queue."""
    ordered = queue_order(queue(turns), now, Policy(**policy), lambda turn: turn.cached)
    return [turn.number for turn in ordered]


def test_equals_wait_in_the_order_of_their_arrival() -> None:
    assert order([waiting(3), waiting(1), waiting(2)]) == [1, 2, 3]


def test_priority_goes_before_what_is_cached_and_cached_before_age_of_equals() -> None:
    turns = [waiting(1), waiting(2, cached=50), waiting(3, priority=1), waiting(4, cached=70)]
    assert order(turns) == [3, 4, 2, 1]


def test_a_turn_that_waits_long_enough_goes_before_a_higher_priority_that_comes_later() -> None:
    patient = waiting(1, priority=0, arrived=0.0)
    assert order([patient, waiting(2, priority=2, arrived=5.9)], now=5.9, age_seconds=3.0) == [2, 1]
    assert order([patient, waiting(2, priority=2, arrived=9.0)], now=9.0, age_seconds=3.0) == [1, 2]


def test_nothing_starves_behind_a_stream_of_cached_turns() -> None:
    old = waiting(1, arrived=0.0)
    stream = [waiting(number, arrived=10.0, cached=99) for number in range(2, 40)]
    assert order([*stream, old], now=10.0, age_seconds=2.0)[0] == 1


def test_only_as_many_are_compared_as_can_matter_in_one_step() -> None:
    looked_at: list[int] = []
    turns = [waiting(number) for number in range(100)]
    policy = Policy(looked_at_max=7)
    chosen = queue_order(queue(turns), 0.0, policy, lambda turn: looked_at.append(turn.number) or 0)
    assert [turn.number for turn in chosen] == list(range(7))
    assert sorted(looked_at) == list(range(7))


def running(number: int, lost: int, ending: Ending | None = None) -> SimpleNamespace:
    """A running session whose turn would lose so many computed tokens."""
    turn = SimpleNamespace(number=number, known_before=100, ending=ending)
    return SimpleNamespace(turn=turn, sequence=SimpleNamespace(computed=100 + lost))


def test_the_turn_that_loses_least_is_retracted_but_never_the_oldest() -> None:
    oldest, cheap, dear = running(1, 0), running(2, 5), running(3, 50)
    assert retraction_victim([oldest, dear, cheap]) is cheap
    assert retraction_victim([oldest]) is None
    assert retraction_victim([]) is None


def test_of_two_that_lose_the_same_the_younger_is_retracted() -> None:
    oldest, older, younger = running(1, 0), running(2, 5), running(3, 5)
    assert retraction_victim([oldest, older, younger]) is younger
    assert retraction_victim([oldest, younger, older]) is younger


def test_a_turn_that_is_ending_is_left_to_end() -> None:
    oldest, ending, other = running(1, 0), running(2, 0, Ending("abort", "gone")), running(3, 9)
    assert retraction_victim([oldest, ending, other]) is other
    assert retraction_victim([oldest, ending]) is None
