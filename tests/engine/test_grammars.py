"""Turns with grammars: they wait for the compiler, nothing else does, and each has exactly one end."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.core.errors import UnknownSession
from holdfast.core.turn import KEEP_ALL
from holdfast.engine.constraints.compiler import CompilerLimits
from holdfast.engine.constraints.errors import Fault, GrammarError
from holdfast.engine.constraints.grammar import Grammar, Kind
from holdfast.engine.constraints.matcher import Compiled
from holdfast.engine.constraints.toy import ToyCompiled
from holdfast.engine.echo import open_echo
from holdfast.engine.engine import Engine
from holdfast.engine.grammars import CODES, GrammarRefused, Grammars
from holdfast.engine.listeners import Refusal
from holdfast.engine.loop import EngineLoop
from holdfast.engine.options import make_options
from holdfast.engine.sampling import Sampling
from holdfast.engine.turns.spec import HistoryChanged, TurnSpec
from holdfast.engine.verbs import Verbs
from tests.engine.direct import Heard
from tests.engine.test_verbs import VERBS, Replies

GRAMMAR = Grammar(Kind.REGEX, "a+")
END = 256
SHORT = Sampling(max_tokens=4)
LONG = Sampling(max_tokens=500, ignore_eos=True)


class Held:
    """A builder whose compilations end when they are told to."""

    identity = "toy"

    def __init__(self) -> None:
        self.go = threading.Event()
        self.error: GrammarError | None = None
        self.compiled = 0

    def compile(self, grammar: Grammar) -> Compiled:
        assert self.go.wait(10)
        self.compiled += 1
        if self.error is not None:
            raise self.error
        return ToyCompiled(258, END)


class Told(Heard):
    """A turn that may be refused or dropped; counts its answers."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[str] = []
        self.refusal: Refusal | None = None

    def begun(self, *values: object) -> None:
        super().begun(*values)  # type: ignore[arg-type]
        self.answers.append("begun")

    def refused(self, refusal: Refusal) -> None:
        self.refusal = refusal
        self.answers.append("refused")

    def dropped(self, reason: str) -> None:
        self.answers.append("dropped")

    def replayed(self, *_: object) -> None:
        self.answers.append("replayed")


@pytest.fixture
def builder() -> Iterator[Held]:
    made = Held()
    yield made
    made.go.set()


@pytest.fixture
def loop(builder: Held, tmp_path: Path) -> Iterator[EngineLoop]:
    options = make_options(
        journal=str(tmp_path / "journal"), kv_tokens=4096, host_memory=1 << 20, audit="strict"
    )
    made = open_echo("echo", options)
    made.setup.grammars.close()
    made.setup = replace(made.setup, grammars=Grammars(builder, limits=CompilerLimits(waiting_max=2)))
    yield made
    builder.go.set()
    made.shut_down()
    assert made.scheduler.recount() == []


def submit(verbs: Verbs, turn_id: str, session: str | None = "s", **more: object) -> Told:
    told = Told()
    spec = TurnSpec(turn_id, "ann", [1, 2, 3] * 3, SHORT, session, **{"grammar": GRAMMAR, **more})  # type: ignore[arg-type]
    verbs.submit(told, spec)
    return told


def run(verbs: Verbs, until: Callable[[], bool] = lambda: False) -> None:
    """Drive until nothing is left to do, or earlier."""
    deadline = time.monotonic() + 20
    while (verbs.loop.busy or verbs.waits) and not until():
        assert time.monotonic() < deadline, "something waits for ever"
        verbs.loop.step()
        verbs.rest(0.005)
        verbs.retry()


def opened(loop: EngineLoop, patient: bool = False) -> Verbs:
    verbs = Verbs(loop, patient)
    verbs.open(Replies(), "s", "ann")
    return verbs


@pytest.mark.parametrize("session", ["s", None])
def test_a_turn_waits_for_its_grammar_and_nothing_else_does(
    loop: EngineLoop, builder: Held, session: str | None
) -> None:
    verbs = opened(loop)
    verbs.open(Replies(), "other", "ann")
    waiting = submit(verbs, "t1", session)
    other = submit(verbs, "t2", "other", grammar=None)
    run(verbs, lambda: bool(other.events) and other.events[-1].kind == "finished")
    assert waiting.answers == [] and verbs.waits and verbs.compiles
    builder.go.set()
    run(verbs)
    assert waiting.answers == ["begun"] and waiting.events[-1].kind == "finished"
    assert not verbs.waits and not verbs.compiles
    again = submit(verbs, "t3", session)
    assert again.answers == ["begun"], "the compiled grammar is cached"
    run(verbs)
    assert builder.compiled == 1


def test_later_turns_and_verbs_of_the_session_wait_behind(loop: EngineLoop, builder: Held) -> None:
    verbs = opened(loop, patient=True)
    first, rewound = submit(verbs, "t1"), Replies()
    verbs.rewind(rewound, "s", 0)
    second = submit(verbs, "t2", grammar=None)
    loop.step()
    verbs.retry()
    assert first.answers == second.answers == [] and rewound.count == 0
    builder.go.set()
    run(verbs)
    assert first.answers == ["begun"] and rewound.count == 1 and len(second.answers) == 1


@pytest.mark.parametrize("fault", [fault for fault in Fault if fault is not Fault.BUSY])
@pytest.mark.parametrize("session", ["s", None])
def test_a_grammar_that_fails_refuses_the_turn(
    loop: EngineLoop, builder: Held, session: str | None, fault: Fault
) -> None:
    verbs = opened(loop)
    builder.error = GrammarError(fault, "no such thing", "/items")
    told = submit(verbs, "t1", session)
    builder.go.set()
    run(verbs)
    assert told.answers == ["refused"] and told.events == []
    assert isinstance(told.refusal, GrammarRefused)
    assert (told.refusal.code, told.refusal.param, told.refusal.place) == (CODES[fault], "grammar", "/items")
    assert "no such thing" in str(told.refusal)
    assert loop.scheduler.registry.find("s").turn is None, "nothing has changed"


def test_too_many_grammars_at_once_may_be_tried_again(loop: EngineLoop, builder: Held) -> None:
    verbs = opened(loop)
    told = [
        submit(verbs, f"t{number}", None, grammar=Grammar(Kind.REGEX, "a" * (number + 1)))
        for number in range(3)
    ]
    assert [each.answers for each in told] == [[], [], ["refused"]]
    assert told[2].refusal is not None and getattr(told[2].refusal, "code", "") == "grammars_busy"
    builder.go.set()
    run(verbs)
    assert [each.answers for each in told[:2]] == [["begun"], ["begun"]]


def test_without_a_compiler_a_grammar_is_refused_by_name(loop: EngineLoop) -> None:
    loop.setup.grammars.close()
    loop.setup = replace(loop.setup, grammars=Grammars(None, "constrained output needs llguidance"))
    verbs = opened(loop)
    told = submit(verbs, "t1")
    assert told.answers == ["refused"] and "llguidance" in str(told.refusal)
    plain = submit(verbs, "t2", grammar=None)
    run(verbs)
    assert plain.events[-1].kind == "finished"


@pytest.mark.parametrize("ready", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("session", ["s", None])
def test_a_turn_that_is_aborted_while_it_waits_has_one_end(
    loop: EngineLoop, builder: Held, session: str | None, ready: bool
) -> None:
    verbs = opened(loop)
    told = submit(verbs, "t1", session)
    if ready:
        builder.go.set()
        loop.setup.grammars.wait(10)
    verbs.abort(told, KEEP_ALL, "the client went away")
    verbs.abort(told, None, "again")
    builder.go.set()
    run(verbs)
    assert told.answers == ["dropped"] and told.events == []
    assert loop.scheduler.registry.find("s").turn is None and not verbs.waits


@pytest.mark.parametrize("name", VERBS)
def test_a_verb_beside_a_turn_that_waits_is_answered_once(loop: EngineLoop, builder: Held, name: str) -> None:
    verbs = opened(loop)
    run(verbs)
    told, replies = submit(verbs, "t1"), Replies()
    VERBS[name](verbs, replies, "s")
    loop.step()
    verbs.retry()
    builder.go.set()
    run(verbs)
    assert replies.count == 1 and len(told.answers) == 1
    if name == "close":
        assert told.answers == ["refused"] and isinstance(told.refusal, UnknownSession)
    else:
        assert (
            told.answers == ["begun"]
            and sum(event.kind in ("finished", "aborted") for event in told.events) == 1
        )


def test_a_compilation_whose_turn_has_gone_leaves_nothing_to_wait_for(
    loop: EngineLoop, builder: Held
) -> None:
    verbs = opened(loop)
    told = submit(verbs, "t1", None)
    verbs.abort(told, None, "gone")
    run(verbs)
    assert verbs.compiles and not verbs.waits
    builder.go.set()
    while verbs.compiles:
        loop.setup.grammars.wait(1)
        verbs.retry()
    assert told.answers == ["dropped"]


def test_grammars_can_be_closed_twice_and_threads_outlive_them(builder: Held) -> None:
    grammars = Grammars(builder)
    grammars.request(GRAMMAR)
    grammars.close()
    grammars.close()
    builder.go.set()
    with pytest.raises(GrammarError, match="closed"):
        grammars.request(GRAMMAR)


@pytest.mark.parametrize("name", ["echo", "echo-window", "echo-hybrid"])
def test_the_echo_says_what_a_schema_allows(name: str) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "ages": {"type": "array", "items": {"type": "integer"}}},
        "required": ["name", "ages"],
        "additionalProperties": False,
    }
    with Engine(open_echo(name, make_options())) as engine, engine.session() as session:
        turn = session.say("hello", Sampling(max_tokens=200), grammar=schema)
        assert set(json.loads(turn.text)) == {"name", "ages"} and turn.finish_reason == "stop"
        with pytest.raises(GrammarRefused, match="/type"):
            session.say("hello", grammar={"type": 3})


def finished_once(loop: EngineLoop, builder: Held) -> Verbs:
    """A session with one finished turn whose grammar was compiled; there is no compiler any more."""
    verbs = opened(loop)
    builder.go.set()
    assert submit(verbs, "t1", fingerprint="body").refusal is None
    run(verbs)
    while loop.session_log.is_being_written("s", "t1"):
        loop.session_log.flush()
    loop.setup.grammars.close()
    loop.setup = replace(loop.setup, grammars=Grammars(None, "no compiler"))
    return Verbs(loop, patient=True)


def test_a_turn_that_is_repeated_needs_no_compiler(loop: EngineLoop, builder: Held) -> None:
    verbs = finished_once(loop, builder)
    assert submit(verbs, "t1", fingerprint="body").answers == ["replayed"]
    assert isinstance(submit(verbs, "t2", fingerprint="body").refusal, GrammarRefused)
    assert builder.compiled == 1


def test_a_repeated_turn_that_is_forgotten_while_it_waits_is_written_again(
    loop: EngineLoop, builder: Held
) -> None:
    verbs = finished_once(loop, builder)
    submit(verbs, "t2", grammar=None)
    again = submit(verbs, "t1", fingerprint="body")
    assert again.answers == []
    loop.session_log.sessions["s"].finished.clear()
    run(verbs)
    assert isinstance(again.refusal, HistoryChanged)
