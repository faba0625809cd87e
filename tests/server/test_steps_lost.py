"""How many steps a client loses between the end or the abort of a turn, and the rows of the next.

The worker, the link's messages and the echo engine are real. The device and the clock are the test's own: a
step takes as long as it says, and a command comes while one runs.
"""

import os
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import pytest

from holdfast.core.registry import Plan
from holdfast.engine.step.executor import Flight
from holdfast.engine.step.pacing import Pacing
from holdfast.server.link import wire
from holdfast.server.link.worker import SEAL_SECONDS, Worker
from tests.server.in_process import echo_commands

STEP, PLAN = 0.004, 0.0005
"""What the device takes for a step, and the host for a plan."""

LEARNT = 8
"""The token of a turn after which what a step takes is known."""


class Device:
    """Runs the echo's steps one after the other; `steps` has when each began and ended, and its turns."""

    def __init__(self, echo: Any) -> None:
        self.echo = echo
        self.now = 0.0
        self.steps: list[tuple[float, float, list[str]]] = []

    def clock(self) -> float:
        return self.now

    def __getattr__(self, name: str) -> Any:
        return getattr(self.echo, name)

    def start(self, plan: Plan) -> Flight:
        self.now += PLAN
        if plan.rows:
            began = max(self.now, self.steps[-1][1] if self.steps else 0.0)
            self.steps.append((began, began + STEP, [row.turn.request.turn_id for row in plan.rows]))
        flight: Flight = self.echo.start(plan)
        flight.tokens = Arrival(self, self.steps[-1][1]) if plan.rows else None  # type: ignore[assignment]
        return flight

    def running_at(self, when: float) -> int:
        """The step that runs at a time."""
        return next(number for number, (began, end, _) in enumerate(self.steps) if began <= when < end)

    def first_of(self, turn: str) -> int:
        """The step with the first row of a turn."""
        return next(number for number, (_, _, turns) in enumerate(self.steps) if turn in turns)


class Arrival:
    """The end of a step."""

    def __init__(self, device: Device, end: float) -> None:
        self.device = device
        self.end = end

    @property
    def arrived(self) -> bool:
        return self.device.now >= self.end

    def synchronize(self) -> None:
        self.device.now = max(self.device.now, self.end)


class Client:
    """The other end of the socket: commands come at their times, while the worker polls or works."""

    def __init__(self, device: Device, hear: Callable[[wire.Report], None]) -> None:
        self.device = device
        self.hear = hear
        self.due: list[tuple[float, wire.Command]] = []

    def later(self, seconds: float, command: wire.Command) -> float:
        self.due.append((self.device.now + seconds, command))
        return self.device.now + seconds

    def wait(self, seconds: float, _others: Iterable[int] = ()) -> bool:
        until = self.device.now + int(1000 * seconds) / 1000  # As a poll counts.
        if not self.due and seconds > STEP:
            self.due.append((self.device.now, wire.Stop()))  # The engine rests: this is the end.
        came = bool(self.due) and self.due[0][0] <= until
        self.device.now = max(self.device.now, self.due[0][0]) if came else until
        return came

    def receive(self) -> bytes | None:
        if not self.due or self.due[0][0] > self.device.now:
            return None
        return wire.encode(self.due.pop(0)[1])

    def send(self, frame: bytes) -> None:
        self.hear(wire.decode_report(frame))


class World:
    """An engine process with a device that takes time."""

    def __init__(self) -> None:
        engine = echo_commands(audit="strict", overlap=True, seal_seconds=SEAL_SECONDS)
        engine.loop.setup.grammars.close()
        self.engine = engine
        self.device = Device(engine.loop.executor)
        engine.loop.executor = self.device
        engine.loop.now = self.device.clock
        engine.loop.pacing = Pacing(self.device.clock)
        self.client = Client(self.device, self._hear)
        self.ends: list[tuple[int, str]] = []
        self.refused: list[str] = []
        self.on_token: Callable[[wire.Delta], None] = lambda _: None
        self.on_end: Callable[[wire.End], None] = lambda _: None

    def _hear(self, report: wire.Report) -> None:
        if isinstance(report, wire.Declined):
            self.refused.append(report.code)
        if isinstance(report, wire.Step):
            for delta in report.deltas:
                self.on_token(delta)
            for end in report.ends:
                self.ends.append((end.turn, end.outcome))
                self.on_end(end)

    def open(self, *names: str) -> None:
        for number, name in enumerate(names):
            self.client.later(0.0, wire.OpenSession(100 + number, f"ann/{name}", "ann"))

    def turn(self, call: int, session: str, limit: int) -> wire.StartTurn:
        sampling = wire.SamplingFields(max_tokens=limit, ignore_eos=True)
        tokens = list(range(40, 60))
        return wire.StartTurn(call, f"t-{call}", "ann", tokens, sampling, session=f"ann/{session}")

    def run(self) -> None:
        Worker(self.client, self.engine, os.getppid(), self.device.clock).run()  # type: ignore[arg-type]
        assert self.engine.loop.scheduler.recount() == [] and self.refused == []


WITHIN = [0.0002, 0.0015, 0.0025]
"""When a command comes after the token that its client answers, within the step that runs by then."""


@pytest.mark.parametrize("after", WITHIN)
def test_a_turn_is_in_the_step_after_the_one_that_runs_when_it_comes(after: float) -> None:
    world, came = World(), list[float]()
    world.open("busy", "other")
    world.client.later(0.0, world.turn(1, "busy", 40))

    def token(delta: wire.Delta) -> None:
        if delta.index == LEARNT:
            came.append(world.client.later(after, world.turn(2, "other", 4)))

    world.on_token = token
    world.run()
    assert world.device.first_of("t-2") == world.device.running_at(came[0]) + 1
    assert world.ends == [(2, "finished"), (1, "finished")]


@pytest.mark.parametrize("turn_first", [False, True], ids=["abort first", "turn first"])
@pytest.mark.parametrize("after", WITHIN)
def test_a_turn_right_after_an_abort_is_in_the_very_next_step(after: float, turn_first: bool) -> None:
    """The step that runs when the abort comes has a row of the aborted turn; the next has the new turn's."""
    world, came = World(), list[float]()
    world.open("talk")
    world.client.later(0.0, world.turn(1, "talk", 400))

    def token(delta: wire.Delta) -> None:
        if delta.turn == 1 and delta.index == LEARNT:
            both = [wire.EndTurn(1, None, "the client went away"), world.turn(2, "talk", 4)]
            came.extend(world.client.later(after, each) for each in (both[::-1] if turn_first else both))

    world.on_token = token
    world.run()
    assert world.ends == [(1, "aborted"), (2, "finished")]
    assert world.device.first_of("t-2") == world.device.running_at(came[0]) + 1


@pytest.mark.parametrize("keep", [2, 6], ids=["cut further", "as it was cut"])
@pytest.mark.parametrize("after", WITHIN)
def test_a_turn_that_steers_one_that_is_cancelled_is_in_the_very_next_step(after: float, keep: int) -> None:
    """A client cancels an answer, says what was heard of it, and goes on, all at once."""
    world, came = World(), list[float]()
    world.open("talk")
    world.client.later(0.0, world.turn(1, "talk", 400))

    def token(delta: wire.Delta) -> None:
        if delta.turn == 1 and delta.index == LEARNT:
            steering = msgspec.structs.replace(world.turn(2, "talk", 4), steers=keep)
            both = [wire.EndTurn(1, 6, "interrupt"), steering]
            came.extend(world.client.later(after, each) for each in both)

    world.on_token = token
    world.run()
    assert world.ends == [(1, "aborted"), (2, "finished")]
    assert world.device.first_of("t-2") == world.device.running_at(came[0]) + 1
    session = world.engine.loop.scheduler.registry.sessions["ann/talk"]
    assert session.boundaries[0] == 20 + keep and len(session.boundaries) == 2


@pytest.mark.parametrize("others", [0, 4])
def test_a_turn_that_follows_an_end_at_once_costs_no_step(others: int) -> None:
    """The last token of the turn before is computed with its input, and holds nothing up."""
    world, came = World(), list[float]()
    world.open("talk", *(f"other-{number}" for number in range(others)))
    for number in range(others):
        world.client.later(0.0, world.turn(10 + number, f"other-{number}", 60))
    world.client.later(0.0, world.turn(1, "talk", 12))

    def end(ended: wire.End) -> None:
        if ended.turn == 1:
            came.append(world.client.later(0.0015, world.turn(2, "talk", 4)))

    world.on_end = end
    world.run()
    steps = world.device.steps
    first = world.device.first_of("t-2")
    assert not any("t-1" in turns for began, _, turns in steps if began >= came[0]), "no seal is computed"
    if others:
        assert first == world.device.running_at(came[0]) + 1
    else:
        last = max(number for number, (_, _, turns) in enumerate(steps) if "t-1" in turns)
        assert first == last + 1 and steps[first][0] - came[0] == pytest.approx(PLAN)


def test_without_a_turn_that_follows_the_last_token_is_computed_after_a_while() -> None:
    world = World()
    world.open("talk")
    world.client.later(0.0, world.turn(1, "talk", 5))
    ended: list[float] = []
    world.on_end = lambda _: ended.append(world.device.now)
    kept: list[int] = []
    wait = world.client.wait

    def resting(seconds: float, _others: Iterable[int] = ()) -> bool:
        registry = world.engine.loop.scheduler.registry
        if registry.seals:
            world.device.now += seconds
            return False
        if not registry.flights and ended:
            kept.append(registry.sessions["ann/talk"].sequence.computed)
        return wait(seconds)

    world.client.wait = resting  # type: ignore[method-assign]
    world.run()
    assert kept[-1] == 25, "all of it"
    assert world.device.steps[-1][0] >= ended[0] + SEAL_SECONDS
