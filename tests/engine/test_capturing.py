"""Graphs that are captured between the steps of turns change no token, and come in the order of need.

On a CPU a recorded step is run again instead of a graph.
"""

import gc
from collections.abc import Callable

import pytest

from holdfast.engine.engine import Engine
from holdfast.engine.step import graphs
from holdfast.engine.step.capturing import Capturing
from holdfast.engine.step.graph_order import ShapeOrder, first_shapes
from holdfast.engine.step.graphs import Outcome, Recorded, shapes
from holdfast.engine.step.inputs import Shape
from tests.engine.test_graphs import Replayed, talk

Make = Callable[..., Engine]


def begin(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Replayed]:
    """Capture the first shapes of an engine, and let others be captured whenever steps lack one."""
    made: list[Replayed] = []

    def record(step: Callable[[], Outcome]) -> tuple[Recorded, Outcome]:
        made.append(Replayed(step))
        return made[-1], made[-1].outcome

    monkeypatch.setattr(graphs, "MIXED_TOKENS", (8, 32))
    monkeypatch.setattr(graphs, "MIXED_ROWS", (4, 6))
    engine.loop.executor.capture(record=record, first_only=True)
    engine.loop.capturing = Capturing(engine.loop.executor, lambda: 0.0)
    return made


@pytest.mark.parametrize("overlap", [False, True])
def test_graphs_captured_between_steps_change_no_token(
    make: Make, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    options = {"max_running": 6, "chunk_tokens": 16, "overlap": overlap, "audit": "strict"}
    expected = talk(make(**options))
    engine = make(**options)
    made = begin(engine, monkeypatch)
    first, total = len(made), len(shapes(6))
    assert engine.loop.executor.graphs == (first, total, total - first, 0)
    assert talk(engine) == expected
    assert len(made) > first, "while turns ran"
    assert sum(each.replays for each in made[first:]) >= 5, "and were used by later steps"
    while engine.loop.capturing.when_idle():
        pass
    assert engine.loop.executor.graphs == (total, total, 0, 0)
    assert talk(engine) == talk(make(**options))


def test_an_engine_in_process_has_all_graphs_at_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(max_running=6)
    assert engine.loop.executor.graphs is None and not engine.loop.capturing.remaining
    assert not engine.loop.capturing.when_idle() and not engine.loop.executor.capture_next(missed=False)
    engine.loop.executor.abandon_graphs()

    def record(step: Callable[[], Outcome]) -> tuple[Recorded, Outcome]:
        made = Replayed(step)
        return made, made.outcome

    engine.loop.executor.capture(record=record)
    total = len(shapes(6))
    assert engine.loop.executor.graphs == (total, total, 0, 0)
    assert not engine.loop.capturing.remaining and not engine.loop.capturing.due


def test_the_first_shapes_have_room_for_most_steps() -> None:
    wanted = shapes(256)
    first = first_shapes(wanted, 192)
    assert first == [
        Shape(256, 512, 256, False),
        Shape(64, 64, 64, True),
        Shape(64, 192, 64, False),
        Shape(1, 1, 1, True),
        Shape(1, 64, 1, False),
    ]
    assert first[0].tokens == max(shape.tokens for shape in wanted), "later ones reuse its memory"
    assert first_shapes(shapes(1), 192) == [
        Shape(1, 512, 1, False),
        Shape(1, 1, 1, True),
        Shape(1, 192, 1, False),
        Shape(1, 64, 1, False),
    ]


def test_a_step_takes_a_larger_shape_until_its_own_is_captured() -> None:
    order = ShapeOrder(shapes(16))
    order.done(Shape(16, 16, 16, True))
    assert order.find(3, 3, decode=True) == Shape(16, 16, 16, True)
    assert order.find(3, 40, decode=False) is None
    for _ in range(2):
        order.find(3, 40, decode=False)
    assert order.counts.missed == 4
    assert order.next(missed=True) == Shape(4, 64, 4, False), "most steps lacked it"
    order.done(Shape(4, 64, 4, False))
    assert order.find(3, 40, decode=False) == Shape(4, 64, 4, False)
    assert order.next(missed=True) == Shape(4, 4, 4, True)
    order.done(Shape(4, 4, 4, True))
    assert order.find(3, 3, decode=True) == Shape(4, 4, 4, True)
    assert order.counts.missed == 0 and order.next(missed=True) is None
    assert order.next(missed=False) == Shape(1, 1, 1, True), "the smallest, where none is lacking"
    order.abandon()
    assert order.next(missed=False) is None and order.counts.remaining == 0
    assert order.find(2, 2, decode=True) == Shape(4, 4, 4, True) and order.counts.missed == 0


def test_no_garbage_is_collected_during_a_capture() -> None:
    with graphs._no_collection():
        assert not gc.isenabled()
        with graphs._no_collection():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
