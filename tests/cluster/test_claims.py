"""What an engine claims, and what it gives up, on loops in this process: several at once, and what waits."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from holdfast.core.errors import (
    JournalUnavailable,
    Refused,
    RequestConflict,
    SessionExists,
    SessionMoved,
    TooManySessions,
)
from holdfast.engine import claims as claims_module
from holdfast.engine.claims import Found, SessionClaims
from holdfast.engine.durable.membership import Membership
from holdfast.engine.durable.records import JournalError
from holdfast.engine.echo import open_echo
from holdfast.engine.engine import Engine, TurnFailed
from holdfast.engine.listeners import Refusal
from holdfast.engine.options import make_options
from holdfast.engine.sampling import Sampling
from holdfast.engine.turns.acknowledgements import Acknowledgements
from holdfast.engine.verbs import Verbs
from tests.databases import run_sql, shared_cluster

pytest.importorskip("psycopg")


class Heard:
    """A reply that remembers."""

    def __init__(self) -> None:
        self.answers: list[Any] = []

    def done(self, session_id: str | None, answer: object = None) -> None:
        self.answers.append((session_id, answer))

    def refused(self, refusal: Refusal) -> None:
        self.answers.append(refusal)


class Member:
    """An engine of a cluster, without processes."""

    def __init__(self, place: str, name: str, **more: Any) -> None:
        self.loop = open_echo("echo", make_options(journal=place, **more), member=Membership(name))
        self.verbs = Verbs(self.loop)
        assert self.verbs.claims is not None
        self.claims: SessionClaims = self.verbs.claims

    def until(self, look: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + 30
        while not (found := look()):
            assert time.monotonic() < deadline
            self.loop.flush_journal()
            self.verbs.retry()
            time.sleep(0.001)
        return found

    def open(self, name: str) -> Any:
        heard = Heard()
        self.verbs.open(heard, name, "ann")
        return self.until(lambda: heard.answers)[0]

    def claim(self, *names: str) -> dict[str, Found]:
        found: dict[str, Found] = {}
        for name in names:
            self.claims.claim(name, (), lambda each, name=name: found.__setitem__(name, each))  # type: ignore[misc]
        self.until(lambda: len(found) == len(names))
        return found

    def when_owned(self, name: str) -> str | Refused:
        """Ask whether a session is this engine's."""
        heard: list[str | Refused] = []
        self.claims.when_owned(name, lambda: heard.append("owned"), heard.append)
        return self.until(lambda: heard)[0]  # type: ignore[no-any-return]


Join = Callable[..., Member]


@pytest.fixture
def place() -> str:
    return shared_cluster().url(shared_cluster().new_database())


@pytest.fixture
def join(place: str) -> Iterator[Join]:
    made: list[Member] = []

    def start(name: str, **more: Any) -> Member:
        made.append(Member(place, name, **more))
        return made[-1]

    yield start
    for member in made:
        if member.loop.session_log.journal is not None:
            member.loop.shut_down()


def test_claims_that_come_together_are_made_together(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = join("a"), join("b")
    names = [f"ann/s{number}" for number in range(100)]
    for name in names:
        first.open(name)
    first.loop.shut_down()
    asked: list[int] = []
    store: Any = second.claims.store
    take_over = store.take_over
    monkeypatch.setattr(
        store, "take_over", lambda names, lost: asked.append(len(names)) or take_over(names, lost)
    )
    found = second.claim(*names, "ann/nobody")
    assert all(found[name].here for name in names) and found["ann/nobody"] == Found()
    assert sum(asked) == 101 and len(asked) <= 3, asked
    assert second.claim("ann/s5") == {"ann/s5": Found(here=True)} and sum(asked) == 101, "it is known"


def test_an_owner_that_lives_keeps_its_session(join: Join) -> None:
    first, second = join("a"), join("b")
    first.open("ann/s")
    home = second.claim("ann/s")["ann/s"].home
    assert home is not None and (home.name, home.alive) == ("a", True)
    refused = second.open("ann/s")
    assert isinstance(refused, SessionExists)
    assert "ann/s" not in second.loop.session_log.sessions and "ann/s" in first.loop.session_log.sessions


def test_an_open_waits_for_a_claim_of_its_name(join: Join) -> None:
    first, second = join("a"), join("b")
    first.open("ann/s")
    first.loop.shut_down()
    claimed: list[Found] = []
    second.claims.claim("ann/s", (), claimed.append)
    second.claims.claim("ann/free", (), claimed.append)
    taken, free = Heard(), Heard()
    second.verbs.open(taken, "ann/s", "ann")
    second.verbs.open(free, "ann/free", "ann")
    second.until(lambda: taken.answers and free.answers)
    assert claimed == [Found(here=True), Found()]
    assert isinstance(taken.answers[0], SessionExists) and free.answers == [("ann/free", None)]


def test_a_full_engine_claims_nothing(join: Join) -> None:
    first, second = join("a"), join("b", max_sessions=1)
    first.open("ann/s")
    second.open("ann/own")
    first.loop.shut_down()
    assert isinstance(second.claim("ann/s")["ann/s"].refusal, TooManySessions)
    third = join("c")
    assert third.claim("ann/s")["ann/s"].here, "the session was left for another"


def test_what_a_repeated_fork_made_is_not_called_closed_while_the_journal_is_away(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = join("a"), join("b")
    first.open("ann/made")
    told = Acknowledgements(second.loop.session_log, second.claims)
    gone = RequestConflict("it is closed since")

    def answer(name: str) -> Any:
        heard = Heard()
        told.elsewhere(heard, name, gone)
        return second.until(lambda: heard.answers)[0]

    def away(*_: object) -> None:
        raise JournalError("the database is away")

    with monkeypatch.context() as patched:
        patched.setattr(type(second.claims.store), "locate", away)
        assert isinstance(answer("ann/made"), JournalUnavailable)
    assert answer("ann/made") == (None, "ann/made")
    assert answer("ann/closed") is gone


def test_a_claim_that_fails_in_an_unforeseen_way_is_refused_and_may_be_made_again(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = join("a")
    first.open("ann/s")
    first.loop.shut_down()
    second = join("b")

    def broken(*_: object) -> None:
        raise ValueError("a row that nobody expected")

    with monkeypatch.context() as patched:
        patched.setattr(type(second.claims.store), "take_over", broken)
        refusal = second.claim("ann/s")["ann/s"].refusal
    assert isinstance(refusal, JournalUnavailable) and "a row that nobody expected" in str(refusal)
    assert second.claim("ann/s")["ann/s"].here


def test_sessions_that_nobody_asks_for_are_claimed_in_the_end(
    join: Join, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims_module, "SWEEP_SECONDS", 0.0)
    monkeypatch.setattr(claims_module, "SWEPT_MAX", 3)
    first = join("a")
    for number in range(7):
        first.open(f"ann/s{number}")
    first.loop.shut_down()
    second = join("b")
    for _ in range(20):
        second.verbs.retry()
    assert second.loop.session_log.sessions == {}, "a restarted engine may want them"
    run_sql(place, "UPDATE lives SET lease = now() - interval '1 hour' WHERE name = 'a'")
    second.until(lambda: len(second.loop.session_log.sessions) == 7)


def declare_dead(member: Member, place: str) -> None:
    """Another server declares a member dead; its journal hears of that."""
    run_sql(place, f"UPDATE lives SET state = 'dead' WHERE life = {member.claims.store.life}")
    log = member.loop.session_log
    log.flush()
    deadline = time.monotonic() + 30
    while log.sessions:
        assert time.monotonic() < deadline
        time.sleep(0.001)
        log.flush()


def test_the_journal_is_asked_whose_a_session_is_if_its_last_word_is_old(
    join: Join, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = join("a")
    member.open("s")
    store: Any = member.claims.store
    asked: list[float] = []
    confirm = store.confirm
    monkeypatch.setattr(store, "confirm", lambda since: asked.append(since) or confirm(since))
    monkeypatch.setattr(claims_module, "GONE_SECONDS", 3600.0)
    assert member.when_owned("s") == "owned" and not asked, "the journal's last word is recent"
    monkeypatch.setattr(claims_module, "GONE_SECONDS", -1.0)
    assert member.when_owned("s") == "owned" and len(asked) == 1
    assert store.confirmed >= asked[0]
    assert member.claim("s") == {"s": Found(here=True)} and len(asked) == 2
    run_sql(place, f"UPDATE lives SET state = 'dead' WHERE life = {store.life}")
    assert isinstance(member.when_owned("s"), SessionMoved)
    assert "s" not in member.loop.scheduler.registry.sessions, "and it is given up"


def test_an_owner_that_cannot_ask_the_journal_says_so(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    member = join("a")
    member.open("s")

    def away(_: float) -> bool:
        raise JournalError("away")

    monkeypatch.setattr(member.claims.store, "confirm", away)
    monkeypatch.setattr(claims_module, "GONE_SECONDS", -1.0)
    refusal = member.when_owned("s")
    assert isinstance(refusal, JournalUnavailable) and "away" in str(refusal)
    found = member.claim("s")["s"]
    assert not found.here and isinstance(found.refusal, JournalUnavailable)


def test_a_session_that_is_about_to_be_given_up_is_not_owned(join: Join, place: str) -> None:
    member = join("a")
    member.open("s")
    declare_dead(member, place)
    assert "s" in member.loop.scheduler.registry.sessions, "the loop has not been told"
    refused: list[Refused] = []
    member.claims.when_owned("s", lambda: pytest.fail("it is another's"), refused.append)
    member.until(lambda: refused)
    assert isinstance(refused[0], SessionMoved)


@pytest.mark.parametrize("is_told", [True, False], ids=["told", "not told yet"])
@pytest.mark.parametrize("words", ["x" * 300, ""], ids=["goes on", "ends at once"])
def test_a_turn_of_a_session_that_is_given_up_has_moved(
    join: Join, place: str, words: str, is_told: bool
) -> None:
    """It is neither finished nor aborted: its client is to send it again, to the other server."""
    member = join("a", leave_history=False)
    engine = Engine(member.loop)
    session = engine.session(id="s")
    session.say("one").wait()
    turn = session.say(f"two {words}", Sampling(max_tokens=len(words) or 1, ignore_eos=bool(words)))
    if words:
        next(iter(turn))
    declare_dead(member, place)
    if is_told:
        member.loop.flush_journal()
    with pytest.raises(TurnFailed, match="session_moved"):
        turn.wait()
    assert not member.loop.scheduler.registry.sessions and not member.loop.session_log.sessions
    member.loop.session_log.sync()
    assert run_sql(place, "SELECT count(*) FROM turns") == [(1,)]


def test_a_turn_that_drops_its_reasoning_has_moved_with_its_session(join: Join, place: str) -> None:
    member = join("a", overlap=True, reasoning_parser="think")
    engine = Engine(member.loop)
    session = engine.session(id="s", keep_reasoning=False)
    turn = session.say("<think>up or down?</think>\n\nUp.")
    dispatcher = member.loop.dispatcher
    while not dispatcher._shedding:
        engine.drive()
    declare_dead(member, place)
    with pytest.raises(TurnFailed, match="session_moved"):
        turn.wait()
    assert not dispatcher._shedding and not member.loop.scheduler.registry.sessions
