"""Every request has exactly one end: all pairs of verbs, in every state of a turn.

The echo engine runs in this process. Commands and reports cross as frames, as between two processes. Whatever
two verbs do to each other, each call is answered once, and each turn that was accepted ends once.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from holdfast.core.session import Life, Place, Session
from holdfast.core.turn import Ending, TurnEvent
from holdfast.server.http.problems import Problem
from holdfast.server.link import wire
from holdfast.server.link.engine_client import EngineClient, EngineObserver, TurnFeed
from tests.server.in_process import echo_commands

ROUNDS_MAX = 400


class Indifferent(EngineObserver):
    """Hears everything and does nothing."""


class House:
    """An engine, and a link to it."""

    def __init__(self, overlap: bool, journal: Path | None = None) -> None:
        self.commands = echo_commands(
            "echo-hybrid",
            kv_tokens=1 << 16,
            state_slots=256,
            overlap=overlap,
            host_memory=1 << 22,
            journal=None if journal is None else str(journal),
        )
        self.loop = self.commands.loop
        self.sent: list[wire.Command] = []
        self.received: set[object] = set()
        """The kinds of commands and questions that reached the engine."""
        self.link = self._client()
        self.answers: Counter[int] = Counter()
        self.ends: Counter[int] = Counter()
        self.accepted: set[int] = set()
        self.tasks: list[asyncio.Task[object]] = []
        self.feeds: list[TurnFeed] = []
        self.lost = False
        self.names = itertools.count()
        self.name = ""

    def _client(self) -> EngineClient:
        client = EngineClient(Indifferent())
        client.connect(self.sent.append)
        return client

    # --- the engine -------------------------------------------------------------------------------

    @property
    def session(self) -> Session:
        return self.loop.scheduler.registry.sessions[self.name]

    async def round(self, step: bool = True) -> None:
        """What the engine process does between two steps, and then a step."""
        for _ in range(3):
            await asyncio.sleep(0)
        commands, self.sent[:] = list(self.sent), []
        for command in commands:
            self.received.add(command.what if isinstance(command, wire.Ask) else type(command))
            self.commands.receive(wire.decode_command(wire.encode(command)))
        self.commands.retry()
        self.commands.report()
        self._tell()
        if step:
            self.loop.step()
            self._tell()
        for _ in range(3):
            await asyncio.sleep(0)

    def _tell(self) -> None:
        for report in self.commands.take_reports():
            heard = wire.decode_report(wire.encode(report))
            if isinstance(heard, wire.Done | wire.Declined):
                self.answers[heard.call] += 1
                if isinstance(heard, wire.Done):
                    self.accepted.add(heard.call)
            elif isinstance(heard, wire.Step):
                self.ends.update(end.turn for end in heard.ends)
            if not self.lost:
                self.link.hear(heard)

    async def until(self, true: Callable[[], bool]) -> None:
        for _ in range(ROUNDS_MAX):
            if true():
                return
            await self.round()
        raise AssertionError("it never came to that")

    # --- clients ----------------------------------------------------------------------------------

    def call(self, make: Callable[[int], wire.Command]) -> None:
        async def waits() -> object:
            number = self.link.number()
            return await self.link.call(make(number), number)

        self.tasks.append(asyncio.create_task(waits()))

    def start(self, max_tokens: int = 5000, session: bool = True, **more: object) -> None:
        async def speaks() -> object:
            call = self.link.number()
            tokens = self.loop.setup.tokenizer.encode("on and on")
            fields = wire.SamplingFields(max_tokens=max_tokens, ignore_eos=True)
            name = self.name if session else None
            if "volatile" in more:
                name = f"{self.name}-hidden-{call}"
            turn = f"t-{call}" if session else f"ann#r-{call}"
            command = wire.StartTurn(call, turn, "ann", tokens, fields, session=name, **more)
            (feed,) = await self.link.start([command])
            self.feeds.append(feed)
            return await feed.result()

        self.tasks.append(asyncio.create_task(speaks()))

    async def settled(self, case: str) -> None:
        """End what goes on, and see that everything has ended once."""
        for _ in range(3):
            await self.round()
        for _ in range(ROUNDS_MAX):
            if not self.lost and self.link.turns:
                self.link.end_all("the test is over")
            await self.round()
            if not (self.loop.busy or self.commands.waits or self.commands.reporting or self.sent):
                break
        waiting = [task for task in self.tasks if not task.done()]
        assert not waiting, f"{case}: {len(waiting)} of {len(self.tasks)} requests hang"
        for task in self.tasks:
            error = task.exception()
            assert error is None or isinstance(error, Problem), f"{case}: {error!r}"
        if not self.lost:
            assert set(self.answers.values()) <= {1}, f"{case}: {self.answers}"
            turns = {feed.call for feed in self.feeds}
            assert {call: self.ends[call] for call in turns} == dict.fromkeys(turns, 1), case
            assert set(self.ends.values()) <= {1} and set(self.ends) <= self.accepted, f"{case}: {self.ends}"
        assert self.commands.turns == {} and not self.commands.waits, case

    async def reset(self) -> None:
        """Another session, and a link that knows of nothing."""
        if self.name in self.loop.scheduler.registry.sessions:
            self.commands.receive(wire.CloseSession(0, self.name))
        while self.loop.busy:
            self.loop.step()
        self.commands.take_reports()
        self.link = self._client()
        self.link._numbers = itertools.count(1 + 1000 * next(self.names))
        self.answers.clear(), self.ends.clear(), self.accepted.clear()
        self.tasks, self.feeds, self.lost = [], [], False
        self.name = f"ann/s-{next(self.names)}"
        self.call(lambda number: wire.OpenSession(number, self.name, "ann"))
        await self.round()


# --- states ---------------------------------------------------------------------------------------


async def idle(house: House) -> None:
    house.start(max_tokens=4)
    await house.until(lambda: bool(house.feeds and house.feeds[0].over) and house.session.life is Life.IDLE)


async def queued(house: House) -> None:
    house.start()
    await house.round(step=False)
    assert house.session.life is Life.QUEUED


async def running(house: House) -> None:
    house.start()
    await house.until(lambda: house.session.turn is not None and house.session.turn.generated > 2)
    assert house.session.life is Life.RUNNING


async def held(house: House) -> None:
    await running(house)
    house.start()
    await house.round(step=False)
    assert len(house.commands.verbs._submission._waiting) == 1


async def retracted(house: House) -> None:
    await running(house)
    turn = house.session.turn
    assert turn is not None
    turn.ending = Ending(TurnEvent.RETRACT, "memory is short")
    # It is taken back when its rows have settled, and would be admitted again by the plan after that.
    house.loop._settle(house.loop._pending) if house.loop._pending is not None else None
    house.loop._pending = None
    if not house.session.unsettled and house.session.life is Life.RUNNING:
        house.loop.scheduler.settler.end(house.session)
    assert house.session.life is Life.QUEUED and turn.retracts == 1


async def sealing(house: House) -> None:
    house.start(max_tokens=4)
    await house.until(lambda: house.session.life is Life.SEALING)


async def ending(house: House) -> None:
    await running(house)
    house.link.end(house.feeds[0], None, "it ends")
    await house.round(step=False)


async def closing(house: House) -> None:
    await running(house)
    house.call(lambda number: wire.CloseSession(number, house.name))
    await house.round(step=False)


async def being_written(house: House) -> None:
    flush = house.loop.session_log.flush
    house.loop.session_log.flush = lambda: None  # type: ignore[method-assign]
    house.start(max_tokens=4)
    await house.until(lambda: house.session.life is Life.IDLE and len(house.session.boundaries) == 1)
    assert house.feeds and not house.feeds[0].over
    house.loop.session_log.flush = flush  # type: ignore[method-assign]


async def listening(house: House) -> None:
    await idle(house)
    house.call(lambda number: wire.Hear(number, house.name, [7] * 40))
    await house.until(lambda: house.session.turn is not None and house.session.sequence.computed > 40)
    assert house.session.turn is not None and house.session.turn.is_open


async def leaving(house: House) -> None:
    await idle(house)
    house.call(lambda number: wire.MoveSession(number, house.name, "host"))
    await house.round(step=False)
    assert house.session.place is Place.LEAVING


async def away(house: House) -> None:
    await leaving(house)
    await house.until(lambda: house.session.place is Place.AWAY)


async def returning(house: House) -> None:
    await away(house)
    house.call(lambda number: wire.MoveSession(number, house.name, "device"))
    await house.round(step=False)
    assert house.session.place is Place.RETURNING


STATES = (
    idle,
    queued,
    running,
    held,
    retracted,
    sealing,
    ending,
    closing,
    being_written,
    listening,
    leaving,
    away,
    returning,
)


# --- verbs ----------------------------------------------------------------------------------------


def _lose(house: House) -> None:
    house.lost = True
    house.link.lose()
    # The engine process ends; here it is told that nobody listens any more.
    for call in list(house.commands.turns):
        house.commands.receive(wire.EndTurn(call, None, "the server is stopping"))


def _end(house: House) -> None:
    for feed in house.feeds:
        house.link.end(feed, None, "the client went away")


def _ask(house: House) -> None:
    for what in ("session", "leased", "turns", "tokens", "stored", "lives"):
        house.call(lambda number, what=what: wire.Ask(number, what, house.name))  # type: ignore[misc]
    house.call(lambda number: wire.Ask(number, "sessions", names=[house.name]))
    for what in ("memory", "picture"):
        house.call(lambda number, what=what: wire.Ask(number, what))  # type: ignore[misc]


VERBS: dict[str, Callable[[House], None]] = {
    "open": lambda house: house.call(lambda number: wire.OpenSession(number, f"{house.name}-other", "ann")),
    "open again": lambda house: house.call(lambda number: wire.OpenSession(number, house.name, "ann")),
    "start": lambda house: house.start(),
    "request": lambda house: house.start(session=False),
    "end": _end,
    "abort_all": lambda house: house.link.end_all("all requests were aborted"),
    "interrupt": lambda house: house.call(lambda number: wire.Interrupt(number, house.name, None, -1)),
    "cut": lambda house: house.call(lambda number: wire.Interrupt(number, house.name, None, 1)),
    "rewind": lambda house: house.call(lambda number: wire.Rewind(number, house.name, 0)),
    "fork": lambda house: house.call(
        lambda number: wire.Fork(number, house.name, f"{house.name}-fork-{number}", None)
    ),
    "spill": lambda house: house.call(lambda number: wire.MoveSession(number, house.name, "host")),
    "restore": lambda house: house.call(lambda number: wire.MoveSession(number, house.name, "device")),
    "close": lambda house: house.call(lambda number: wire.CloseSession(number, house.name)),
    "steer": lambda house: house.start(steers=-1),
    "hidden": lambda house: house.start(volatile=True, known=0),
    "hear": lambda house: house.call(lambda number: wire.Hear(number, house.name, [7] * 9)),
    "take back": lambda house: house.call(lambda number: wire.Hear(number, house.name, [])),
    "expect": lambda house: house.call(lambda number: wire.Hear(number, house.name, [], soon=True)),
    "compact": lambda house: house.call(
        lambda number: wire.Compact(number, house.name, 1, 1, [7] * 5, f"c-{number}")
    ),
    "update": lambda house: house.call(
        lambda number: wire.UpdateSession(number, house.name, {"a": "b"}, {"ttl": 60.0})
    ),
    "claim": lambda house: house.call(lambda number: wire.Claim(number, house.name)),
    "hand over": lambda house: house.call(lambda number: wire.HandOver(number, house.name, "another")),
    "flush": lambda house: house.call(lambda number: wire.Ask(number, "flush")),
    "ask": _ask,
    "engine loss": _lose,
}


PAIRS = tuple(itertools.product(VERBS, repeat=2))


@pytest.mark.parametrize("others", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["", "others"])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_every_request_has_one_end(
    state: Callable[[House], object], overlap: bool, others: bool, tmp_path: Path
) -> None:
    """With overlap the second verb comes in the same round as the first, without in the one after it.

    Each pair runs in each state, in turn with and without overlap; `make soak` runs the `others` as well.
    """
    written = state is being_written
    pairs = PAIRS[(STATES.index(state) + overlap + others) % 2 :: 2]

    async def all_pairs() -> None:
        house = House(overlap, tmp_path / "journal.db" if written else None)
        for first, second in pairs:
            await house.reset()
            await state(house)  # type: ignore[misc]
            VERBS[first](house)
            await house.round(step=not overlap)
            if not house.lost:
                VERBS[second](house)
            await house.settled(f"{state.__name__}: {first}, {second}")
        assert house.loop.scheduler.recount() == []
        house.loop.shut_down()

    asyncio.run(all_pairs())


ABOUT_NO_SESSION = {
    wire.Configure,
    wire.Stop,
    wire.Greeting,
    wire.Beat,
    wire.Drain,
    wire.Stage,
    wire.Content,
    wire.Abandon,
    wire.FetchMissed,
    wire.Missed,
    wire.KeepMissed,
}


def test_every_command_and_question_is_among_the_verbs() -> None:
    async def all_verbs() -> set[object]:
        house = House(overlap=False)
        await house.reset()
        for verb in VERBS.values():
            verb(house)
            await house.round()
        await house.settled("all verbs")
        house.loop.shut_down()
        return house.received

    asked = {*get_args(wire.Command), *wire.Question} - {wire.Ask} - ABOUT_NO_SESSION
    assert asyncio.run(all_verbs()) == asked
