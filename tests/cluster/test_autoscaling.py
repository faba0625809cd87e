"""The number of engines: what loads ask for, how long a wish must last, and that it does not swing."""

import random

import pytest

from holdfast.cluster.autoscaling import Bounds, Load, Mood, Wish, decide, wanted

BOUNDS = Bounds(1, 4)
FULL, HALF, EMPTY = Load(0.0), Load(0.5), Load(1.0)


@pytest.mark.parametrize(
    ("loads", "wish"),
    [
        ([], Wish.NONE),
        ([EMPTY], Wish.NONE),
        ([FULL], Wish.MORE),
        ([HALF, HALF], Wish.NONE),
        ([FULL, Load(0.3)], Wish.NONE),
        ([FULL, Load(0.1)], Wish.MORE),
        ([EMPTY, EMPTY], Wish.FEWER),
        ([Load(0.7), Load(0.71)], Wish.FEWER),
        ([Load(0.69), Load(0.7)], Wish.NONE),
        ([Load(1.0, waiting=1), EMPTY], Wish.NONE),
        ([Load(1.0, waiting=3), EMPTY], Wish.MORE),
        ([Load(1.0, waiting=2), EMPTY], Wish.NONE),
    ],
)
def test_what_loads_ask_for(loads: list[Load], wish: Wish) -> None:
    assert wanted(loads, BOUNDS) is wish


def rounds(loads: list[Load], target: int, seconds: list[float], mood: Mood | None = None) -> list[int]:
    """The targets of decisions at some times; as many engines report as were asked for."""
    found, mood = [], mood or Mood()
    for now in seconds:
        reported = (loads * target)[:target]
        target, mood = decide(reported, target, BOUNDS, mood, now)
        found.append(target)
    return found


def test_more_engines_come_one_at_a_time_after_a_while() -> None:
    assert rounds([FULL], 1, [0, 5, 9, 10, 11, 20, 21]) == [1, 1, 1, 2, 2, 2, 3]


def test_fewer_engines_after_a_longer_while() -> None:
    assert rounds([EMPTY], 3, [0, 299, 300, 301, 600, 601]) == [3, 3, 2, 2, 2, 1]


def test_the_bounds_hold() -> None:
    assert rounds([FULL], 4, [0, 100]) == [4, 4]
    assert rounds([EMPTY], 1, [0, 1000]) == [1, 1]
    assert decide([FULL] * 9, 9, BOUNDS, Mood(), 0.0)[0] == 4
    assert decide([], 0, BOUNDS, Mood(), 0.0)[0] == 1


def test_a_wish_that_is_interrupted_begins_anew() -> None:
    target, mood = decide([FULL, FULL], 2, BOUNDS, Mood(), 0.0)
    target, mood = decide([HALF, HALF], target, BOUNDS, mood, 9.0)
    target, mood = decide([FULL, FULL], target, BOUNDS, mood, 10.0)
    assert (target, mood) == (2, Mood(Wish.MORE, 10.0))


def test_nothing_is_decided_before_the_last_engine_has_reported() -> None:
    target, mood = decide([FULL], 2, BOUNDS, Mood(Wish.MORE, 0.0), 100.0)
    assert (target, mood) == (2, Mood())


def test_the_thresholds_must_be_apart() -> None:
    with pytest.raises(AssertionError, match="apart"):
        Bounds(1, 2, scarce=0.5, plenty=0.5)
    with pytest.raises(AssertionError, match="at most"):
        Bounds(3, 2)


@pytest.mark.parametrize("held", [0.05, 0.3, 0.55, 0.9, 1.4, 2.2, 3.1, 3.9])
def test_under_a_constant_load_the_number_settles(held: float) -> None:
    """Whatever the number begins with, it comes to rest, and a little noise does not move it again."""
    dice = random.Random(int(held * 100))
    for begin in range(1, 5):
        target, mood, changes = begin, Mood(), 0
        for now in range(0, 6000, 5):
            free = max(0.0, 1.0 - held / target * dice.uniform(0.98, 1.02))
            before = target
            target, mood = decide([Load(free)] * target, target, BOUNDS, mood, float(now))
            changes += before != target
        assert changes <= 3
