"""Collections that run by themselves are short, full ones wait, and threads take turns quickly."""

import gc
import sys
import weakref
from collections.abc import Iterator

import pytest

from holdfast.engine.pauses import (
    SURVIVORS_MIN,
    SWITCH_SECONDS,
    YOUNG_OBJECTS,
    YOUNG_ROUNDS,
    bound_pauses,
    collect_when_idle,
)


class Node:
    """An object in a cycle."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def usual_collector() -> Iterator[None]:
    thresholds, interval = gc.get_threshold(), sys.getswitchinterval()
    yield
    sys.setswitchinterval(interval)
    gc.unfreeze()
    gc.set_threshold(*thresholds)


def old_cycle() -> "weakref.ref[Node]":
    """A cycle that has survived the younger generations, and lost its last reference since."""
    node = Node()
    for _ in range(SURVIVORS_MIN):
        gc.collect(1)
    return weakref.ref(node)


def test_a_full_collection_waits_until_it_is_asked_for() -> None:
    bound_pauses()
    cycle = old_cycle()
    kept = [[] for _ in range(2 * YOUNG_OBJECTS * YOUNG_ROUNDS)]  # Younger collections run meanwhile.
    assert cycle() is not None
    collect_when_idle()
    assert cycle() is None
    assert len(kept) == 2 * YOUNG_OBJECTS * YOUNG_ROUNDS


def test_little_that_survived_is_not_worth_a_full_collection() -> None:
    bound_pauses()
    node = Node()
    gc.collect(1)
    found = weakref.ref(node)
    del node
    collect_when_idle()
    assert found() is not None


def test_what_was_loaded_before_is_never_visited() -> None:
    node = Node()
    bound_pauses()
    found = weakref.ref(node)
    del node
    gc.collect()
    assert found() is not None


def test_a_waiting_thread_gets_the_interpreter_within_a_fraction_of_a_step() -> None:
    bound_pauses()
    assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
    assert SWITCH_SECONDS < 0.001
