"""The API process's record of sessions, without an engine: what is told in one go is taken in its order."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec
import pytest
from tokenizers import AddedToken

from holdfast.engine.echo import open_echo
from holdfast.engine.options import make_options
from holdfast.engine.sampling import Sampling
from holdfast.server.http.keys import Caller
from holdfast.server.http.problems import Problem
from holdfast.server.link import wire
from holdfast.server.link.worker import model_facts, vocabulary_of
from holdfast.server.options import ServerOptions
from holdfast.server.routes.sglang_body import GENERATE_BODY
from holdfast.server.routes.sglang_call import Call
from holdfast.server.routes.sglang_sessions import Native
from holdfast.server.service import Service
from holdfast.server.sessions import SessionRecord
from holdfast.server.telemetry.metrics import Metrics
from holdfast.server.turn_request import Input, SessionGiven, TurnAsked
from holdfast.server.turn_writer import TurnWriter

ANN = Caller("ann", admin=False)
VIEW = wire.SessionView("ann/s", 0, None, 0)


class Engine:
    """Stands for the engine process: what it was asked, and what it says to that."""

    def __init__(self, tenant_sessions: int | None = None) -> None:
        options = ServerOptions(seed=7, tenant_sessions=tenant_sessions)
        self.service = Service(options, wire.Configure("none", {}), Metrics(), "none", lambda *_: None)
        self.link = self.service.link
        self.link.connect(self._take)
        self.asked: list[Any] = []

    def _take(self, command: wire.Command) -> None:
        self.asked.append(command)

    async def until_asked(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Begin something, up to the moment when the engine has been asked."""
        before, task = len(self.asked), asyncio.create_task(work)
        while len(self.asked) == before and not task.done():
            await asyncio.sleep(0)
        return task

    def says(self, *reports: wire.Report) -> None:
        """Several messages in one go: nobody who waits has a turn between them."""
        for report in reports:
            self.link.hear(report)

    async def opened(self, name: str | None) -> SessionRecord:
        task = await self.until_asked(self.service.sessions.open(ANN, name))
        self.says(wire.Done(self.asked[-1].call, wire.SessionView(self.asked[-1].session, 0, None, 0)))
        record = await task
        assert isinstance(record, SessionRecord)
        return record


def with_engine(story: Callable[[Engine], Awaitable[None]], tenant_sessions: int | None = None) -> None:
    async def run() -> None:
        await story(Engine(tenant_sessions))

    asyncio.run(run())


async def is_gone(task: "asyncio.Task[Any]", code: str) -> None:
    with pytest.raises(Problem) as refused:
        await task
    assert refused.value.code == code


def test_a_session_that_expires_as_it_is_opened_leaves_no_record() -> None:
    async def story(engine: Engine) -> None:
        task = await engine.until_asked(engine.service.sessions.open(ANN, "s", SessionGiven(ttl=1e-9)))
        engine.says(wire.Done(engine.asked[-1].call, VIEW), wire.Step(gone=[("ann/s", "expired")]))
        await is_gone(task, "session_expired")
        assert engine.service.table.of("ann") == []

    with_engine(story)


@pytest.mark.parametrize("view", [wire.SessionView("ann/f", 0, None, 0), None], ids=["there", "gone"])
def test_a_fork_that_expires_as_it_is_made_leaves_no_record(view: wire.SessionView | None) -> None:
    async def story(engine: Engine) -> None:
        parent = await engine.opened("s")
        task = await engine.until_asked(engine.service.sessions.fork(parent, "f", None))
        engine.says(wire.Done(engine.asked[-1].call, view, "ann/f"), wire.Step(gone=[("ann/f", "expired")]))
        await is_gone(task, "session_expired")
        assert engine.service.table.of("ann") == [parent]

    with_engine(story)


def test_a_session_whose_client_left_while_it_was_opened_is_known() -> None:
    async def story(engine: Engine) -> None:
        task = await engine.until_asked(engine.service.sessions.open(ANN, "s"))
        task.cancel()
        await asyncio.wait({task})
        engine.says(wire.Done(engine.asked[-1].call, VIEW))
        assert [record.name for record in engine.service.table.of("ann")] == ["s"]

    with_engine(story)


def test_sessions_that_are_being_opened_count_and_have_their_names() -> None:
    async def story(engine: Engine) -> None:
        service = engine.service
        parent = await engine.opened("s")
        works = (service.sessions.open(ANN, "first"), service.sessions.fork(parent, "second", None))
        tasks = [await engine.until_asked(work) for work in works]
        native = Native(service)
        taken = [name for name in ("s", "first", "second", "third") if native.exists("ann", name)]
        assert taken == ["s", "first", "second"]
        assert (service.table.count("ann"), service.table.count("an")) == (3, 0)
        with pytest.raises(Problem):
            native.open(ANN, "third", None)
        for work in (service.sessions.open(ANN, "third"), service.sessions.fork(parent, "third", None)):
            with pytest.raises(Problem) as refused:
                await work
            assert refused.value.code == "too_many_sessions"
        first, second = engine.asked[-2:]
        engine.says(
            wire.Declined(first.call, "too_many_sessions", "no room"),
            wire.Done(second.call, wire.SessionView("ann/second", 0, None, 0), "ann/second"),
        )
        assert (service.table.count("ann"), service.table.is_taken("ann", "first")) == (2, False)
        await asyncio.wait(tasks)
        assert [type(task.exception()) for task in tasks] == [Problem, type(None)]

    with_engine(story, tenant_sessions=3)


@pytest.mark.parametrize("answer", ["done", "declined", "lost"])
def test_sessions_whose_clients_left_count_and_have_their_names_until_the_answer(answer: str) -> None:
    async def story(engine: Engine) -> None:
        table = engine.service.table
        parent = await engine.opened("s")
        sessions = engine.service.sessions
        works = (sessions.open(ANN, "first"), sessions.fork(parent, "second", None))
        for work in works:
            task = await engine.until_asked(work)
            task.cancel()
            await asyncio.wait({task})
        assert table.count("ann") == 3
        assert table.is_taken("ann", "first") and table.is_taken("ann", "second")
        for asked, key in zip(engine.asked[-2:], ("ann/first", "ann/second"), strict=True):
            if answer == "done":
                engine.says(wire.Done(asked.call, wire.SessionView(key, 0, None, 0), key))
            elif answer == "declined":
                engine.says(wire.Declined(asked.call, "session_exists", "there is one"))
        if answer == "lost":
            engine.link.lose()
        there = answer == "done"
        assert table.count("ann") == (3 if there else 1)
        assert [table.is_taken("ann", name) for name in ("first", "second")] == [there, there]

    with_engine(story)


def test_a_session_that_cannot_be_asked_for_does_not_count() -> None:
    async def story(engine: Engine) -> None:
        engine.link.lose()
        await is_gone(asyncio.create_task(engine.service.sessions.open(ANN, "s")), "engine_unavailable")
        assert engine.service.table.count("ann") == 0

    with_engine(story)


def test_sessions_of_both_kinds_count_together() -> None:
    async def story(engine: Engine) -> None:
        service = engine.service
        native = Native(service)
        native.open(ANN, "ordinary", 1e-9)
        parent = await engine.opened("s")
        native.open(ANN, "other", None)
        for work in (service.sessions.open(ANN, "third"), service.sessions.fork(parent, "third", None)):
            task = await engine.until_asked(work)
            assert task.done(), "the engine is not asked"
            await is_gone(task, "too_many_sessions")
        asking = await engine.until_asked(service.sessions.fork(parent, "third", None, request_id="again"))
        assert engine.asked[-1].anew is False, "only one that was made before is answered"
        engine.says(wire.Declined(engine.asked[-1].call, "too_many_sessions", "no room"))
        await is_gone(asking, "too_many_sessions")
        bob = await engine.until_asked(service.sessions.open(Caller("bob", admin=False), "s"))
        assert isinstance(engine.asked[-1], wire.OpenSession) and not bob.done()
        bob.cancel()

    with_engine(story, tenant_sessions=2)


def test_a_session_that_is_closed_is_removed_though_its_client_left_meanwhile() -> None:
    async def story(engine: Engine) -> None:
        await engine.opened("s")
        task = await engine.until_asked(engine.service.sessions.close(ANN, "s"))
        task.cancel()
        await asyncio.wait({task})
        engine.says(wire.Step(gone=[("ann/s", "closed")]), wire.Done(engine.asked[-1].call))
        assert engine.service.table.of("ann") == []

    with_engine(story)


def test_a_session_that_is_opened_as_another_of_its_name_is_closed_stays() -> None:
    async def story(engine: Engine) -> None:
        before = await engine.opened("s")
        closing = await engine.until_asked(engine.service.sessions.close(ANN, "s"))
        opening = await engine.until_asked(engine.service.sessions.open(ANN, "s"))
        closed, opened = engine.asked[-2:]
        engine.says(
            wire.Step(gone=[("ann/s", "closed")]), wire.Done(closed.call), wire.Done(opened.call, VIEW)
        )
        await closing
        record = await opening
        assert engine.service.table.of("ann") == [record] and record is not before

    with_engine(story)


def test_a_request_whose_ordinary_session_is_closed_as_it_is_started_is_ended() -> None:
    async def story(engine: Engine) -> None:
        loop = open_echo("echo", make_options())
        facts = model_facts(loop, "echo")
        engine.service.supervisor.facts = facts
        engine.service.engine_ready(wire.Ready(facts, vocabulary_of(loop.setup.tokenizer), []))
        native = Native(engine.service)
        native.open(ANN, "o", None)
        branches = native.ordinary.find("ann", "o")
        assert branches is not None
        body = {"input_ids": [1, 2, 3], "rid": "r", "session_params": {"id": "o"}}
        call = Call(native, ANN, msgspec.convert(body, GENERATE_BODY.read))
        task = await engine.until_asked(call.start())
        started = engine.asked[-1]
        native.close(branches)
        engine.says(wire.Done(started.call, answer=50))
        await is_gone(task, "session_not_found")
        assert [each.turn for each in engine.asked if isinstance(each, wire.EndTurn)] == [started.call]
        assert call.choices == [] and branches.tree.logs == {}
        engine.service.close()

    with_engine(story)


def test_a_lost_engine_is_heard_of_by_all_who_wait_and_by_nobody_twice() -> None:
    async def story(engine: Engine) -> None:
        task = await engine.until_asked(engine.service.sessions.open(ANN, "s"))
        engine.link.lose()
        await is_gone(task, "engine_lost")
        engine.says(wire.Done(engine.asked[-1].call, VIEW))
        assert engine.service.table.of("ann") == []

    with_engine(story)


def test_a_mark_that_only_the_tokenizer_knows_is_refused() -> None:
    async def story(engine: Engine) -> None:
        loop = open_echo("echo", make_options())
        facts = model_facts(loop, "echo")
        vocabulary = facts.vocabulary
        loop.setup.tokenizer._encoder.add_special_tokens([AddedToken("<|image|>", special=True)])
        engine.service.supervisor.facts = facts
        engine.service.engine_ready(wire.Ready(facts, vocabulary_of(loop.setup.tokenizer), []))
        assert await engine.service.prompts.text("<|image|>", first=False) == [vocabulary]
        writer = TurnWriter(engine.service.prompts, facts)

        def asked(said: Input) -> TurnAsked:
            return TurnAsked(said, Sampling(), "t")

        for said in (
            Input(text="a picture"),
            Input(text="a picture: <|image|>"),  # In a message it is no mark.
            Input(messages=[{"role": "user", "content": "<|image|>"}]),
        ):
            assert max((await writer.write(asked(said), None, "ann")).tokens) < vocabulary
        for said in (Input(text="<|image|>", templated=False), Input(tokens=[1, vocabulary])):
            with pytest.raises(Problem) as caught:
                await writer.write(asked(said), None, "ann")
            assert caught.value.status == 400 and caught.value.param == "input"
        engine.service.close()

    with_engine(story)


def test_a_session_is_not_denied_before_the_engine_has_said_what_it_has() -> None:
    """A client that resumes as soon as a restarted server listens would give its session up."""

    async def main() -> None:
        service = Engine().service
        with pytest.raises(Problem) as caught:
            await service.sessions.find("ann", "s")
        assert (caught.value.status, caught.value.code) == (503, "engine_unavailable")

    asyncio.run(main())
