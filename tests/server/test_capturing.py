"""A server captures its graphs while it serves: no turn waits for more than one of them.

The worker, the link's messages and the echo engine are real; the device, its captures and the clock are the
test's own.
"""

import logging
from itertools import pairwise

import pytest
import torch

from holdfast.core.registry import Plan
from holdfast.engine.step.capturing import BUSY_SHARE, Capturing
from holdfast.engine.step.flight import Flight
from holdfast.engine.step.graph_order import GraphCounts, ShapeOrder, first_shapes
from holdfast.engine.step.graphs import shapes
from holdfast.engine.step.inputs import Shape
from holdfast.engine.step.pacing import Pacing
from holdfast.server.link.worker import graph_lines
from tests.server.test_steps_lost import STEP, Device, World

CAPTURE = 0.05
"""What one capture takes."""


class GraphDevice(Device):
    """A device with graphs; `captures` has when each began, its shape, and whether steps had lacked it."""

    def __init__(self, echo: object, rows_max: int, fails_at: int | None = None) -> None:
        super().__init__(echo)
        wanted = shapes(rows_max)
        self.order = ShapeOrder(wanted)
        self.first = first_shapes(wanted, 192)
        for shape in self.first:
            self.order.done(shape)
        self.captures: list[tuple[float, Shape, bool]] = []
        self.fails_at = fails_at

    def start(self, plan: Plan) -> Flight:
        if plan.rows:
            tokens = sum(row.count for row in plan.rows)
            self.order.find(len(plan.rows), tokens, decode=tokens == len(plan.rows))
        return super().start(plan)

    def capture_next(self, missed: bool) -> bool:
        shape = self.order.next(missed)
        if shape is None:
            return False
        assert not self.steps or self.now >= self.steps[-1][1], "no step is in flight"
        self.captures.append((self.now, shape, missed))
        self.now += CAPTURE
        if len(self.captures) == self.fails_at:
            raise torch.OutOfMemoryError("no memory for a graph")
        self.order.done(shape)
        return True

    def abandon_graphs(self) -> None:
        self.order.abandon()

    @property
    def graphs(self) -> GraphCounts:
        return self.order.counts


def make_world(rows_max: int = 8, fails_at: int | None = None) -> tuple[World, GraphDevice]:
    world = World()
    device = GraphDevice(world.device.echo, rows_max, fails_at)
    loop = world.engine.loop
    world.device = world.client.device = loop.executor = device
    loop.now = device.clock
    loop.pacing = Pacing(device.clock)
    loop.capturing = Capturing(device, device.clock)
    world.open("a", "b")
    return world, device


@pytest.mark.parametrize("come", [0.001, 0.049, 0.12, 0.33])
def test_a_turn_waits_for_one_capture_at_most(come: float) -> None:
    world, device = make_world()
    came = world.client.later(come, world.turn(1, "a", 5))
    world.run()
    began = device.steps[device.first_of("t-1")][0]
    between = [start for start, _, _ in device.captures if came < start + CAPTURE and start < began]
    assert len(between) <= 1
    assert began - came <= CAPTURE + STEP
    assert world.ends == [(1, "finished")]


def test_an_idle_server_captures_every_graph() -> None:
    world, device = make_world()
    total = len(shapes(8))
    assert graph_lines(world.engine.loop) == [
        f"{len(device.first)} of {total} CUDA graphs captured; the others follow while it serves"
    ]
    assert world.engine.pulse().graphs == (len(device.first), total)
    world.run()
    assert device.order.counts == (total, total, 0, 0)
    assert len(device.captures) == total - len(device.first)
    assert graph_lines(world.engine.loop) == [f"{total} of {total} CUDA graphs captured"]


def test_a_busy_server_captures_what_its_steps_lack_in_a_part_of_its_time() -> None:
    world, device = make_world(rows_max=32)
    world.open(*(f"more{number}" for number in range(4)))
    device.now = 100.0  # Everything is there before the first round: it is never idle.
    for number in range(6):
        name = ("a", "b", "more0", "more1", "more2", "more3")[number]
        world.client.due.append((0.0, world.turn(number + 1, name, 400)))
    world.client.due.sort(key=lambda each: each[0])
    ended: list[float] = []
    world.on_end = lambda _: ended.append(device.now)
    world.run()
    busy = [capture for capture in device.captures if capture[0] < ended[0]]
    assert busy and all(missed for _, _, missed in busy)
    assert {shape.rows for _, shape, _ in busy if shape.decode} == {8}, "six rows are the shape of eight"
    spans = [later[0] - earlier[0] for earlier, later in pairwise(busy)]
    assert all(span >= CAPTURE / BUSY_SHARE for span in spans)
    assert device.order.counts.remaining == 0, "the rest when it is idle"


def test_a_failed_capture_is_the_last(caplog: pytest.LogCaptureFixture) -> None:
    world, device = make_world(fails_at=2)
    world.client.later(0.5, world.turn(1, "a", 5))
    with caplog.at_level(logging.WARNING, "holdfast.engine"):
        world.run()
    assert world.ends == [(1, "finished")]
    assert len(device.captures) == 2 and device.order.counts.captured == len(device.first) + 1
    assert [record.message for record in caplog.records] == [
        "a CUDA graph could not be captured; going on without the others"
    ]
    assert graph_lines(world.engine.loop) == [
        f"{len(device.first) + 1} of {len(shapes(8))} CUDA graphs captured"
    ]
