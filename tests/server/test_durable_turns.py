"""The engine process beside its journal: steps do not wait for it, answers do, and nothing is said twice."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.engine.durable.stores import read_sessions
from holdfast.engine.loop import EngineLoop
from holdfast.server.link import wire, worker
from holdfast.server.link.commands import EngineCommands
from holdfast.server.link.frames import FrameSocket
from holdfast.server.link.worker import Worker
from tests.databases import STORES, forbid_writing, new_place
from tests.server.in_process import echo_commands
from tests.server.test_commands import SESSION, ends, gone, of_call, reports, until_quiet

WAIT_SECONDS = 60.0


class Gate:
    """Stands before every transaction of a journal, and can be shut."""

    def __init__(self, loop: EngineLoop) -> None:
        assert loop.session_log.journal is not None
        self.open = threading.Event()
        self.open.set()
        self.threads: set[str] = set()
        loop.session_log.journal._probe = self.pass_through

    def pass_through(self, point: str) -> None:
        self.threads.add(threading.current_thread().name)
        if point == "before append":
            assert self.open.wait(WAIT_SECONDS)


@pytest.fixture(params=STORES)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A journal of each store in turn."""
    return new_place(request.param, tmp_path / "journal")


@pytest.fixture
def commands(path: str) -> Iterator[EngineCommands]:
    """One session, at rest, and a journal."""
    made = echo_commands(journal=path)
    made.receive(wire.OpenSession(1, SESSION, "ann"))
    until_quiet(made)
    yield made
    made.loop.shut_down()


def start(
    commands: EngineCommands, call: int, name: str, fingerprint: str | None = "body", **more: object
) -> None:
    fields = wire.SamplingFields(max_tokens=4, **more)  # type: ignore[arg-type]
    tokens = commands.loop.setup.tokenizer.encode("hello")
    commands.receive(
        wire.StartTurn(call, name, "ann", tokens, fields, session=SESSION, fingerprint=fingerprint)
    )


def until_computed(commands: EngineCommands) -> list[wire.Report]:
    """Make steps while one has anything to do, whatever is being written."""
    heard: list[wire.Report] = []
    while commands.loop.active:
        commands.loop.step()
        commands.retry()
        heard += reports(commands)
    return heard


def test_steps_go_on_while_the_journal_is_written(commands: EngineCommands) -> None:
    gate = Gate(commands.loop)
    gate.open.clear()
    start(commands, 2, "t1")
    assert ends(until_computed(commands)) == [], "its end is not durable"
    sampling = wire.SamplingFields(max_tokens=8)
    commands.receive(
        wire.StartTurn(3, "alone", "ann", commands.loop.setup.tokenizer.encode("by itself"), sampling)
    )
    heard = until_computed(commands)
    assert ends(heard) == [(3, "finished")], "what needs no journal does not wait for it"
    gate.open.set()
    assert ends(until_quiet(commands)) == [(2, "finished")]
    assert gate.threads == {"holdfast-journal"}, "nothing is written in the loop"


def test_a_turn_that_is_being_written_is_waited_for(commands: EngineCommands, path: str) -> None:
    gate = Gate(commands.loop)
    gate.open.clear()
    start(commands, 2, "t1")
    heard = until_computed(commands)
    start(commands, 3, "t1")
    commands.retry()
    assert of_call(reports(commands), 3) == [], "neither refused nor said twice"
    gate.open.set()
    heard += until_quiet(commands)
    assert ends(heard) == [(2, "finished"), (3, "finished")]
    (answer,) = of_call(heard, 3)
    assert isinstance(answer, wire.Done) and answer.replayed
    said = [end.tokens for report in heard if isinstance(report, wire.Step) for end in report.ends]
    assert said[0] == said[1] and said[0]
    assert [len(session.turns) for session in read_sessions(path)] == [1]


def test_another_body_for_a_turn_that_is_being_written_is_a_conflict(commands: EngineCommands) -> None:
    gate = Gate(commands.loop)
    gate.open.clear()
    start(commands, 2, "t1")
    until_computed(commands)
    start(commands, 3, "t1", "another body")
    gate.open.set()
    (refused,) = of_call(until_quiet(commands), 3)
    assert isinstance(refused, wire.Declined) and refused.code == "turn_conflict"


def test_a_turn_that_cannot_be_written_is_not_waited_for(commands: EngineCommands) -> None:
    assert commands.loop.session_log.journal is not None
    journal = commands.loop.session_log.journal
    forbid_writing(journal, True)
    start(commands, 2, "t1")
    until_computed(commands)
    start(commands, 3, "t1")
    while commands.waits:
        commands.loop.step()
        commands.retry()
    (refused,) = of_call(reports(commands), 3)
    assert isinstance(refused, wire.Declined) and refused.code == "journal_unavailable"
    forbid_writing(journal, False)
    assert ends(until_quiet(commands)) == [(2, "finished")]


def test_each_close_is_acknowledged_when_its_own_session_is_gone_for_good(
    commands: EngineCommands, path: str
) -> None:
    gate = Gate(commands.loop)
    gate.open.clear()
    commands.receive(wire.CloseSession(2, SESSION))
    commands.receive(wire.CloseSession(3, SESSION))
    commands.receive(wire.OpenSession(4, SESSION, "ann"))
    commands.receive(wire.CloseSession(5, SESSION))
    commands.loop.session_log.flush()
    assert reports(commands) == []
    gate.open.set()
    heard = until_quiet(commands)
    answers = [
        (report.call, type(report)) for report in heard if isinstance(report, wire.Done | wire.Declined)
    ]
    assert answers == [(2, wire.Done), (3, wire.Done), (4, wire.Done), (5, wire.Done)]
    assert gone(heard) == [(SESSION, "closed")] * 2
    assert read_sessions(path) == []


def test_an_idle_engine_wakes_up_when_something_is_durable(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sleeps until a command comes, for ever if none does: only the journal's news can end that."""
    monkeypatch.setattr(worker, "NAP_SECONDS", 10 * WAIT_SECONDS)
    commands = echo_commands(journal=path)
    loop = commands.loop
    gate = Gate(loop)
    mine, other = map(FrameSocket, socket.socketpair())
    engine = Worker(other, commands, worker.os.getppid())
    asleep = engine._await

    def sleep(seconds: float) -> bool:
        if loop.session_log.writing:
            gate.open.set()
        return asleep(seconds)

    monkeypatch.setattr(engine, "_await", sleep)
    gate.open.clear()
    thread = threading.Thread(target=engine.run)
    thread.start()
    sampling = wire.SamplingFields(max_tokens=4)
    mine.send(wire.encode(wire.OpenSession(1, SESSION, "ann")))
    awaited = {"open", "end"}
    try:
        while awaited:
            assert mine.wait(WAIT_SECONDS), f"nobody tells of {awaited}"
            frame = mine.receive()
            report = None if frame is None else wire.decode_report(frame)
            if isinstance(report, wire.Done) and report.call == 1:
                awaited.discard("open")
                gate.open.clear()
                tokens = loop.setup.tokenizer.encode("hello")
                mine.send(wire.encode(wire.StartTurn(2, "t1", "ann", tokens, sampling, session=SESSION)))
            elif isinstance(report, wire.Step) and report.ends:
                awaited.discard("end")
    finally:
        gate.open.set()
        mine.send(wire.encode(wire.Stop()))
        thread.join(WAIT_SECONDS)
        loop.shut_down()
        mine.close()
        other.close()
    assert [len(session.turns) for session in read_sessions(path)] == [1]


# --- what comes over the wire is not believed ---


@pytest.mark.parametrize("token", [-1, 258, 1 << 40])
@pytest.mark.parametrize("session", [SESSION, None])
def test_unknown_tokens_are_refused_by_the_engine_itself(
    commands: EngineCommands, token: int, session: str | None
) -> None:
    fields = wire.SamplingFields(max_tokens=4)
    commands.receive(wire.StartTurn(2, "t1", "ann", [1, token], fields, session=session))
    (refused,) = of_call(reports(commands), 2)
    assert isinstance(refused, wire.Declined)
    assert (refused.code, refused.param) == ("unknown_token", "input")
    start(commands, 3, "t2")
    assert ends(until_quiet(commands)) == [(3, "finished")]


@pytest.mark.parametrize(
    "fields",
    [
        wire.SamplingFields(stop_token_ids=[258]),
        wire.SamplingFields(stop_token_ids=[-1]),
        wire.SamplingFields(logit_bias={258: 1.0}),
        wire.SamplingFields(logit_bias={-1: 1.0}),
    ],
)
def test_unknown_tokens_in_what_a_turn_asks_for_are_refused(
    commands: EngineCommands, fields: wire.SamplingFields
) -> None:
    for call, session in ((2, SESSION), (3, None)):
        commands.receive(wire.StartTurn(call, f"t{call}", "ann", [1], fields, session=session))
        (refused,) = of_call(reports(commands), call)
        assert isinstance(refused, wire.Declined) and refused.code == "bad_sampling"


@pytest.mark.parametrize("choice", [-1, 1])
def test_a_choice_that_was_not_asked_for_is_refused(commands: EngineCommands, choice: int) -> None:
    commands.receive(wire.StartTurn(2, "t1", "ann", [1], wire.SamplingFields(), choice=choice))
    (refused,) = of_call(reports(commands), 2)
    assert isinstance(refused, wire.Declined) and refused.code == "bad_sampling"
