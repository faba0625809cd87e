"""The engine's side of the counter, without processes: turns that follow one another closely."""

from collections.abc import Iterator

import pytest

from holdfast.engine.echo import open_echo
from holdfast.engine.options import make_options
from holdfast.server import wire
from holdfast.server.desk import Desk

SESSION = "ann/talk"


@pytest.fixture
def desk() -> Iterator[Desk]:
    """A desk with one session, whose first turn speaks and has rows in flight."""
    loop = open_echo("echo-hybrid", make_options(audit="strict", overlap=True))
    desk = Desk(loop)
    desk.receive(wire.OpenSession(1, SESSION, "ann"))
    start(desk, 2, "x" * 400)
    while not any(isinstance(report, wire.Step) for report in reports(desk)):
        step(desk)
    yield desk
    while loop.busy or desk.waits:
        step(desk)
    assert loop.scheduler.recount() == []


def start(desk: Desk, call: int, text: str) -> None:
    tokens = desk.loop.tokenizer.encode(text)
    desk.receive(wire.StartTurn(call, f"t-{call}", "ann", tokens, wire.SamplingFields(), session=SESSION))


def step(desk: Desk) -> None:
    desk.loop.step()
    desk.settled()


def reports(desk: Desk) -> list[wire.Report]:
    return list(desk.take_reports())


def of_call(heard: list[wire.Report], call: int) -> list[wire.Report]:
    return [
        report for report in heard if isinstance(report, wire.Done | wire.Declined) and report.call == call
    ]


def ends(heard: list[wire.Report]) -> list[tuple[int, str]]:
    return [
        (end.turn, end.outcome) for report in heard if isinstance(report, wire.Step) for end in report.ends
    ]


def test_a_turn_waits_for_the_one_that_was_told_to_end(desk: Desk) -> None:
    desk.receive(wire.EndTurn(2, None, "the client went away"))
    start(desk, 3, "again")
    assert of_call(reports(desk), 3) == [], "neither begun nor refused"
    heard: list[wire.Report] = []
    while desk.loop.busy or desk.waits:
        step(desk)
        heard += reports(desk)
    assert ends(heard) == [(2, "aborted"), (3, "finished")]
    (answer,) = of_call(heard, 3)
    assert isinstance(answer, wire.Done)


def test_only_one_turn_gets_the_session_that_several_wait_for(desk: Desk) -> None:
    desk.receive(wire.EndTurn(2, None, "the client went away"))
    for call in (3, 4):
        start(desk, call, "again")
    heard: list[wire.Report] = []
    while desk.loop.busy or desk.waits:
        step(desk)
        heard += reports(desk)
    assert ends(heard) == [(2, "aborted"), (3, "finished")]
    (refused,) = of_call(heard, 4)
    assert isinstance(refused, wire.Declined) and refused.code == "session_busy"


def test_a_turn_that_is_given_up_while_it_waits_never_begins(desk: Desk) -> None:
    desk.receive(wire.EndTurn(2, None, "the client went away"))
    start(desk, 3, "again")
    desk.receive(wire.EndTurn(3, None, "the client went away"))
    heard: list[wire.Report] = []
    while desk.loop.busy or desk.waits:
        step(desk)
        heard += reports(desk)
    assert ends(heard) == [(2, "aborted")] and of_call(heard, 3) == []


def test_a_turn_on_a_session_that_speaks_on_is_refused_at_once(desk: Desk) -> None:
    start(desk, 3, "again")
    (refused,) = of_call(reports(desk), 3)
    assert isinstance(refused, wire.Declined) and refused.code == "session_busy"
