"""The work between two steps is the same at 10 and at 10,000 sessions, tenants, turns and waiting requests.

Counted are the lines of the product that run, by a trace: for each command, for each portion of a report, and
for what the loop does by itself. No time is measured.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, get_args

import pytest

from holdfast.core.deadlines import DUE_MAX
from holdfast.engine.turns.waiting import ATTEMPTS_MAX, SessionQueues, never_spent
from holdfast.server.link import wire
from holdfast.server.link.rounds import READ_MAX
from holdfast.server.link.worker import Worker
from holdfast.server.seeds import Seeds
from holdfast.server.sessions import SessionRecord, SessionTable, engine_name
from tests.server.in_process import echo_commands

FEW, MANY = 10, 10_000
SPEAKING = 300
"""Sessions of the many that have had a turn: each has memory of its own."""

ROUNDS = 40


def lines(act: Callable[[], object]) -> int:
    """How many lines of the product run."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        if "holdfast" not in frame.f_code.co_filename or "tests" in frame.f_code.co_filename:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return count


class Crowd:
    """An engine with sessions, each of a tenant of its own, requests that wait, and one busy session."""

    def __init__(self, size: int) -> None:
        self.engine = echo_commands(
            kv_tokens=1 << 18,
            overlap=True,
            host_memory=1 << 24,
            max_sessions=4 * MANY,
            max_queue=2 * MANY,
            max_running=8,
            session_ttl=3600.0,
        )
        self.loop = self.engine.loop
        self.calls = 0
        self.received: set[object] = set()
        """The kinds of commands and questions that were carried out."""
        for number in range(size):
            self.do(wire.OpenSession, f"t{number}/s", f"t{number}")
        for number in range(min(size, SPEAKING)):
            self.say(f"t{number}/s", "hello there", 2)
        self.settle()
        self.open_with_turn("ann/idle")
        self.open_with_turn("ann/away")
        self.open_with_turn("ann/cut")
        self.open_with_turn("ann/compact")
        self.open_with_turn("ann/heard")
        self.do(wire.OpenSession, "ann/steered", "ann")
        self.do(wire.MoveSession, "ann/away", "host")
        self.settle()
        self.do(wire.OpenSession, "ann/busy", "ann")
        self.busy = self.say("ann/busy", "on", 20_000)
        self.say("ann/steered", "on", 20_000)
        for _ in range(4):
            self.loop.step()
        for _ in range(size):  # In the queue, and in line behind the session that is busy.
            self.request()
            self.last = self.say("ann/busy", "again", 4)
        self.engine.take_reports()

    def do(self, command: Callable[..., wire.Command], *fields: object, **more: object) -> int:
        self.calls += 1
        self.receive(command(self.calls, *fields, **more))
        return self.calls

    def receive(self, command: wire.Command) -> None:
        self.received.add(command.what if isinstance(command, wire.Ask) else type(command))
        self.engine.receive(command)

    def turn(self, session: str | None, said: str, limit: int, name: str, **more: object) -> wire.StartTurn:
        self.calls += 1
        tokens = self.loop.setup.tokenizer.encode(said)
        fields = wire.SamplingFields(max_tokens=limit, ignore_eos=True)
        tenant = "ann" if session is None else session.partition("/")[0]
        named = f"{name}-{self.calls}"
        return wire.StartTurn(self.calls, named, tenant, tokens, fields, session=session, **more)

    def say(self, session: str, said: str, limit: int, **more: object) -> int:
        self.receive(self.turn(session, said, limit, "t", **more))
        return self.calls

    def request(self) -> int:
        self.receive(self.turn(None, "alone", 4, "ann#r"))
        return self.calls

    def open_with_turn(self, name: str) -> None:
        self.do(wire.OpenSession, name, "ann")
        self.say(name, "x" * 100, 4)
        self.settle()

    def settle(self) -> None:
        while self.loop.busy or self.engine.waits:
            self.loop.step()
            self.engine.retry()
        self.engine.take_reports()

    def names(self, count: int) -> list[str]:
        return [f"t{number % FEW}/s" for number in range(count)]


def command_rows() -> Iterator[tuple[str, Callable[[Crowd], object]]]:
    """Each command, as it finds the crowd."""
    yield "open", lambda crowd: crowd.do(wire.OpenSession, "ann/new", "ann")
    yield "open a name that is taken", lambda crowd: crowd.do(wire.OpenSession, "ann/idle", "ann")
    yield "start", lambda crowd: crowd.say("ann/new", "hello", 4)
    yield "start a request of its own", Crowd.request
    yield "start behind others", lambda crowd: crowd.say("ann/busy", "again", 4)
    yield "start a hidden session", lambda crowd: crowd.say("ann/hidden", "hello", 4, volatile=True, known=0)
    yield "steer", lambda crowd: crowd.say("ann/steered", "rather", 4, steers=-1)
    yield "end a turn that waits", lambda crowd: crowd.receive(wire.EndTurn(crowd.last, None, "gone"))
    yield "hear", lambda crowd: crowd.do(wire.Hear, "ann/heard", [7] * 50)
    yield "hear more", lambda crowd: crowd.do(wire.Hear, "ann/heard", [7] * 60)
    yield "take back what was heard", lambda crowd: crowd.do(wire.Hear, "ann/heard", [])
    yield "expect a turn", lambda crowd: crowd.do(wire.Hear, "ann/away", [], soon=True)
    yield "compact", lambda crowd: crowd.do(wire.Compact, "ann/compact", 1, 1, [7] * 20, "c")
    yield "update", lambda crowd: crowd.do(wire.UpdateSession, "ann/idle", {"a": "b"}, {"ttl": 60.0})
    yield "interrupt a turn that is over", lambda crowd: crowd.do(wire.Interrupt, "ann/cut", None, 1)
    yield "rewind", lambda crowd: crowd.do(wire.Rewind, "ann/cut", 0)
    yield "fork", lambda crowd: crowd.do(wire.Fork, "ann/idle", "ann/fork", None)
    yield "spill", lambda crowd: crowd.do(wire.MoveSession, "t1/s", "host")
    yield "restore", lambda crowd: crowd.do(wire.MoveSession, "ann/away", "device")
    yield "close", lambda crowd: crowd.do(wire.CloseSession, "ann/new")
    yield "ask for a session", lambda crowd: crowd.do(wire.Ask, "session", "ann/idle")
    yield "ask for what it leases", lambda crowd: crowd.do(wire.Ask, "leased", "ann/idle")
    for what in ("turns", "tokens", "stored"):
        yield f"ask for its {what}", lambda crowd, what=what: crowd.do(wire.Ask, what, "ann/idle")
    yield "ask for engines", lambda crowd: crowd.do(wire.Ask, "lives")
    yield "claim", lambda crowd: crowd.do(wire.Claim, "ann/idle")
    yield "hand over", lambda crowd: crowd.do(wire.HandOver, "ann/idle", "another")
    yield "stage", lambda crowd: crowd.do(wire.Stage, "ann/idle", "model", "layout", 1, "tokens", "types", 9)
    yield "abandon a file", lambda crowd: crowd.do(wire.Abandon, 1)
    yield "end a turn that runs", lambda crowd: crowd.receive(wire.EndTurn(crowd.busy, None, "gone"))
    yield "drain", lambda crowd: crowd.do(wire.Drain)
    yield "pulse", lambda crowd: crowd.engine.pulse()
    yield "tick", lambda crowd: crowd.loop.scheduler.tick(crowd.loop.now())


ROWS = dict(command_rows())


@pytest.fixture(scope="module")
def crowds() -> tuple[Crowd, Crowd]:
    return Crowd(FEW), Crowd(MANY)


OF_THE_WORKER = {wire.Configure, wire.Stop, wire.Greeting, wire.Content, wire.Beat}
"""What begins and ends a connection or the process: no client has it sent."""

OF_PEERS = {wire.FetchMissed, wire.Missed, wire.KeepMissed}
"""Messages from one API process to another, which the engine passes on as they are: `test_peers`."""


def test_every_command_and_question_has_a_row() -> None:
    crowd = Crowd(FEW)
    crowd.received.clear()
    for act in (*ROWS.values(), *REPORTS.values()):
        act(crowd)
    asked = {*get_args(wire.Command), *wire.Question} - OF_THE_WORKER - OF_PEERS - {wire.Ask}
    assert crowd.received == asked


def test_no_command_costs_more_among_many(crowds: tuple[Crowd, Crowd]) -> None:
    few, many = crowds
    cost = {
        name: (lines(lambda act=act: act(few)), lines(lambda act=act: act(many)))
        for name, act in ROWS.items()
    }
    assert all(small > 0 for small, _ in cost.values())
    grown = {name: pair for name, pair in cost.items() if pair[1] > 1.25 * pair[0] + 20}
    assert not grown, f"lines at {FEW} and at {MANY}: {grown}"


REPORTS = {
    "flush": lambda crowd: crowd.do(wire.Ask, "flush"),
    "memory of all": lambda crowd: crowd.do(wire.Ask, "memory"),
    "memory of a tenant": lambda crowd: crowd.do(wire.Ask, "memory", "t1"),
    "picture": lambda crowd: crowd.do(wire.Ask, "picture"),
    "a page of sessions": lambda crowd: crowd.do(wire.Ask, "sessions", names=crowd.names(1000)),
}


@pytest.mark.parametrize("report", REPORTS)
def test_no_portion_of_a_report_costs_more_among_many(crowds: tuple[Crowd, Crowd], report: str) -> None:
    asked: list[int] = []
    most = []
    for crowd in crowds:
        asked.append(lines(lambda crowd=crowd: REPORTS[report](crowd)))
        portions = []
        while crowd.engine.reporting:
            portions.append(lines(lambda crowd=crowd: crowd.engine.report(lambda: True)))
        most.append(max(portions))
        answers = [each for each in crowd.engine.take_reports() if isinstance(each, wire.Done)]
        assert [each.call for each in answers if each.call == crowd.calls] == [crowd.calls], (
            "and it is answered"
        )
    assert asked[1] <= asked[0] + 20
    assert max(most) <= 4000, f"lines of the largest portion at {FEW} and at {MANY}: {most}"


class Hand:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("what", ["sessions", "turns"])
def test_what_is_due_at_once_ends_a_few_at_a_time(what: str) -> None:
    """Thousands of sessions that expire together, or of turns that wait past their deadline."""
    most = []
    for size in (3 * DUE_MAX, 30 * DUE_MAX):
        clock = Hand()
        engine = echo_commands(clock=clock, kv_tokens=1 << 14, max_sessions=MANY, max_queue=MANY)
        registry = engine.loop.scheduler.registry
        for number in range(size):
            if what == "sessions":
                engine.receive(wire.OpenSession(number, f"ann/{number}", "ann", ttl=5.0))
            else:
                fields = wire.SamplingFields(max_tokens=4)
                engine.receive(wire.StartTurn(number, f"r{number}", "ann", [7], fields, timeout=5.0))
        assert len(registry.sessions) == size
        engine.take_reports()
        clock.now += 5.0
        costs = []
        while registry.sessions:
            clock.now += 0.001

            def tick(engine: Any = engine, now: float = clock.now) -> None:
                engine.loop.scheduler.tick(now)
                engine.loop.dispatcher.tell()
                engine.take_reports()

            costs.append(lines(tick))
            assert len(costs) <= size / DUE_MAX
        assert not registry.overdue
        most.append(max(costs))
    assert most[0] == most[1], f"lines at the most expensive tick: {most}"


def test_what_waits_is_tried_a_few_at_a_time_and_all_of_it_in_the_end(crowds: tuple[Crowd, Crowd]) -> None:
    most = [max(lines(crowd.engine.retry) for _ in range(ROUNDS)) for crowd in crowds]
    assert most[1] <= 1.25 * ATTEMPTS_MAX / FEW * most[0] + 200, most


@pytest.mark.parametrize("turns", [False, True])
def test_of_many_sessions_that_wait_a_few_are_tried_at_a_time_and_all_in_turn(turns: bool) -> None:
    tried: list[str] = []
    queues = SessionQueues(lambda _: False)
    names = [f"s-{number}" for number in range(4 * ATTEMPTS_MAX)]
    for name in names:

        def attempt(name: str = name) -> bool:
            tried.append(name)
            return False

        (queues.add_turn if turns else queues.add_verb)(name, attempt)
    tried.clear()
    for rounds in range(1, 5):
        queues.retry(never_spent)
        assert tried == names[: rounds * ATTEMPTS_MAX]
    queues.retry(lambda: True)
    assert tried == [*names, names[0]], "one at least, however little time there is"


class Wire:
    """The other end of the worker's socket: commands that come, reports that are counted."""

    def __init__(self, frames: list[bytes]) -> None:
        self.frames = frames
        self.reports: list[wire.Report] = []

    def wait(self, _seconds: float, _others: Iterable[int] = ()) -> bool:
        self.frames.append(wire.encode(wire.Stop()))
        return True

    def receive(self) -> bytes | None:
        return self.frames.pop(0) if self.frames else None

    def send(self, frame: bytes) -> None:
        self.reports.append(wire.decode_report(frame))


class Ticking:
    """A clock that goes on by a tenth of a round's budget whenever it is looked at."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.0001
        return self.now


def test_a_flood_of_commands_is_taken_in_rounds_and_delays_no_interruption() -> None:
    engine = echo_commands(overlap=False, max_sessions=5000, kv_tokens=1 << 16)
    flood = [wire.encode(wire.OpenSession(10 + number, f"bob/{number}", "bob")) for number in range(1000)]
    flood.insert(500, wire.encode(wire.EndTurn(2, None, "the client went away")))
    tokens = engine.loop.setup.tokenizer.encode("on and on")
    fields = wire.SamplingFields(max_tokens=20_000, ignore_eos=True)
    first = [
        wire.OpenSession(1, "ann/s", "ann"),
        wire.StartTurn(2, "t", "ann", tokens, fields, session="ann/s"),
    ]
    worker = Worker(Wire([]), engine, os.getppid(), Ticking())
    for command in first:
        engine.receive(command)
    engine.loop.step()
    worker.socket.frames.extend(flood)
    counts: list[int] = []
    ended = None
    while len(engine.loop.scheduler.registry.sessions) < 1001:
        before = len(engine.loop.scheduler.registry.sessions)
        worker._read(0.0)
        worker._carry_out(worker._budget())
        engine.loop.step()
        counts.append(len(engine.loop.scheduler.registry.sessions) - before)
        if ended is None and not engine.turns:
            ended = len(counts)
    running = counts[: ended or len(counts)]
    assert min(counts) >= 1 and max(running) <= 12, "a round has a budget"
    assert max(counts) <= READ_MAX
    assert ended is not None and sum(running) < 100, "the end passed commands of other sessions"
    opened = list(engine.loop.scheduler.registry.sessions)
    assert opened == ["ann/s", *(f"bob/{number}" for number in range(1000))], "in their order"


@pytest.mark.parametrize("longest", [0, 40_000])
def test_a_round_reads_a_bounded_part_of_a_flood(longest: int) -> None:
    """By frames, and by bytes, of which the last frame may be more."""
    system = "a" * longest
    flood = [wire.OpenSession(1 + number, f"bob/{number}", "bob", system=system) for number in range(1000)]
    worker = Worker(Wire([]), echo_commands(overlap=False), os.getppid(), Ticking())
    worker.socket.frames.extend(map(wire.encode, flood))
    worker._read(0.0)
    assert len(worker.backlog) == (4 if longest else 128)
    assert len(worker.socket.frames) == 1000 - len(worker.backlog)


def test_the_order_of_a_session_is_kept() -> None:
    engine = echo_commands(overlap=False)
    worker = Worker(Wire([]), engine, os.getppid(), Ticking())
    tokens = engine.loop.setup.tokenizer.encode("on")
    fields = wire.SamplingFields(max_tokens=50, ignore_eos=True)
    commands: list[wire.Command] = [
        wire.OpenSession(1, "ann/s", "ann"),
        wire.StartTurn(2, "t", "ann", tokens, fields, session="ann/s"),
        wire.Ask(3, "session", "ann/s"),
        wire.EndTurn(2, None, "gone"),
        wire.StartTurn(4, "ann#r", "ann", tokens, fields),
        wire.EndTurn(4, None, "gone"),
        wire.CloseSession(5, "ann/s"),
        wire.Interrupt(6, "ann/other", None, None),
        wire.EndTurn(99, None, "gone"),
    ]
    for command in commands:
        worker.backlog.add(command)
    taken = [worker.backlog.take() for _ in commands]
    assert len(worker.backlog) == 0
    assert taken[0] == commands[7] and taken[2] == commands[8], "what has nothing ahead of it passes"
    rest = [command for command in taken if command not in (commands[7], commands[8])]
    assert rest == commands[:7]


@pytest.mark.parametrize("elsewhere", [0, MANY])
def test_the_table_of_the_api_process_walks_nothing(elsewhere: int) -> None:
    table, seeds = SessionTable(), Seeds(None)

    def add(tenant: str, name: str) -> None:
        view = wire.SessionView(engine_name(tenant, name), 0, None, 0)
        table.add(SessionRecord(tenant, name, view, seeds.of_session(tenant, name)))

    for number in range(elsewhere):
        add(f"t{number % 100}", f"s{number}")
        table.opening("ann", f"o{number}")
    add("ann", "mine")
    expected = {"count": elsewhere + 1, "taken": True}
    found = {"count": table.count("ann"), "taken": table.is_taken("ann", "mine")}
    assert found == expected

    def look() -> None:
        table.count("ann")
        table.is_taken("ann", "other")
        answered = table.opening("ann", "new")
        add("ann", "new")
        answered()
        table.page("ann", 0, 10)
        table.remove("ann/new", "closed")

    assert lines(look) <= 90
    assert table.count("ann") == elsewhere + 1
