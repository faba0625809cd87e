"""Owners on PostgreSQL, several at once: claims, zombies, hand-overs, drains, lost answers and limits."""

import json
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from holdfast.engine.durable.membership import Membership
from holdfast.engine.durable.records import Closed, Forked, JournalError, Record, Requested
from holdfast.engine.durable.session_log import SessionLog
from holdfast.engine.durable.stores import read_sessions
from tests.cluster.cutting import Proxy
from tests.databases import run_sql, shared_cluster
from tests.engine.test_journal import ended, opened
from tests.preloaded.commands import Command

psycopg = pytest.importorskip("psycopg")
from holdfast.engine.durable.postgres import lives, owners, store  # noqa: E402
from holdfast.engine.durable.postgres.link import connect  # noqa: E402
from holdfast.engine.durable.postgres.store import LIFE_OVER, PostgresJournal  # noqa: E402

ROOT = Path(__file__).parents[2]
Answer = TypeVar("Answer")


@pytest.fixture
def place() -> str:
    return shared_cluster().url(shared_cluster().new_database())


@pytest.fixture
def join(place: str) -> Iterator[Callable[..., PostgresJournal]]:
    """Start members of a cluster."""
    with ExitStack() as stack:

        def start(name: str, limit: int | None = None, url: str = place) -> PostgresJournal:
            place = Membership(name, tenant_sessions=limit)
            member = PostgresJournal(url, "commit", "v", member=place)
            stack.enter_context(closing(member))
            return member

        yield start


def keep(journal: PostgresJournal, *records: Record) -> frozenset[str]:
    """Store records; the sessions that were refused."""
    for record in records:
        journal.append(record)
    assert journal.flush(), journal.fault
    return journal.take_refused()


def turns(place: str) -> dict[str, list[str]]:
    found = read_sessions(place)
    assert not any(session.damaged for session in found)
    return {session.id: [turn.turn_id for turn in session.turns] for session in found}


def declare_dead(place: str, *members: PostgresJournal) -> None:
    """As if their leases were over."""
    with closing(connect(place)) as connection:
        for member in members:
            run_sql(place, f"UPDATE lives SET lease = now() - interval '1 s' WHERE life = {member.life}")
            assert lives.bury_life(connection, member.life)


def at_once(*acts: Callable[[], Answer]) -> list[Answer]:
    """Let things happen in threads that begin at the same moment."""
    barrier = threading.Barrier(len(acts))
    answers: dict[int, Answer] = {}

    def run(number: int) -> None:
        barrier.wait()
        answers[number] = acts[number]()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answers[number] for number in range(len(acts))]


# --- claims ---


def test_a_death_is_one_row_and_claims_are_by_session(place: str, join: Any) -> None:
    first, second, third = join("first"), join("second"), join("third")
    keep(first, *(opened(f"s{number}") for number in range(20)), *(ended("s1", 1), ended("s2", 1)))
    assert second.claim(["s1"]).elsewhere == {"s1": first.life}
    declare_dead(place, first)
    assert run_sql(place, "SELECT DISTINCT owner, epoch FROM sessions") == [(first.life, 1)]
    claims = second.claim(["s1", "nothing"])
    assert [(session.id, len(session.turns)) for session in claims.sessions] == [("s1", 1)]
    assert claims.elsewhere == {}
    assert third.claim(["s1", "s2"]).elsewhere == {"s1": second.life}
    assert keep(second, ended("s1", 2)) == keep(third, ended("s2", 2)) == frozenset()
    assert keep(first, ended("s1", 9), ended("s3", 9)) == {f"s{number}" for number in range(20)}
    assert first.fault == LIFE_OVER
    found = turns(place)
    assert (found["s1"], found["s2"], found["s3"]) == (["t1", "t2"], ["t1", "t2"], [])
    owned = "SELECT owner, epoch, count(*) FROM sessions GROUP BY owner, epoch ORDER BY owner"
    assert run_sql(place, owned) == [(first.life, 1, 18), (second.life, 2, 1), (third.life, 2, 1)]


def test_of_members_that_claim_at_once_one_wins_each_session(place: str, join: Any) -> None:
    members = [join(f"member{number}") for number in range(4)]
    names = [f"s{number}" for number in range(24)]
    for turn in range(1, 5):
        dead = join(f"dead{turn}")
        if turn == 1:
            keep(dead, *map(opened, names))
        else:
            for member in members:
                mine = [name for name in names if name in member._owner.sessions]
                assert member.hand_over(mine, dead.life) == set(mine)
            assert len(dead.claim(names).sessions) == len(names)
        declare_dead(place, dead)
        answers = at_once(*(partial(member.claim, names) for member in members))
        winners = [session.id for claims in answers for session in claims.sessions]
        assert sorted(winners) == sorted(names), "each has one winner"
        # Every member commits on every session; only owners are heard.
        said = [ended(name, turn) for name in names]
        refused = at_once(*(partial(keep, member, *said) for member in members))
        for claims, names_refused in zip(answers, refused, strict=True):
            assert names_refused == set(names) - {session.id for session in claims.sessions}
        assert turns(place) == {name: [f"t{each}" for each in range(1, turn + 1)] for name in names}


def test_a_member_that_is_over_or_drains_claims_nothing(place: str, join: Any) -> None:
    first, second, third = join("first"), join("second"), join("third")
    keep(first, opened("s"))
    declare_dead(place, first, third)
    assert second.drain()
    assert second.claim(["s"]).sessions == [] and third.claim(["s"]).sessions == []
    assert join("fourth").claim(["s"]).elsewhere == {}


def test_a_damaged_session_that_is_claimed_ends_before_the_damage(place: str, join: Any) -> None:
    first, second = join("first"), join("second")
    keep(first, opened("s"), *(ended("s", number) for number in range(1, 5)))
    run_sql(place, "UPDATE turns SET finish = 'x' WHERE turn_id = 't3'")
    declare_dead(place, first)
    (claimed,) = second.claim(["s"]).sessions
    assert claimed.damaged and [turn.turn_id for turn in claimed.turns] == ["t1", "t2"]
    assert keep(second, ended("s", 5)) == frozenset()
    assert turns(place) == {"s": ["t1", "t2", "t5"]}
    assert not second.compact(), "the turns after the damage may be all that is left"


# --- zombies ---


class Member:
    """A member in a process of its own."""

    def __init__(self, place: str, name: str) -> None:
        self.process = Command(
            *(place, name, "none"),
            module="tests.cluster.members",
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def send(self, *words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write((" ".join(map(str, words)) + "\n").encode())
        self.process.stdin.flush()

    def heard(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def ask(self, *words: object) -> Any:
        self.send(*words)
        return self.heard()

    def end(self) -> None:
        self.send("end")
        self.process.wait()


def test_a_stopped_process_that_wakes_writes_nothing(place: str, join: Any) -> None:
    zombie = Member(place, "zombie")
    life = zombie.ask("life")
    for name in ("a", "b"):
        assert zombie.ask("open", name, "red") is True
        assert zombie.ask("turn", name, 1) is True
    zombie.process.send_signal(signal.SIGSTOP)
    for number in range(2, 6):
        zombie.send("turn", "a", number)
    zombie.send("turn", "b", 2)
    second = join("second")
    with closing(connect(place)) as connection:
        assert not lives.bury_life(connection, life), "its lease is not over, and its connection is open"
        run_sql(place, f"UPDATE lives SET lease = now() - interval '1 s' WHERE life = {life}")
        assert lives.bury_life(connection, life)
    assert [session.id for session in second.claim(["a"]).sessions] == ["a"]
    assert keep(second, ended("a", 7)) == frozenset()
    zombie.process.send_signal(signal.SIGCONT)
    assert [zombie.heard() for _ in range(5)] == [False] * 5, "also of a session that nobody has claimed"
    assert keep(second, ended("a", 8)) == frozenset()
    assert turns(place) == {"a": ["t1", "t7", "t8"], "b": ["t1"]}
    zombie.end()


def test_a_killed_member_is_dead_once_its_connection_is_gone(place: str, join: Any) -> None:
    killed, second = Member(place, "killed"), join("second")
    life = killed.ask("life")
    assert killed.ask("open", "s", "red") is True
    with closing(connect(place)) as connection:
        assert not lives.bury_life(connection, life, heard=False), "the database hears it"
    killed.process.kill()
    killed.process.wait()
    with closing(connect(place)) as connection:
        left = "clock_timestamp() + interval '8 s'"
        run_sql(place, f"UPDATE lives SET lease = {left} WHERE life IN ({life}, {second.life})")
        while not lives.bury_life(connection, life):
            continue  # PostgreSQL has not noticed yet that the socket is closed.
        assert not lives.bury_life(connection, second.life), "it is connected"
        assert lives.bury_life(connection, second.life, heard=False), "its peer says that it is not"


def test_a_life_is_confirmed_by_commits_and_renewals_and_not_once_it_is_over(
    place: str, join: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine tells a new API process of its sessions only after this."""
    monkeypatch.setattr(store, "RENEW_SECONDS", 0.0)
    member = join("first")
    assert member.confirmed == 0.0, "its begin says nothing about later"
    asked = time.monotonic()
    keep(member, opened("s"))
    assert member.confirmed >= asked
    asked = time.monotonic()
    member.keep_alive()
    assert member.confirmed >= asked
    run_sql(place, "UPDATE lives SET state = 'dead'")
    asked = time.monotonic()
    assert keep(member, ended("s", 1)) == {"s"}
    member.keep_alive()
    assert member.confirmed < asked, "it began another life, which is not confirmed yet"
    member.keep_alive()
    assert member.confirmed >= asked


# --- hand-overs and drains ---


def test_a_session_is_handed_over_and_back(place: str, join: Any) -> None:
    first, second = join("first"), join("second")
    keep(first, opened("s"), opened("o"), ended("s", 1))
    first.append(ended("s", 2))
    assert first.hand_over(["s"], second.life) == {"s"}, "what was appended is stored before"
    assert keep(first, ended("s", 9)) == {"s"}
    assert [len(session.turns) for session in second.claim(["s"]).sessions] == [2]
    assert keep(second, ended("s", 3)) == frozenset()
    assert second.hand_over(["s"], first.life) == {"s"}
    assert [len(session.turns) for session in first.claim(["s"]).sessions] == [3]
    assert keep(first, ended("s", 4), ended("o", 1)) == frozenset()
    assert keep(second, ended("s", 5)) == {"s"}
    assert run_sql(place, "SELECT epoch FROM sessions WHERE id = 's'") == [(3,)]
    assert turns(place) == {"s": ["t1", "t2", "t3", "t4"], "o": ["t1"]}


def test_a_session_that_nobody_takes_is_kept(place: str, join: Any) -> None:
    first, second, third = join("first"), join("second"), join("third")
    keep(first, opened("s"), opened("lost"))
    declare_dead(place, second)
    assert third.drain()
    run_sql(place, "UPDATE sessions SET epoch = epoch + 1 WHERE id = 'lost'")
    for target in (second.life, third.life, first.life, 999):
        assert first.hand_over(["s"], target) == frozenset()
        assert keep(first, ended("s", target)) == frozenset(), "it is this member's still"
    assert first.hand_over(["lost"], join("fourth").life) == frozenset()
    assert first.take_refused() == {"lost"}, "this member's view of it was old"


def test_members_hand_over_to_each_other_at_once(place: str, join: Any) -> None:
    members = [join(f"member{number}") for number in range(3)]
    for member in members:
        keep(member, *(opened(f"{member.life}.{number}") for number in range(4)))
    for _ in range(10):
        before = [list(member._owner.sessions) for member in members]
        targets = [members[number - 1] for number in range(3)]
        gifts = zip(members, before, targets, strict=True)
        moved = at_once(*(partial(member.hand_over, names, to.life) for member, names, to in gifts))
        assert [set(names) for names in before] == moved
        for target, names in zip(targets, before, strict=True):
            assert len(target.claim(names).sessions) == len(names)
    assert run_sql(place, "SELECT DISTINCT epoch FROM sessions") == [(11,)]


def test_a_drain_hands_over_commits_and_ends(place: str, join: Any) -> None:
    first, second = join("first"), join("second")
    keep(first, opened("idle"), opened("busy"), opened("left"))
    assert first.drain() and first.drain()
    assert first.hand_over(["idle"], second.life) == {"idle"}
    assert keep(first, ended("busy", 1), ended("left", 1)) == frozenset(), "turns go on to their end"
    assert second.hand_over(["idle"], first.life) == frozenset(), "it takes no sessions"
    assert first.hand_over(["busy"], second.life) == {"busy"}
    first.close()
    assert run_sql(place, f"SELECT state FROM lives WHERE life = {first.life}") == [("ended",)]
    assert [session.id for session in second.claim(["left"]).sessions] == ["left"]
    assert turns(place) == {"idle": [], "busy": ["t1"], "left": ["t1"]}


def test_a_drain_of_a_member_that_is_over_ends_it(place: str, join: Any) -> None:
    first = join("first")
    keep(first, opened("s"))
    declare_dead(place, first)
    assert not first.drain()
    assert first.take_refused() == {"s"} and first.fault == LIFE_OVER


def test_the_journal_s_thread_claims_and_hands_over_behind_the_batches(place: str, join: Any) -> None:
    first, second = join("first"), join("second")
    log, other = SessionLog(first), SessionLog(second)
    log.start()
    other.start()
    log.opened("s", "red")
    log.ended("s", (1, 2), ended("s", 1).turn)
    assert log.ask(lambda: first.hand_over(["s"], second.life)).result(timeout=60) == {"s"}
    claims = other.ask(lambda: second.claim(["s", "nothing"])).result(timeout=60)
    for stored in claims.sessions:
        other.recovered(stored)
    other.ended("s", (3,), ended("s", 2).turn)
    other.sync()
    assert turns(place) == {"s": ["t1", "t2"]}
    with pytest.raises(ZeroDivisionError):
        other.ask(lambda: 1 / 0).result(timeout=60)
    log.close()
    run_sql(place, "UPDATE sessions SET epoch = epoch + 1")
    assert other.ask(lambda: second.hand_over(["s"], 0)).result(timeout=60) == frozenset()
    other.flush()
    assert other.take_given_up() == ["s"]
    other.close()


# --- lost answers ---


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with Proxy(shared_cluster().directory) as made:
        yield made


def through(proxy: Proxy, place: str) -> str:
    return place.replace(str(shared_cluster().directory), str(proxy.directory))


def test_a_commit_whose_answer_is_lost_is_stored_once(place: str, join: Any, proxy: Proxy) -> None:
    first = join("first", url=through(proxy, place))
    keep(first, opened("s"), opened("moved"), opened("back"), opened("gone"), opened("theirs"))
    other = join("other")
    run_sql(place, f"UPDATE sessions SET owner = {other.life}, epoch = 2 WHERE id IN ('moved', 'theirs')")
    run_sql(place, "UPDATE sessions SET epoch = 3 WHERE id = 'back'")
    names = ("s", "moved", "back")
    for record in (*(ended(name, 1) for name in names), Closed("gone", "x"), Closed("theirs", "x")):
        first.append(record)
    proxy.cut = True
    assert not first.flush() and first.fault is None and proxy.cuts == 1
    assert turns(place)["s"] == ["t1"], "it is stored, and this member does not know"
    assert keep(first) == {"moved", "back", "theirs"}, "those were refused, whoever owns them by now"
    assert turns(place) == {"s": ["t1"], "moved": [], "back": [], "theirs": []}
    assert keep(first, ended("s", 2)) == frozenset()
    assert turns(place)["s"] == ["t1", "t2"]


def test_claims_and_hand_overs_whose_answer_is_lost_are_made_again(
    place: str, join: Any, proxy: Proxy
) -> None:
    first, second = join("first"), join("second", url=through(proxy, place))
    keep(first, opened("s"), ended("s", 1))
    declare_dead(place, first)
    proxy.cut = True
    with pytest.raises(JournalError):
        second.claim(["s"])
    assert run_sql(place, "SELECT owner, epoch FROM sessions") == [(second.life, 2)]
    assert [session.id for session in second.claim(["s"]).sessions] == ["s"]
    assert run_sql(place, "SELECT epoch FROM sessions") == [(2,)], "it was this member's already"
    assert keep(second, ended("s", 2)) == frozenset()
    third = join("third")
    proxy.cut = True
    with pytest.raises(JournalError):
        second.hand_over(["s"], third.life)
    assert run_sql(place, "SELECT owner, epoch FROM sessions") == [(third.life, 3)]
    assert second.hand_over(["s"], third.life) == {"s"} and proxy.cuts == 2
    assert [len(session.turns) for session in third.claim(["s"]).sessions] == [2]


def test_a_commit_of_a_member_that_dies_before_the_repeat_is_not_acknowledged(
    place: str, join: Any, proxy: Proxy
) -> None:
    first, second = join("first", url=through(proxy, place)), join("second")
    keep(first, opened("s"))
    first.append(ended("s", 1))
    proxy.cut = True
    assert not first.flush()
    declare_dead(place, first)
    assert keep(first) == {"s"}, "its client asks again, and finds the turn by its id"
    (session,) = second.claim(["s"]).sessions
    assert [turn.turn_id for turn in session.finished] == ["t1"]


# --- names, limits and keys ---


def test_of_two_that_open_one_name_at_once_one_succeeds(place: str, join: Any) -> None:
    members = [join("first"), join("second", limit=1000)]
    for number in range(20):
        names = (f"s{number}", f"r{number}") if number % 2 else (f"r{number}", f"s{number}")
        refused = at_once(
            partial(keep, members[0], *map(opened, names)),
            partial(keep, members[1], *map(opened, reversed(names))),
        )
        assert refused[0] | refused[1] == set(names) and not refused[0] & refused[1]
    assert run_sql(place, "SELECT count(*) FROM sessions") == [(40,)]
    counted = run_sql(place, f"SELECT count(*) FROM sessions WHERE owner = {members[1].life}")
    assert run_sql(place, "SELECT sessions FROM tenants") == counted, "those under a limit are counted"


def test_a_tenant_s_limit_holds_over_all_members(place: str, join: Any) -> None:
    members = [join(f"member{number}", limit=10) for number in range(4)]

    def open_five(member: PostgresJournal) -> int:
        names = [f"{member.life}.{number}" for number in range(5)]
        return sum(len(keep(member, opened(name), ended(name, 1))) for name in names)

    refused = at_once(*(partial(open_five, member) for member in members))
    assert sum(refused) == 10
    assert run_sql(place, "SELECT count(*) FROM sessions") == [(10,)]
    member = next(each for each in members if each._owner.sessions)
    closed = next(iter(member._owner.sessions))
    assert keep(member, replace(opened("other"), tenant="blue")) == frozenset(), "another tenant"
    assert keep(member, Closed(closed, "closed"), opened("early")) == {"early"}, "counted before it left"
    assert keep(member, opened("next")) == frozenset()
    assert keep(member, opened("more"), Forked("fork", "next", 0, 1.0)) == {"more", "fork"}
    found = run_sql(place, "SELECT tenant, sessions FROM tenants ORDER BY tenant")
    assert found == [("blue", 1), ("red", 10)]


def test_keys_of_turns_rewinds_and_forks_are_known_to_the_next_owner(place: str, join: Any) -> None:
    first, second = join("first", limit=2), join("second")
    keep(first, opened("s"), ended("s", 1), Requested("s", "r1", "rewind 1", ""))
    keep(first, Forked("f", "s", 1, 1.0), Requested("s", "f1", "fork 1", "f"))
    refused = keep(first, Forked("g", "s", 1, 1.0), Requested("s", "f2", "fork 1", "g"), ended("s", 2))
    assert refused == {"g"}
    declare_dead(place, first)
    found = {session.id: session for session in second.claim(["s", "f"]).sessions}
    assert [turn.turn_id for turn in found["s"].finished] == ["t1", "t2"]
    assert found["s"].requests == {"r1": ("rewind 1", ""), "f1": ("fork 1", "f")}, "no fork, no answer"
    assert run_sql(place, "SELECT DISTINCT owner FROM sessions") == [(second.life,)]
    assert keep(second, Forked("g", "s", 1, 1.0), Requested("s", "f2", "fork 1", "g")) == frozenset()


def test_a_fork_that_is_refused_may_be_asked_for_again(join: Any) -> None:
    log = SessionLog(join("first", limit=1))
    log.start()
    log.opened("s", "red")
    log.forked("f", "s", 0)
    log.requested("s", "key", "fork 0", "f")
    assert log.earlier_answer("s", "key", "fork 0") == "f"
    log.sync()
    assert log.take_given_up() == ["f"]
    assert log.earlier_answer("s", "key", "fork 0") is None
    assert list(log.sessions) == ["s"]
    log.close()


def test_a_session_is_found_with_the_address_of_its_owner(place: str) -> None:
    named = Membership("named", address="10.0.0.7:7000")
    with closing(PostgresJournal(place, "commit", "v", member=named)) as member:
        keep(member, opened("s"))
        with closing(connect(place)) as connection:
            found = owners.locate(connection, ["s", "nothing"])
            assert found == {"s": (member.life, "live", "10.0.0.7:7000", False, "named")}
            run_sql(place, "UPDATE lives SET lease = now() - interval '1 s'")
            assert owners.locate(connection, ["s"])["s"].lapsed
