"""The verbs themselves, as both callers use them: each is answered exactly once, or waits for its session."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.core.errors import SessionBusy, UnknownSession
from holdfast.core.layout import Tier
from holdfast.core.session import Place
from holdfast.engine.echo import open_echo
from holdfast.engine.listeners import Refusal, Reply
from holdfast.engine.loop import EngineLoop
from holdfast.engine.options import make_options
from holdfast.engine.sampling import Sampling
from holdfast.engine.turns.spec import TurnSpec
from holdfast.engine.verbs import Verbs
from tests.engine.direct import Heard

LONG = Sampling(max_tokens=500, ignore_eos=True)
SHORT = Sampling(max_tokens=3, ignore_eos=True)

Act = Callable[[Verbs, Reply, str], None]

VERBS: dict[str, Act] = {
    "open": lambda verbs, reply, name: verbs.open(reply, f"{name}-new", "ann"),
    "interrupt": lambda verbs, reply, name: verbs.interrupt(reply, name, 1),
    "rewind": lambda verbs, reply, name: verbs.rewind(reply, name, 0),
    "fork": lambda verbs, reply, name: verbs.fork(reply, name, f"{name}-child"),
    "spill": lambda verbs, reply, name: verbs.spill(reply, name, Tier.HOST),
    "restore": lambda verbs, reply, name: verbs.restore(reply, name),
    "close": lambda verbs, reply, name: verbs.close(reply, name),
}


class Replies:
    """Counts the replies to one verb."""

    def __init__(self) -> None:
        self.answers: list[tuple[str | None, object]] = []
        self.refusals: list[Refusal] = []

    def done(self, session_id: str | None, answer: object = None) -> None:
        self.answers.append((session_id, answer))

    def refused(self, refusal: Refusal) -> None:
        self.refusals.append(refusal)

    @property
    def count(self) -> int:
        return len(self.answers) + len(self.refusals)


def submit(verbs: Verbs, turn_id: str, sampling: Sampling) -> Heard:
    heard = Heard()
    verbs.submit(heard, TurnSpec(turn_id, "ann", [1, 2, 3] * 9, sampling, "s"))
    return heard


def run(verbs: Verbs) -> None:
    while verbs.loop.busy or verbs.waits:
        verbs.loop.step()
        verbs.retry()


@pytest.fixture(params=[False, True], ids=["", "journal"])
def loop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EngineLoop]:
    journal = str(tmp_path / "journal") if request.param else None
    options = make_options(journal=journal, kv_tokens=4096, host_memory=1 << 20, overlap=True, audit="strict")
    made = open_echo("echo", options)
    yield made
    made.shut_down()
    assert made.scheduler.recount() == []


@pytest.fixture
def verbs(loop: EngineLoop) -> Verbs:
    """A session `s` with one finished turn."""
    made = Verbs(loop)
    made.open(Replies(), "s", "ann")
    submit(made, "t1", SHORT)
    run(made)
    return made


@pytest.mark.parametrize("name", VERBS)
@pytest.mark.parametrize("state", ["idle", "running", "away"])
def test_a_verb_is_answered_once(verbs: Verbs, name: str, state: str) -> None:
    if state == "running":
        submit(verbs, "t2", LONG)
        verbs.loop.step()
    elif state == "away":
        verbs.spill(Replies(), "s", Tier.HOST)
        run(verbs)
        assert verbs.loop.scheduler.registry.find("s").place is Place.AWAY
    replies = Replies()
    VERBS[name](verbs, replies, "s")
    run(verbs)
    assert replies.count == 1, "done or refused, once"
    if state == "idle":
        assert replies.refusals == []


@pytest.mark.parametrize("name", [name for name in VERBS if name != "open"])
def test_a_verb_on_an_unknown_session_is_refused_at_once(verbs: Verbs, name: str) -> None:
    replies = Replies()
    VERBS[name](verbs, replies, "nobody")
    (refusal,) = replies.refusals
    assert isinstance(refusal, UnknownSession) and not replies.answers and not verbs.waits


def test_a_verb_that_needs_memory_waits_for_it_and_the_next_one_waits_behind(verbs: Verbs) -> None:
    session = verbs.loop.scheduler.registry.find("s")
    verbs.spill(Replies(), "s", Tier.HOST)
    run(verbs)
    forked, rewound = Replies(), Replies()
    verbs.fork(forked, "s", "child")
    verbs.rewind(rewound, "s", 0)
    assert session in verbs.loop.scheduler.registry.queues.recalled and verbs.waits
    assert forked.count == rewound.count == 0
    run(verbs)
    assert forked.answers == [("child", "child")] and rewound.answers == [("s", None)]
    sessions = verbs.loop.scheduler.registry.sessions
    assert len(sessions["child"].boundaries) == 1 and not session.boundaries
    assert sessions["child"].sequence.computed > 0, "it shares the memory that came back"


@pytest.mark.parametrize("patient", [False, True])
def test_a_turn_on_a_busy_session(loop: EngineLoop, patient: bool) -> None:
    """In this process it is refused at once; behind the server an abort of the turn before it may follow."""
    verbs = Verbs(loop, patient)
    verbs.open(Replies(), "s", "ann")
    first = submit(verbs, "t1", LONG)
    loop.step()
    if not patient:
        with pytest.raises(SessionBusy):
            submit(verbs, "t2", SHORT)
    else:
        second = submit(verbs, "t2", SHORT)
        assert verbs.waits and second.turn is None
        verbs.abort(first, None, "the client went away")
        run(verbs)
        assert first.events[-1].kind == "aborted" and second.events[-1].kind == "finished"
    verbs.abort(first, None, "the test is over")
    run(verbs)


def test_a_turn_that_is_aborted_while_it_waits_is_dropped(loop: EngineLoop) -> None:
    class Dropped(Heard):
        reason = ""

        def dropped(self, reason: str) -> None:
            self.reason = reason

    verbs = Verbs(loop, patient=True)
    verbs.open(Replies(), "s", "ann")
    first = submit(verbs, "t1", LONG)
    loop.step()
    second = Dropped()
    verbs.submit(second, TurnSpec("t2", "ann", [1], SHORT, "s"))
    verbs.abort(second, None, "the client went away")
    assert second.reason == "the client went away"
    verbs.abort(second, None, "again")
    verbs.abort(first, None, "the test is over")
    run(verbs)
    assert second.reason == "the client went away" and second.turn is None and second.events == []
