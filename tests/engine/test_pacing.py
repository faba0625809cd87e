"""How long the next plan may wait: a clock of the test's own, a device that takes what the test says."""

import pytest

from holdfast.engine.step.pacing import FALL, MARGIN_SECONDS, Pacing


class Clock:
    """The time, which only the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Step:
    """A step that the device ends at a time."""

    def __init__(self, clock: Clock, end: float) -> None:
        self.clock = clock
        self.end = end

    @property
    def arrived(self) -> bool:
        return self.clock.now >= self.end

    def synchronize(self) -> None:
        self.clock.now = max(self.clock.now, self.end)


HOST = 0.001


def launch(pacing: Pacing, clock: Clock, tokens: int = 4) -> None:
    pacing.plan()
    clock.now += HOST
    pacing.launch(tokens)


def learnt(seconds: float = 0.01) -> tuple[Pacing, Clock]:
    """One step in flight, whose kind took so long before."""
    clock = Clock()
    pacing = Pacing(clock)
    launch(pacing, clock)
    pacing.settle(Step(clock, 1.0))
    launch(pacing, clock)
    end = clock.now
    launch(pacing, clock)
    pacing.settle(Step(clock, end + seconds))
    return pacing, clock


def test_the_slack_is_what_a_step_takes_less_the_host_s_part() -> None:
    pacing, clock = learnt()
    assert pacing.slack == pytest.approx(0.01 - HOST - MARGIN_SECONDS)
    clock.now += 0.009
    assert pacing.slack < 0


def test_without_a_step_in_flight_or_an_estimate_a_plan_is_due() -> None:
    clock = Clock()
    pacing = Pacing(clock)
    assert pacing.slack == 0.0
    launch(pacing, clock)
    assert pacing.slack == 0.0, "nothing is known of such a step"
    pacing.settle(Step(clock, 1.0))
    launch(pacing, clock)
    launch(pacing, clock)
    assert pacing.slack == 0.0, "two are in flight"


def test_a_step_takes_no_less_than_a_smaller_one() -> None:
    pacing, clock = learnt()
    pacing.settle(Step(clock, clock.now + 0.01))
    launch(pacing, clock, tokens=1000)
    assert pacing.slack == pytest.approx(0.01 - HOST - MARGIN_SECONDS)
    pacing.settle(Step(clock, clock.now + 0.05))
    launch(pacing, clock, tokens=1)
    assert pacing.slack == 0.0, "and may take less than a larger one"


def test_a_step_that_ended_before_it_was_asked_for_shortens_the_estimate() -> None:
    pacing, clock = learnt()
    clock.now += 0.02
    pacing.settle(Step(clock, clock.now - 0.005))
    launch(pacing, clock)
    assert pacing.slack == pytest.approx(FALL * 0.01 - HOST - MARGIN_SECONDS)


def test_a_step_without_tokens_ends_unseen() -> None:
    pacing, clock = learnt()
    pacing.settle(None)
    launch(pacing, clock)
    assert pacing.slack == 0.0, "when it began is unknown"
    pacing.settle(Step(clock, clock.now + 5.0))
    launch(pacing, clock)
    assert pacing.slack == pytest.approx(0.01 - HOST - MARGIN_SECONDS), "nothing was learnt of it"


def test_an_estimate_falls_at_once_and_rises_slowly() -> None:
    pacing, clock = learnt()
    pacing.settle(Step(clock, clock.now + 0.02))
    launch(pacing, clock)
    assert pacing.slack == pytest.approx(0.012 - HOST - MARGIN_SECONDS)
    pacing.settle(Step(clock, clock.now + 0.006))
    launch(pacing, clock)
    assert pacing.slack == pytest.approx(0.006 - HOST - MARGIN_SECONDS)
