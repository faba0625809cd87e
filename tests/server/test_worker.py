"""The engine process's loop, with the API process played by the test: what is told before which step."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import msgspec
import pytest

from holdfast.core.scheduler import Scheduler
from holdfast.engine.grammars import Grammars
from holdfast.engine.reports.loop_times import LoopTimes
from holdfast.server.link import wire
from holdfast.server.link import worker as worker_module
from holdfast.server.link.commands import EngineCommands
from holdfast.server.link.frames import FrameSocket
from holdfast.server.link.worker import Worker
from tests.engine.test_grammars import Held
from tests.server.in_process import echo_commands

SESSION = "ann/talk"


class Counter:
    """The other end of the socket: answers what it hears with commands, and tells the engine to end."""

    def __init__(self, answer: Callable[[wire.Report], list[wire.Command]]) -> None:
        self.answer = answer
        self.commands: list[wire.Command] = []

    def wait(self, _seconds: float, _others: Iterable[int] = ()) -> bool:
        """The engine has nothing to do: unless there is a command for it, this is the end."""
        if not self.commands:
            self.commands.append(wire.Stop())
        return True

    def receive(self) -> bytes | None:
        if not self.commands:
            return None
        return wire.encode(self.commands.pop(0))

    def send(self, frame: bytes) -> None:
        self.commands += self.answer(wire.decode_report(frame))


def start(engine: EngineCommands, call: int, text: str) -> wire.StartTurn:
    tokens = engine.loop.setup.tokenizer.encode(text)
    return wire.StartTurn(call, f"t-{call}", "ann", tokens, wire.SamplingFields(), session=SESSION)


def make_engine(overlap: bool = False) -> EngineCommands:
    """An engine that only commands wake: there is no journal, and no grammar is compiled."""
    made = echo_commands("echo-hybrid", audit="strict", overlap=overlap)
    made.loop.setup.grammars.close()
    return made


def run(
    engine: EngineCommands, answer: Callable[[wire.Report], list[wire.Command]], *commands: wire.Command
) -> None:
    counter = Counter(answer)
    counter.commands += commands
    Worker(counter, engine, os.getppid(), lambda: 0.0).run()  # A round has all the time it needs.
    assert engine.loop.scheduler.recount() == []


def test_a_turn_s_acceptance_is_told_before_its_first_step() -> None:
    engine = make_engine()
    accepted: list[int] = []
    ended: list[int] = []

    def hear(report: wire.Report) -> list[wire.Command]:
        if isinstance(report, wire.Done) and report.call == 2:
            accepted.append(engine.loop.scheduler.registry.ledger.step)
        elif isinstance(report, wire.Step):
            ended.extend(end.turn for end in report.ends)
        return []

    run(engine, hear, wire.OpenSession(1, SESSION, "ann"), start(engine, 2, "hello"))
    assert accepted == [0] and ended == [2]


@pytest.mark.parametrize("end_first", [True, False], ids=["end first", "turn first"])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
def test_a_turn_right_after_an_abort_is_accepted_once_and_no_step_is_lost(
    overlap: bool, end_first: bool
) -> None:
    engine = make_engine(overlap)
    ledger = engine.loop.scheduler.registry.ledger
    left: list[int] = []
    accepted: list[int] = []
    refused: list[str] = []
    ends: list[tuple[int, str]] = []

    def hear(report: wire.Report) -> list[wire.Command]:
        if isinstance(report, wire.Declined):
            refused.append(report.code)
        elif isinstance(report, wire.Done) and report.call == 3:
            accepted.append(ledger.step)
        elif isinstance(report, wire.Step):
            ends.extend((end.turn, end.outcome) for end in report.ends)
            if not left and any(delta.turn == 2 for delta in report.deltas):
                left.append(ledger.step)
                commands = [wire.EndTurn(2, None, "the client went away"), start(engine, 3, "again")]
                return commands if end_first else commands[::-1]
        return []

    run(engine, hear, wire.OpenSession(1, SESSION, "ann"), start(engine, 2, "x" * 400))
    assert refused == [] and ends == [(2, "aborted"), (3, "finished")]
    # With overlap one row is in flight, and settles with the plan that is made after it.
    assert accepted == [left[0] + (1 if overlap else 0)]


def test_a_large_ledger_is_recounted_in_slices_after_the_last_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a census that began after the last step counts, whatever slices were done before it."""
    engine = make_engine()
    engine.receive(wire.OpenSession(1, SESSION, "ann"))
    engine.receive(start(engine, 2, "hello"))
    while engine.loop.busy:
        engine.loop.step()
    scheduler = engine.loop.scheduler
    monkeypatch.setattr(worker_module, "QUIET_SECONDS", -1.0)
    monkeypatch.setattr(worker_module, "WHOLE_HOLDS_MAX", 0)
    monkeypatch.setattr(worker_module, "AUDIT_UNITS", 100)
    monkeypatch.setattr(Scheduler, "recount", lambda _self: pytest.fail("that would take long"))
    scheduler.recount_some(1)
    assert not scheduler.audit.between_rounds, "a census is under way that began before"
    worker = Worker(Counter(lambda _report: []), engine, os.getppid())
    begun: list[bool] = []
    original = Scheduler.recount_some

    def noted(self: Scheduler, budget: int) -> bool:
        begun.append(self.audit.between_rounds)
        return original(self, budget)

    monkeypatch.setattr(Scheduler, "recount_some", noted)
    slices = 0
    while worker._counted != scheduler.registry.ledger.settled:
        worker._idle()
        slices += 1
        assert slices < 10_000
    assert begun.count(True) == 1 and slices == len(begun) > 2
    worker._idle()
    assert len(begun) == slices, "once after each spell of work"


def test_an_idle_engine_sleeps_while_a_grammar_is_compiled_and_wakes_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The turn waits, the process does not spin, and the end of the compilation ends its sleep."""
    builder = Held()
    engine = echo_commands("echo")
    engine.loop.setup.grammars.close()
    engine.loop.setup = replace(engine.loop.setup, grammars=Grammars(builder))
    engine = EngineCommands(engine.loop, engine._outbox)
    here, there = map(FrameSocket, socket.socketpair())
    try:
        worker = Worker(there, engine, os.getppid())
        rounds: list[float] = []
        monkeypatch.setattr(LoopTimes, "end_round", lambda _: rounds.append(time.monotonic()))
        thread = threading.Thread(target=worker.run)
        thread.start()
        here.send(wire.encode(wire.OpenSession(1, SESSION, "ann")))
        asked = msgspec.structs.replace(start(engine, 2, "aaaa"), grammar=wire.GrammarFields("regex", "a+"))
        here.send(wire.encode(asked))
        time.sleep(0.3)
        waited = len(rounds)
        builder.go.set()
        ended: list[str] = []
        while not ended:
            assert here.wait(30.0), "the engine sleeps for ever"
            frame = here.receive()
            report = None if frame is None else wire.decode_report(frame)
            ended += [end.outcome for end in report.ends] if isinstance(report, wire.Step) else []
        here.send(wire.encode(wire.Stop()))
        thread.join(10)
        assert waited < 600, "the process spins while it waits"
        assert not thread.is_alive() and not engine.waits
    finally:
        for each in (here, there):
            each.close()
