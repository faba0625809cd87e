"""Commands without processes: turns that follow one another closely, and verbs that wait."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.core.session import Place
from holdfast.core.turn import KEEP_ALL
from holdfast.server.link import wire
from holdfast.server.link.commands import EngineCommands
from holdfast.server.link.engine_process import EngineHost
from holdfast.server.link.reports import SURVEYS
from holdfast.server.link.results import Outbox
from tests.engine.tiny import tiny_engine, write_model
from tests.server.in_process import echo_commands

SESSION = "ann/talk"


def speaking(overlap: bool) -> Iterator[EngineCommands]:
    """Commands of an engine with one session, whose first turn is running."""
    commands = echo_commands("echo-hybrid", audit="strict", overlap=overlap)
    loop = commands.loop
    commands.receive(wire.OpenSession(1, SESSION, "ann"))
    start(commands, 2, "x" * 400)
    while not any(isinstance(report, wire.Step) for report in reports(commands)):
        step(commands)
    yield commands
    while loop.busy or commands.waits:
        step(commands)
    assert loop.scheduler.recount() == []


@pytest.fixture
def commands() -> Iterator[EngineCommands]:
    """One session, whose first turn is running and has rows in flight."""
    yield from speaking(overlap=True)


@pytest.fixture
def resting() -> Iterator[EngineCommands]:
    """One session, whose first turn is running and has no rows in flight."""
    yield from speaking(overlap=False)


def start(commands: EngineCommands, call: int, text: str, max_tokens: int | None = None) -> None:
    tokens = commands.loop.setup.tokenizer.encode(text)
    fields = wire.SamplingFields(max_tokens=max_tokens)
    commands.receive(wire.StartTurn(call, f"t-{call}", "ann", tokens, fields, session=SESSION))


def step(commands: EngineCommands) -> None:
    commands.loop.step()
    commands.retry()


def reports(commands: EngineCommands) -> list[wire.Report]:
    return list(commands.take_reports())


def until_quiet(commands: EngineCommands) -> list[wire.Report]:
    """Make steps while there is anything to do; returns what was told."""
    heard: list[wire.Report] = []
    while commands.loop.busy or commands.waits:
        step(commands)
        heard += reports(commands)
    return heard


def of_call(heard: list[wire.Report], call: int) -> list[wire.Report]:
    return [
        report for report in heard if isinstance(report, wire.Done | wire.Declined) and report.call == call
    ]


def ends(heard: list[wire.Report]) -> list[tuple[int, str]]:
    return [
        (end.turn, end.outcome) for report in heard if isinstance(report, wire.Step) for end in report.ends
    ]


def test_a_turn_waits_for_the_one_that_was_told_to_end(commands: EngineCommands) -> None:
    commands.receive(wire.EndTurn(2, None, "the client went away"))
    start(commands, 3, "again")
    assert of_call(reports(commands), 3) == [], "neither begun nor refused"
    heard = until_quiet(commands)
    assert ends(heard) == [(2, "aborted"), (3, "finished")]
    (answer,) = of_call(heard, 3)
    assert isinstance(answer, wire.Done)


def test_only_one_turn_gets_the_session_that_several_wait_for(commands: EngineCommands) -> None:
    commands.receive(wire.EndTurn(2, None, "the client went away"))
    for call in (3, 4):
        start(commands, call, "again")
    heard = until_quiet(commands)
    assert ends(heard) == [(2, "aborted"), (3, "finished")]
    (refused,) = of_call(heard, 4)
    assert isinstance(refused, wire.Declined) and refused.code == "session_busy"


def test_a_turn_that_is_given_up_while_it_waits_never_begins_and_has_its_end(
    commands: EngineCommands,
) -> None:
    commands.receive(wire.EndTurn(2, None, "the client went away"))
    start(commands, 3, "again")
    commands.receive(wire.EndTurn(3, None, "the client went away"))
    heard = until_quiet(commands)
    assert ends(heard) == [(3, "aborted"), (2, "aborted")]
    assert [type(report) for report in of_call(heard, 3)] == [wire.Done]
    told = [end for report in heard if isinstance(report, wire.Step) for end in report.ends]
    (end,) = [end for end in told if end.turn == 3]
    assert (end.tokens, end.computed_tokens, end.view) == ([], 0, None)


def test_a_turn_on_a_session_that_speaks_on_is_refused_after_a_step(commands: EngineCommands) -> None:
    start(commands, 3, "again")
    assert of_call(reports(commands), 3) == [], "the word that the turn before is to end may follow"
    step(commands)
    (refused,) = of_call(reports(commands), 3)
    assert isinstance(refused, wire.Declined) and refused.code == "session_busy"
    assert not commands.waits and list(commands.turns) == [2]


def test_a_turn_that_was_written_before_an_overdue_one_ended_is_to_be_written_again() -> None:
    now = 1000.0
    commands = echo_commands("echo", clock=lambda: now, audit="strict", overlap=False)
    loop = commands.loop
    commands.receive(wire.OpenSession(1, SESSION, "ann"))
    fields, tokens = (
        wire.SamplingFields(max_tokens=400, ignore_eos=True),
        loop.setup.tokenizer.encode("on and on"),
    )
    commands.receive(
        wire.StartTurn(2, "t-2", "ann", tokens, fields, session=SESSION, known=0, keeps=True, timeout=5.0)
    )
    for _ in range(3):
        step(commands)
    commands.receive(wire.StartTurn(3, "t-3", "ann", tokens, fields, session=SESSION, known=0))
    loop.step()
    now += 6.0
    commands.retry()
    heard = reports(commands)
    (refused,) = of_call(heard, 3)
    assert isinstance(refused, wire.Declined) and refused.code == "history_changed"
    assert (
        refused.view is not None
        and refused.view.known == loop.scheduler.registry.sessions[SESSION].boundaries[-1]
    )
    assert ends(heard) == [(2, "aborted")]


def test_a_turn_that_comes_before_the_end_of_the_one_before_waits_for_it(commands: EngineCommands) -> None:
    start(commands, 3, "again")
    commands.receive(wire.EndTurn(2, None, "the client went away"))
    heard = until_quiet(commands)
    assert ends(heard) == [(2, "aborted"), (3, "finished")]
    (answer,) = of_call(heard, 3)
    assert isinstance(answer, wire.Done)


@pytest.mark.parametrize("end_first", [True, False])
def test_the_step_after_an_abort_is_the_next_turn_s(resting: EngineCommands, end_first: bool) -> None:
    ledger = resting.loop.scheduler.registry.ledger
    planned, computed = ledger.step, resting.turns[2].turn.computed
    left = resting.turns[2].turn
    if not end_first:
        start(resting, 3, "again")
    resting.receive(wire.EndTurn(2, None, "the client went away"))
    if end_first:
        start(resting, 3, "again")
    resting.retry()
    heard = reports(resting)
    assert ends(heard) == [(2, "aborted")] and isinstance(of_call(heard, 3)[0], wire.Done)
    assert (ledger.step, left.computed) == (planned, computed), "no step for the turn that was left"
    step(resting)
    assert resting.turns[3].turn.computed == len("again")


def test_a_turn_waits_for_an_end_that_comes_with_the_step_under_way(resting: EngineCommands) -> None:
    ledger = resting.loop.scheduler.registry.ledger
    start(resting, 3, "again")
    planned = ledger.step
    resting.loop.step()
    resting.receive(wire.EndTurn(2, None, "the client went away"))
    resting.retry()
    heard = reports(resting)
    assert ends(heard) == [(2, "aborted")] and isinstance(of_call(heard, 3)[0], wire.Done)
    assert ledger.step == planned + 1


def test_turns_that_wait_begin_in_the_order_in_which_they_came(resting: EngineCommands) -> None:
    start(resting, 3, "again")
    resting.receive(wire.EndTurn(2, None, "the client went away"))
    start(resting, 4, "later")
    heard: list[wire.Report] = []
    while resting.loop.busy or resting.waits:
        step(resting)
        heard += reports(resting)
    assert ends(heard) == [(2, "aborted"), (3, "finished")]
    (refused,) = of_call(heard, 4)
    assert isinstance(refused, wire.Declined) and refused.code == "session_busy"


def test_a_stranger_s_request_does_not_shorten_the_step_that_a_turn_waits(resting: EngineCommands) -> None:
    start(resting, 3, "again")
    resting.loop.step()
    tokens = resting.loop.setup.tokenizer.encode("hello")
    resting.receive(wire.StartTurn(4, "bob#r", "bob", tokens, wire.SamplingFields()))
    resting.receive(wire.EndTurn(2, None, "the client went away"))
    resting.retry()
    heard = reports(resting)
    assert ends(heard) == [(2, "aborted")] and isinstance(of_call(heard, 3)[0], wire.Done)


def test_an_interruption_ends_the_turn_that_another_waits_for(resting: EngineCommands) -> None:
    start(resting, 3, "again")
    resting.loop.step()
    resting.receive(wire.Interrupt(4, SESSION, None, None))
    resting.retry()
    heard = reports(resting)
    assert ends(heard) == [(2, "aborted")]
    assert isinstance(of_call(heard, 3)[0], wire.Done) and isinstance(of_call(heard, 4)[0], wire.Done)


def test_an_interruption_does_not_overtake_a_turn_that_is_free_to_begin(resting: EngineCommands) -> None:
    start(resting, 3, "again")
    resting.receive(wire.EndTurn(2, None, "the client went away"))
    resting.receive(wire.Interrupt(4, SESSION, "t-3", None))
    resting.retry()
    heard = reports(resting) + until_quiet(resting)
    assert ends(heard) == [(2, "aborted"), (3, "aborted")]
    assert isinstance(of_call(heard, 4)[0], wire.Done)


def test_a_question_about_no_session_is_answered_and_ends_nothing(resting: EngineCommands) -> None:
    asked = [each for each in wire.Question if each not in (*SURVEYS, wire.Question.LIVES)]
    for call, what in enumerate(asked, 50):
        resting.receive(wire.Ask(call, what))
    heard = reports(resting)
    told = {each: of_call(heard, call)[0] for call, each in enumerate(asked, 50)}
    assert len(asked) == len(heard) == 5
    assert told.pop(wire.Question.STORED) == wire.Done(50 + asked.index(wire.Question.STORED))
    assert {getattr(each, "code", "done") for each in told.values()} <= {"session_not_found", "done"}


def gone(heard: list[wire.Report]) -> list[tuple[str, str]]:
    return [each for report in heard if isinstance(report, wire.Step) for each in report.gone]


def expire(commands: EngineCommands) -> None:
    """Let time pass, as an idle engine does."""
    commands.loop.scheduler.tick(commands.loop.now())
    commands.loop.dispatcher.tell()


def test_a_close_that_was_refused_hides_no_later_end_of_that_name(resting: EngineCommands) -> None:
    resting.receive(wire.CloseSession(3, "ann/later"))
    (refused,) = of_call(reports(resting), 3)
    assert isinstance(refused, wire.Declined) and refused.code == "session_not_found"
    resting.receive(wire.OpenSession(4, "ann/later", "ann", ttl=1e-9))
    expire(resting)
    assert gone(reports(resting)) == [("ann/later", "expired")]


def test_a_session_that_is_closed_is_told_before_the_answer(resting: EngineCommands) -> None:
    resting.receive(wire.CloseSession(3, SESSION))
    heard = reports(resting) + until_quiet(resting)
    assert gone(heard) == [(SESSION, "closed")]
    kinds = [type(report) for report in heard]
    assert kinds.index(wire.Step) < kinds.index(wire.Done)


def test_a_request_of_its_own_is_no_session_that_could_be_gone(resting: EngineCommands) -> None:
    tokens = resting.loop.setup.tokenizer.encode("hello")
    resting.receive(wire.StartTurn(3, "ann#r", "ann", tokens, wire.SamplingFields()))
    heard = until_quiet(resting)
    assert (3, "finished") in ends(heard) and gone(heard) == []


def test_a_session_that_expires_with_rows_in_flight_is_told_as_expired(commands: EngineCommands) -> None:
    """Rows that were launched before a turn ended settle after it: the session may expire meanwhile."""
    heard: list[wire.Report] = []
    while not ends(heard):
        step(commands)
        heard += reports(commands)
    scheduler = commands.loop.scheduler
    assert scheduler.registry.sessions[SESSION].unsettled
    scheduler.tick(commands.loop.now() + 2 * scheduler.registry.policy.session_ttl)
    assert gone(until_quiet(commands) + reports(commands)) == [(SESSION, "expired")]


@pytest.mark.parametrize("durability", ["commit", "off"])
def test_a_session_is_not_closed_while_that_cannot_be_written(tmp_path: Path, durability: str) -> None:
    commands = echo_commands(journal=str(tmp_path / "journal"), durability=durability)
    loop = commands.loop
    commands.receive(wire.OpenSession(1, SESSION, "ann"))
    until_quiet(commands)
    assert loop.session_log.journal is not None
    loop.session_log.journal.fault = "the disk is full"
    commands.receive(wire.CloseSession(2, SESSION))
    (answer,) = of_call(reports(commands), 2)
    if durability == "off":
        assert isinstance(answer, wire.Done)
    else:
        assert isinstance(answer, wire.Declined) and answer.code == "journal_unavailable"
        assert SESSION in loop.scheduler.registry.sessions
        loop.session_log.journal.fault = None
        commands.receive(wire.CloseSession(3, SESSION))
        heard = reports(commands) + until_quiet(commands)
        assert gone(heard) == [(SESSION, "closed")] and isinstance(of_call(heard, 3)[0], wire.Done)
    assert SESSION not in loop.scheduler.registry.sessions
    loop.shut_down()


@pytest.fixture
def away(tmp_path: Path) -> Iterator[EngineCommands]:
    """One session of two turns, whose memory lies on the host."""
    outbox = Outbox()
    directory = write_model(tmp_path / "llama", "llama")
    with tiny_engine(directory, observer=outbox, host_memory=8 << 20) as engine:
        commands = EngineCommands(engine.loop, outbox)
        commands.receive(wire.OpenSession(1, SESSION, "ann"))
        for call in (2, 3):
            start(commands, call, "the river runs " * 5, max_tokens=5)
            until_quiet(commands)
        commands.receive(wire.MoveSession(4, SESSION, "host"))
        until_quiet(commands)
        assert place(commands) is Place.AWAY
        yield commands
        assert engine.audit() == []


def place(commands: EngineCommands) -> Place:
    return commands.loop.scheduler.registry.find(SESSION).place


def test_a_rewind_has_memory_that_is_away_brought_back_and_turns_wait_for_it(away: EngineCommands) -> None:
    known = away.loop.scheduler.registry.find(SESSION).boundaries[0]
    away.receive(wire.Rewind(5, SESSION, 1))
    start(away, 6, "and deep", max_tokens=5)
    assert reports(away) == [] and place(away) is Place.AWAY
    assert away.loop.scheduler.registry.find(SESSION) in away.loop.scheduler.registry.queues.recalled
    heard = until_quiet(away)
    answered = [report.call for report in heard if isinstance(report, wire.Done)]
    assert answered == [5, 6], "in the order in which they came"
    (end,) = [end for report in heard if isinstance(report, wire.Step) for end in report.ends]
    assert (end.outcome, end.cached_tokens) == ("finished", known)


def test_a_fork_of_memory_that_is_away_shares_it(away: EngineCommands) -> None:
    away.receive(wire.Fork(5, SESSION, "ann/other", None))
    (answer,) = of_call(until_quiet(away), 5)
    assert isinstance(answer, wire.Done)
    child = away.loop.scheduler.registry.find("ann/other").sequence
    assert 0 < child.known - 1 <= child.computed


def test_a_turn_that_waited_for_a_verb_waits_a_step_for_the_turn_before_it(away: EngineCommands) -> None:
    away.receive(wire.Rewind(5, SESSION, 1))
    start(away, 6, "and deep", max_tokens=50)
    start(away, 7, "again", max_tokens=5)
    heard = reports(away)
    while not of_call(heard, 6):
        step(away)
        heard += reports(away)
    assert of_call(heard, 7) == [], "the word that the turn before is to end may follow"
    away.receive(wire.EndTurn(6, None, "the client went away"))
    away.retry()
    heard += reports(away) + until_quiet(away)
    assert ends(heard) == [(6, "aborted"), (7, "finished")]


def test_a_verb_does_not_overtake_one_that_waits(away: EngineCommands) -> None:
    boundaries = list(away.loop.scheduler.registry.find(SESSION).boundaries)
    away.receive(wire.Fork(5, SESSION, "ann/other", None))
    away.receive(wire.Rewind(6, SESSION, 0))
    assert reports(away) == []
    heard = until_quiet(away)
    assert [report.call for report in heard if isinstance(report, wire.Done)] == [5, 6]
    sessions = away.loop.scheduler.registry.sessions
    assert list(sessions["ann/other"].boundaries) == boundaries
    assert list(sessions[SESSION].boundaries) == []


@pytest.mark.parametrize(("turn", "keep"), [("t-6", None), (None, KEEP_ALL)])
def test_an_interruption_does_not_overtake_a_turn_that_waits_for_a_verb(
    away: EngineCommands, turn: str | None, keep: int | None
) -> None:
    boundaries = list(away.loop.scheduler.registry.find(SESSION).boundaries)
    away.receive(wire.Fork(5, SESSION, "ann/other", None))
    start(away, 6, "and deep", max_tokens=50)
    away.receive(wire.Interrupt(7, SESSION, turn, keep))
    assert reports(away) == []
    heard = until_quiet(away)
    assert ends(heard) == [(6, "aborted")] and isinstance(of_call(heard, 7)[0], wire.Done)
    assert list(away.loop.scheduler.registry.find(SESSION).boundaries)[:2] == boundaries


def test_a_close_does_not_wait_for_a_verb_that_waits(away: EngineCommands) -> None:
    away.receive(wire.Rewind(5, SESSION, 1))
    away.receive(wire.CloseSession(6, SESSION))
    heard = reports(away) + until_quiet(away)
    (refused,) = of_call(heard, 5)
    assert isinstance(refused, wire.Declined) and refused.code == "session_not_found"
    assert isinstance(of_call(heard, 6)[0], wire.Done)
    start(away, 7, "again")
    (refused,) = of_call(until_quiet(away) + reports(away), 7)
    assert isinstance(refused, wire.Declined) and refused.code == "session_not_found"


def test_what_waits_never_acts_on_another_session_that_has_the_name_since(away: EngineCommands) -> None:
    away.receive(wire.Fork(5, SESSION, "ann/other", None))
    start(away, 6, "and deep", max_tokens=5)
    away.receive(wire.CloseSession(7, SESSION))
    away.receive(wire.OpenSession(8, SESSION, "ann"))
    start(away, 9, "anew", max_tokens=5)
    away.retry()
    heard = reports(away) + until_quiet(away)
    for call in (5, 6):
        (refused,) = of_call(heard, call)
        assert isinstance(refused, wire.Declined) and refused.code == "session_not_found"
    for call in (7, 8, 9):
        assert isinstance(of_call(heard, call)[0], wire.Done)
    assert ends(heard) == [(9, "finished")]
    assert "ann/other" not in away.loop.scheduler.registry.sessions


def test_sessions_of_a_shared_journal_are_told_once_the_journal_has_confirmed_them() -> None:
    """An engine that was cut off may have been declared dead: what it has may be another one's by now."""
    commands = echo_commands()
    commands.receive(wire.OpenSession(1, SESSION, "ann"))
    reports(commands)
    host = EngineHost(commands, "echo", "e0", {})
    alone = [
        each.name for part in host.introduction() if isinstance(part, wire.Ready) for each in shown(part)
    ]
    assert alone == [SESSION] and list(host.untold()) == []
    journal: Any = SimpleNamespace(confirmed=0.0)
    host._owning, host.journal = journal, "shared"
    untold = host.untold()
    assert [next(untold), next(untold)] == [None, None]
    journal.confirmed = time.monotonic()
    told = [stored.view.name for part in untold if part is not None for stored in part.stored]
    assert told == [SESSION]


def shown(ready: wire.Ready) -> list[wire.SessionView]:
    return [stored.view for stored in ready.sessions]
