"""The journal in PostgreSQL: fences and lives, lost connections and answers, and what is shown of it."""

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.engine.durable.membership import Membership
from holdfast.engine.durable.places import fault_of, shown, without_credentials
from holdfast.engine.durable.records import (
    Closed,
    Forked,
    JournalError,
    Record,
    Requested,
    SnapshotWritten,
    Truncated,
    Updated,
)
from holdfast.engine.durable.store import JournalInUse
from holdfast.engine.durable.stores import open_store, read_sessions, read_vocabulary
from holdfast.engine.options import OptionError, make_options
from tests.databases import run_sql, shared_cluster
from tests.engine.test_journal import ended, opened, write

psycopg = pytest.importorskip("psycopg")
from holdfast.engine.durable.postgres import link, reading, store, tables  # noqa: E402
from holdfast.engine.durable.postgres.store import PostgresJournal  # noqa: E402


@pytest.fixture
def place() -> str:
    return shared_cluster().url(shared_cluster().new_database())


def started(place: str, timeout: float = 0.0) -> PostgresJournal:
    """A store that was read, as an engine has it."""
    made = PostgresJournal(place, "commit", "v", lock_timeout=timeout)
    list(made.sessions())
    return made


@pytest.fixture
def journal(place: str) -> Iterator[PostgresJournal]:
    made = started(place)
    yield made
    made.close()


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


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Every statement, with the name of its thread; a transaction's own are one more."""
    executed: list[tuple[str, str]] = []
    execute, transaction = psycopg.Connection.execute, psycopg.Connection.transaction

    def record(self: Any, query: Any, *arguments: Any, **more: Any) -> Any:
        executed.append((threading.current_thread().name, str(query)))
        return execute(self, query, *arguments, **more)

    def begin(self: Any, *arguments: Any, **more: Any) -> Any:
        executed.append((threading.current_thread().name, "BEGIN"))
        return transaction(self, *arguments, **more)

    monkeypatch.setattr(psycopg.Connection, "execute", record)
    monkeypatch.setattr(psycopg.Connection, "transaction", begin)
    return executed


# --- batches ---


@pytest.mark.parametrize(
    ("url", "renamed"),
    [
        ("postgresql:///db", "postgresql:///db?application_name=e%3A1"),
        (
            "postgresql://a@h:5/db?sslmode=require",
            "postgresql://a@h:5/db?sslmode=require&application_name=e%3A1",
        ),
        (
            "postgresql://@/db?application_name=x&host=/run",
            "postgresql://@/db?host=/run&application_name=e%3A1",
        ),
    ],
)
def test_an_engine_has_its_own_name_in_the_url(url: str, renamed: str) -> None:
    assert link.named(url, "e:1") == renamed
    assert link.name_of(renamed) == "e:1"


def test_a_batch_is_one_statement(journal: PostgresJournal, statements: list[tuple[str, str]]) -> None:
    keep(journal, *(opened(f"s{number}") for number in range(20)))
    statements.clear()
    records: list[Record] = [ended(f"s{number}", 1) for number in range(20)]
    records += [Requested("s1", "q", "rewind 1", ""), Truncated("s2", 1, 2), Closed("s3", "closed")]
    records += [Forked("f", "s4", 1, 1.0), Updated("s5", '{"a": 1}'), SnapshotWritten("s6", "file", 7, 9)]
    keep(journal, *records)
    assert len(statements) == 1


def test_records_that_depend_on_each_other_are_one_transaction(journal: PostgresJournal, place: str) -> None:
    keep(
        journal,
        *(opened("s"), ended("s", 1), Forked("f", "s", 1, 1.0), Closed("s", "closed"), opened("s")),
        *(ended("s", 2), ended("s", 3), Forked("g", "s", 1, 2.0), Forked("h", "g", 1, 3.0), Closed("g", "x")),
    )
    assert turns(place) == {"s": ["t2", "t3"], "f": ["t1"], "h": ["t2"]}
    assert run_sql(place, "SELECT batch FROM lives") == [(1,)]


def test_any_text_is_kept(journal: PostgresJournal, place: str) -> None:
    text = "a\0b\\0c\\\\0\\\0"
    described = replace(opened(f"s{text}"), tenant=text, system=text)
    keep(journal, described, replace(ended(f"s{text}", 1)), Requested(f"s{text}", text, text, text))
    keep(journal, Forked(f"f{text}", f"s{text}", 1, 2000.0))
    first, second = read_sessions(place)
    assert (first.id, first.tenant, first.about.system, first.unusable) == (f"s{text}", text, text, "")
    assert first.requests == {text: (text, text)}
    assert (second.id, second.about.parent, len(second.turns)) == (f"f{text}", f"s{text}", 1)


def test_sessions_are_read_a_few_at_a_time(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "c", "d", "e"):
        write(
            place,
            opened(name),
            *(ended(name, number) for number in range(4)),
            Forked(f"f{name}", name, 2, 1.0),
        )
    whole = read_sessions(place)
    assert len(whole) == 10 and all(session.turns for session in whole)
    monkeypatch.setattr(reading, "SESSIONS_AT_ONCE", 3)
    monkeypatch.setattr(reading, "TURNS_AT_ONCE", 5)
    rounds: list[int] = []
    revive = reading._revive
    monkeypatch.setattr(
        reading, "_revive", lambda connection, rows: (rounds.append(len(rows)), revive(connection, rows))[1]
    )
    assert read_sessions(place) == whole
    assert sum(rounds) == 10 and max(rounds) <= 2


# --- fences ---


def test_a_session_of_another_owner_is_refused_and_the_rest_of_the_batch_is_stored(
    journal: PostgresJournal, place: str
) -> None:
    keep(journal, opened("mine"), opened("theirs"), ended("mine", 1), ended("theirs", 1))
    run_sql(place, "UPDATE sessions SET epoch = epoch + 1 WHERE id = 'theirs'")
    refused = keep(journal, ended("mine", 2), ended("theirs", 2), Forked("child", "theirs", 1, 1.0))
    assert refused == {"theirs", "child"}
    assert turns(place) == {"mine": ["t1", "t2"], "theirs": ["t1"]}
    assert keep(journal, ended("theirs", 3), ended("mine", 3)) == {"theirs"}, "it is not known any more"
    assert turns(place) == {"mine": ["t1", "t2", "t3"], "theirs": ["t1"]}
    assert keep(journal, opened("theirs")) == {"theirs"}, "the name is taken"
    assert run_sql(place, "SELECT count(*) FROM log WHERE session = 'theirs'") == [(2,)]


@pytest.mark.parametrize("column", ["owner", "commits"])
def test_each_part_of_the_fence_holds(journal: PostgresJournal, place: str, column: str) -> None:
    keep(journal, opened("s"), ended("s", 1))
    run_sql(place, "INSERT INTO lives (name, state, host, process, lease) VALUES ('o', 'live', '', 1, now())")
    value = "(SELECT max(life) FROM lives)" if column == "owner" else "commits + 1"
    run_sql(place, f"UPDATE sessions SET {column} = {value}")
    assert keep(journal, ended("s", 2)) == {"s"}
    assert turns(place) == {"s": ["t1"]}


def test_a_life_that_was_taken_over_writes_nothing(place: str) -> None:
    first = started(place)
    keep(first, opened("s"), ended("s", 1))
    run_sql(place, "UPDATE lives SET lease = now() - interval '1 second'")
    with closing(started(place)) as second:
        assert keep(second, ended("s", 2)) == frozenset()
        assert keep(first, ended("s", 3), opened("new")) == {"s", "new"}
        assert first.fault == store.LIFE_OVER
        assert keep(first, ended("s", 4)) == {"s"}
        assert turns(place) == {"s": ["t1", "t2"]}
        first.close()
        assert keep(second, ended("s", 5)) == frozenset()
    assert run_sql(place, "SELECT state FROM lives ORDER BY life") == [("ended",)], (
        "older lives are forgotten"
    )
    assert run_sql(place, "SELECT epoch FROM sessions") == [(2,)]


def test_an_idle_life_that_was_taken_over_gives_its_sessions_up(place: str) -> None:
    first = started(place)
    keep(first, opened("s"))
    run_sql(place, "UPDATE lives SET state = 'dead'")
    first._renewed -= store.RENEW_SECONDS
    assert first.keep_alive() is not None
    assert first.take_refused() == {"s"} and first.fault == store.LIFE_OVER
    assert first.keep_alive() is None
    first.close()


# --- lives ---


def test_a_second_server_of_the_same_name_is_refused_and_one_of_another_name_is_not(
    journal: PostgresJournal, place: str
) -> None:
    keep(journal, opened("s"))
    with pytest.raises(JournalInUse, match=r"another server named 'holdfast'.*application_name"):
        PostgresJournal(place, "commit", "v")
    with closing(PostgresJournal(f"{place}&application_name=other", "commit", "v")) as other:
        assert other.load() == [], "its sessions are its own"
        assert keep(other, opened("o"), ended("o", 1)) == frozenset()
    assert turns(place) == {"s": [], "o": ["t1"]}


def test_a_server_whose_connection_is_gone_is_taken_over_before_its_lease_is_over(place: str) -> None:
    first = started(place)
    keep(first, opened("s"))
    first._link.close()
    second = PostgresJournal(place, "commit", "v", lock_timeout=60.0)
    assert [session.id for session in second.load()] == ["s"]
    assert run_sql(place, "SELECT count(*) FROM lives WHERE state = 'live'") == [(1,)]
    assert keep(first, ended("s", 1)) == {"s"}
    first.close()
    second.close()


def test_a_life_is_renewed_when_it_is_time_and_not_before(
    journal: PostgresJournal,
    place: str,
    statements: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_sql(place, "UPDATE lives SET lease = now()")
    statements.clear()
    now = [journal._renewed + 0.1]
    monkeypatch.setattr(store, "time", SimpleNamespace(monotonic=lambda: now[0]))
    rest = journal.keep_alive()
    assert rest is not None and 0 < rest <= store.RENEW_SECONDS and statements == []
    now[0] = journal._renewed + store.RENEW_SECONDS
    assert journal.keep_alive() == store.RENEW_SECONDS
    assert run_sql(place, "SELECT lease > now() + interval '5 seconds' FROM lives") == [(True,)]


# --- lost answers and connections ---


@pytest.mark.parametrize("stored", [False, True], ids=["not stored", "stored"])
def test_a_batch_whose_answer_is_lost_is_stored_once(
    journal: PostgresJournal, place: str, monkeypatch: pytest.MonkeyPatch, stored: bool
) -> None:
    keep(journal, opened("s"), opened("gone"), opened("theirs"), ended("s", 1), ended("gone", 1))
    run_sql(place, "UPDATE sessions SET epoch = epoch + 1, owner = owner WHERE id = 'theirs'")
    execute = PostgresJournal._execute

    def lose(self: PostgresJournal, connection: Any, batch: Any) -> Any:
        monkeypatch.setattr(PostgresJournal, "_execute", execute)
        if stored:
            execute(self, connection, batch)
        raise psycopg.OperationalError("the connection was lost")

    monkeypatch.setattr(PostgresJournal, "_execute", lose)
    for record in (ended("s", 2), Closed("gone", "closed"), opened("new"), Forked("f", "s", 1, 1.0)):
        journal.append(record)
    assert not journal.flush() and journal.fault is None and journal.pending
    assert keep(journal, ended("s", 3), Closed("new", "closed"), opened("new")) == frozenset()
    assert turns(place) == {"s": ["t1", "t2", "t3"], "theirs": [], "new": [], "f": ["t1"]}
    assert run_sql(place, "SELECT count(*) FROM log WHERE session = 's'") == [(4,)]


def test_a_connection_that_is_lost_is_opened_again(journal: PostgresJournal, place: str) -> None:
    keep(journal, opened("s"))
    process = journal._link.use().info.backend_pid
    run_sql(place, f"SELECT pg_terminate_backend({process})")
    journal.append(ended("s", 1))
    assert not journal.flush()
    assert keep(journal, ended("s", 2)) == frozenset()
    assert turns(place) == {"s": ["t1", "t2"]}
    held = f"SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND objid = {journal.life} AND database = "
    found = run_sql(place, held + "(SELECT oid FROM pg_database WHERE datname = current_database())")
    assert found == [(journal._link.use().info.backend_pid,)], "others see that it is connected"


def test_new_turns_are_refused_only_when_the_database_is_out_of_reach_for_long(
    journal: PostgresJournal, place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now, tries = [1000.0], [0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(link, "time", clock)
    monkeypatch.setattr(store, "time", clock)

    def unreachable(*_: object) -> None:
        tries[0] += 1
        raise psycopg.OperationalError("no route to host")

    monkeypatch.setattr(link, "connect", unreachable)
    keep(journal, opened("s"))
    journal._link.close()
    for number in range(1, 4):
        journal.append(ended("s", number))
        assert not journal.flush() and journal.fault is None, "answers wait"
    assert tries == [1], "the next attempt waits for the back-off"
    waits = []
    while now[0] < 1000.0 + store.PATIENCE_SECONDS:
        before = tries[0]
        while tries[0] == before:
            now[0] += 0.01
            assert not journal.flush()
        waits.append(now[0])
    assert max(after - before for before, after in pairwise(waits)) <= 2.1
    assert journal.fault is not None and "no route to host" in journal.fault
    monkeypatch.undo()
    journal._link._next_try = 0.0
    assert keep(journal, ended("s", 4)) == frozenset()
    assert journal.fault is None
    assert turns(place) == {"s": ["t1", "t2", "t3", "t4"]}


def test_a_commit_that_was_not_replicated_in_time_is_not_acknowledged(
    journal: PostgresJournal, place: str
) -> None:
    """PostgreSQL reports it as a warning of a statement that succeeds."""
    keep(journal, opened("s"))
    warn = "'BEGIN RAISE WARNING ''late''; RETURN NEW; END'"
    run_sql(place, f"CREATE FUNCTION warn() RETURNS trigger LANGUAGE plpgsql AS {warn}")
    run_sql(place, "CREATE TRIGGER late BEFORE UPDATE ON lives FOR EACH ROW EXECUTE FUNCTION warn()")
    journal.append(ended("s", 1))
    assert not journal.flush()
    assert not journal.flush(), "that it is stored is no answer either, while nothing is replicated"
    assert journal._link._failures == 2, "each attempt is a failure, though the connection can be opened"
    run_sql(place, "DROP TRIGGER late ON lives")
    journal._link._next_try = 0.0
    assert keep(journal) == frozenset()
    assert turns(place) == {"s": ["t1"]}


# --- compaction ---


def test_turns_that_nobody_needs_are_removed_while_others_write(journal: PostgresJournal, place: str) -> None:
    other = PostgresJournal(f"{place}&application_name=other", "commit", "v")
    keep(journal, opened("s"), *(ended("s", number) for number in range(6)), Forked("f", "s", 3, 1.0))
    run_sql(place, f"UPDATE sessions SET owner = {other.life} WHERE id = 'f'")
    list(other.sessions())
    keep(journal, Closed("s", "closed"))
    assert keep(other, ended("f", 9)) == frozenset()
    while journal.compact():
        continue
    assert run_sql(place, "SELECT count(*) FROM turns") == [(4,)]
    keep(other, Truncated("f", 1, None))
    while other.compact():
        continue
    assert run_sql(place, "SELECT count(*) FROM turns") == [(1,)]
    assert turns(place) == {"f": ["t0"]}
    other.close()


def test_what_a_killed_server_left_is_found_at_the_next_start(place: str) -> None:
    first = started(place)
    keep(first, opened("s"), *(ended("s", number) for number in range(5)), Forked("f", "s", 2, 1.0))
    keep(first, Closed("s", "closed"), Truncated("f", 1, None))
    first.close()
    assert run_sql(place, "SELECT count(*) FROM turns") == [(5,)]
    write(place)
    assert run_sql(place, "SELECT count(*) FROM turns") == [(1,)]


def test_a_damaged_journal_is_not_compacted(place: str) -> None:
    write(place, opened("s"), *(ended("s", number) for number in range(4)))
    run_sql(place, "UPDATE turns SET finish = 'x' WHERE turn_id = 't2'")
    write(place)
    assert run_sql(place, "SELECT count(*) FROM turns") == [(4,)], "they may be all that is left of a session"


# --- opening ---


def test_tables_are_upgraded_step_by_step_and_newer_ones_refused(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(place, opened("s"), ended("s", 1))
    current = tables.VERSION
    upgrades = {
        current: "ALTER TABLE holdfast.facts ADD COLUMN since text",
        current + 1: "SELECT 1 / 0",
    }
    monkeypatch.setattr(tables, "VERSION", current + 2)
    monkeypatch.setattr(tables, "UPGRADES", upgrades)
    with pytest.raises(JournalError, match="division by zero"):
        PostgresJournal(place, "commit", "v")
    found = run_sql(place, "SELECT value FROM facts WHERE name = 'version'")
    assert found == [(str(current),)], "all or nothing"
    upgrades[current + 1] = "UPDATE holdfast.facts SET since = 'then'"
    write(place)
    found = run_sql(place, "SELECT value, since FROM facts WHERE name = 'version'")
    assert found == [(str(current + 2), "then")]
    monkeypatch.undo()
    refusal = f"has version {current + 2}; this program reads versions up to {current}"
    for act in (lambda: PostgresJournal(place, "commit", "v"), lambda: read_sessions(place)):
        with pytest.raises(JournalError, match=refusal):
            act()


def test_tables_of_version_1_are_upgraded_with_their_sessions(place: str) -> None:
    write(place, opened("s"), ended("s", 1))
    run_sql(place, "ALTER TABLE sessions DROP COLUMN counted")
    run_sql(place, "ALTER TABLE lives DROP COLUMN address")
    run_sql(place, "DROP TABLE tenants")
    run_sql(place, "UPDATE facts SET value = '1' WHERE name = 'version'")
    one = Membership("other", tenant_sessions=1)
    with closing(PostgresJournal(place, "commit", "v", member=one)) as journal:
        assert [session.id for session in journal.claim(["s"]).sessions] == ["s"]
        assert keep(journal, opened("n"), ended("s", 2)) == frozenset()
        assert keep(journal, opened("m")) == {"m"}, "the session of before is not counted"
    assert turns(place) == {"s": ["t1", "t2"], "n": []}


def test_a_database_without_a_journal_and_one_that_is_not_there(place: str) -> None:
    with pytest.raises(JournalError, match="has no journal"):
        read_sessions(place)
    with pytest.raises(JournalError, match="cannot be reached"):
        open_store("postgresql://ann:secret@127.0.0.1:1/db?connect_timeout=2", "commit", "v")
    write(place, opened("s"))
    assert read_vocabulary(place) == "v"


def test_passwords_are_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    url = "postgresql://ann:se%40cret@db.example:5433,other/talk?sslmode=verify-full&password=secret"
    assert shown(url) == "postgresql://db.example:5433,other/talk"
    assert shown("postgres://ann:secret@h/db") == "postgresql://h/db"
    assert shown("kept/sessions.journal") == "kept/sessions.journal"
    assert without_credentials({"journal": url, "page_size": 16}) == {"journal": shown(url), "page_size": 16}
    with pytest.raises(JournalError) as caught:
        open_store("postgresql://ann:secret@127.0.0.1:1/db?connect_timeout=2", "commit", "v")
    with pytest.raises(OptionError) as refused:
        make_options(journal="mysql://ann:secret@h/db")
    assert "secret" not in f"{caught.value} {refused.value} {caplog.text}"


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://ann:pass/secret@h/db",
        "postgresql://ann:1/secret?secret@h/db",
        "postgresql://ann:pass@secret@h/db",
        "postgresql://ann:pass?secret@h/db",
        "postgresql://ann:pass%secret@h/db",
        "postgresql://ann@h/db?secret",
        "postgresql://h:secret/db",
        "Postgresql://ann:secret@h/db",
    ],
)
def test_a_url_whose_password_libpq_would_misread_is_refused_without_it(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(OptionError) as refused:
        make_options(journal=url)
    assert refused.value.option == "journal" and "secret" not in f"{refused.value} {fault_of(url)}"
    if url.startswith("postgresql"):
        for use in (read_sessions, lambda place: open_store(place, "commit", "v")):
            with pytest.raises(JournalError, match="percent-encoding") as caught:
                use(url)
            assert "secret" not in f"{caught.value} {caplog.text}"


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("postgresql://ann:a#secret@h/db", "h/db"),
        ("postgresql://ann:[secret@h/db", "h/db"),
        ("postgresql://ann:a%2Fsecret@[::1]:5433,other:1/db?user=a@b", "[::1]:5433,other:1/db"),
        ("postgresql:///db?host=/run/secret&password=s@secret", "/db"),
        ("postgres://%2Frun%2Fpostgresql/my%20db", "%2Frun%2Fpostgresql/my%20db"),
    ],
)
def test_urls_that_libpq_reads_are_taken_and_shown_without_credentials(url: str, place: str) -> None:
    assert make_options(journal=url).journal == url
    assert shown(url) == f"postgresql://{place}"


def test_without_psycopg_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(JournalError, match=r"pip install 'holdfast\[cluster\]'"):
        open_store("postgresql://h/db", "commit", "v")


@pytest.mark.parametrize(("durability", "setting"), [("off", "off"), ("commit", "local"), ("fsync", "on")])
def test_durability_is_postgresql_s_synchronous_commit(place: str, durability: Any, setting: str) -> None:
    with closing(PostgresJournal(place, durability, "v")) as opened_:
        assert opened_._link.use().execute("SHOW synchronous_commit").fetchone() == (setting,)
        assert opened_._link.use().execute("SHOW statement_timeout").fetchone() == ("30s",)


def test_a_session_is_removed_without_an_engine(place: str) -> None:
    write(place, opened("s"), ended("s", 1), opened("o"))
    run_sql(place, "UPDATE sessions SET tenant = 'nobody' WHERE id = 's'")
    with closing(open_store(place, "fsync", "v")) as journal:
        assert journal.remove("s")
    assert [session.id for session in read_sessions(place)] == ["o"]
