"""`holdfast sessions`: what a real server has left in a journal is listed, shown and removed."""

import json
import sqlite3
import subprocess
from pathlib import Path

import pytest

from holdfast import Engine, Sampling
from holdfast.client import Client
from holdfast.engine.durable.records import SCHEMA
from tests.client.serving import serving
from tests.client.test_commands import command
from tests.databases import new_place


def look(journal: str | Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return command("sessions", *arguments, HOLDFAST_JOURNAL=str(journal))


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sessions of one tenant, a third with a name that another tenant has, too."""
    folder = tmp_path_factory.mktemp("journal")
    path = folder / "journal.db"
    keys = {"HOLDFAST_API_KEYS": "ann:a,bob:b"}
    with (
        serving(folder / "log", "echo", "--journal", str(path), environment=keys) as address,
        Client(address, "a") as ann,
        Client(address, "b") as bob,
    ):
        talk = ann.session(id="talk")
        talk.say("a secret", max_tokens=50).wait()
        talk.say("more", max_tokens=50).wait()
        talk.fork(id="child", at_turn=1)
        other = ann.session(id="other")
        for said in ("one", "two", "three"):
            other.say(said, max_tokens=50).wait()
        other.rewind(2)
        other.say("four", max_tokens=50).wait()
        other.interrupt(keep=2)
        bob.session(id="same")
        ann.session(id="same")
        busy = look(path, "rm", "talk")
        assert busy.returncode == 1
        assert "is in use by another process: stop the server" in busy.stderr
        assert "DELETE /v1/sessions/talk" in busy.stderr
        assert "has no session absent" in look(path, "rm", "absent").stderr
        assert "ann/talk" in look(path, "ls").stdout, "reading beside a server is allowed"
    return path


def test_a_journal_in_a_database_is_listed_shown_and_changed() -> None:
    place = new_place("postgres", Path())
    secret = place.replace("holdfast@", "holdfast:secret@")
    with Engine("echo", journal=secret) as engine:
        for name in ("red/talk", "red/other"):
            engine.session(id=name).say("hello", Sampling(max_tokens=4)).wait()
        busy = look(secret, "rm", "talk")
        assert busy.returncode == 1 and "in use by another server named 'holdfast'" in busy.stderr
        assert "red/talk" in look(secret, "ls").stdout, "reading beside a server is allowed"
    assert "1 turn" not in look(secret, "show", "absent").stdout
    shown = look(secret, "show", "talk", "--text")
    assert "hell" in shown.stdout and "ended turn" in shown.stdout
    removed = look(secret, "rm", "talk")
    assert removed.stdout == "red/talk is removed\n", removed.stderr
    left = look(secret, "ls")
    assert "red/other" in left.stdout and "red/talk" not in left.stdout
    missing = look("postgresql://ann:secret@127.0.0.1:1/db?connect_timeout=2", "ls")
    assert missing.returncode == 1 and "cannot be reached" in missing.stderr
    said = (busy, shown, removed, left, missing)
    assert not any("secret" in each.stdout + each.stderr for each in said)


def test_names_are_shown_as_they_are_whatever_their_letters(tmp_path: Path) -> None:
    """An engine without a server takes any name: one that looks like a command to the terminal is none."""
    path = tmp_path / "a[/b] journal"
    names = ["[/]", "[red]x", "a\x1b[31mb"]
    with Engine("echo", journal=path) as engine:
        for name in names:
            engine.session(id=name).say("hello", Sampling(max_tokens=4)).wait()
    listed = look(path, "ls")
    assert (listed.returncode, listed.stderr) == (0, "")
    for name in ("[/]", "[red]x", "a[31mb"):
        assert name in listed.stdout
    assert "\x1b" not in listed.stdout
    for name in names:
        shown = look(path, "show", name, "--text")
        assert (shown.returncode, shown.stderr) == (0, "")
        assert name.replace("\x1b", "") in shown.stdout


def test_list(journal: Path) -> None:
    lines = [json.loads(line) for line in look(journal, "ls", "--json").stdout.splitlines()]
    assert {line["id"]: line["turns"] for line in lines} == {
        "ann/talk": 2, "ann/child": 1, "ann/other": 3, "ann/same": 0, "bob/same": 0,
    }  # fmt: skip
    assert next(line["parent"] for line in lines if line["id"] == "ann/child") == "ann/talk"
    assert "5 sessions in" in look(journal, "ls").stdout


def test_show(journal: Path) -> None:
    plain = look(journal, "show", "talk")
    assert plain.returncode == 0
    assert "ann/talk" in plain.stdout
    assert "secret" not in plain.stdout, "what was said is private"
    assert "a secret" in look(journal, "show", "talk", "--text").stdout
    lines = [
        json.loads(line) for line in look(journal, "show", "ann/talk", "--json", "--text").stdout.splitlines()
    ]
    assert [line["name"] for line in lines] == ["session", "turn", "turn"]
    assert [line["text"] for line in lines[1:]] == ["a secret", "more"]


def test_what_is_said_to_have_been_said_is_what_stands(journal: Path) -> None:
    """Not what a rewind took back; and where a turn was cut, that is told."""
    shown = look(journal, "show", "other", "--text")
    assert shown.returncode == 0, shown.stderr
    assert "three" not in shown.stdout
    assert ": two\n" in shown.stdout
    assert ": four (cut: 2 of 5 tokens remain)\n" in shown.stdout
    assert "cutback 2 turns left" in shown.stdout


@pytest.mark.parametrize("verb", ["ls", "show", "rm"])
def test_what_is_no_journal_of_this_program_is_said_in_one_line(
    journal: Path, tmp_path: Path, verb: str
) -> None:
    newer, empty = tmp_path / "newer", tmp_path / "empty"
    newer.write_bytes(journal.read_bytes())
    connection = sqlite3.connect(newer)
    connection.execute("PRAGMA user_version = 7")
    connection.execute("ALTER TABLE sessions RENAME TO conversations")
    connection.close()
    empty.touch()
    for path, why in (
        (newer, f"has version 7; this program reads versions up to {SCHEMA}"),
        (empty, "is not a journal"),
        (tmp_path, "is not a file"),
    ):
        told = look(path, verb, *(() if verb == "ls" else ("talk",)))
        assert (told.returncode, told.stdout, told.stderr.count("\n")) == (1, "", 1), told.stderr
        assert why in told.stderr
    assert empty.read_bytes() == b""


def test_names_that_are_not_clear(journal: Path) -> None:
    assert "several tenants have a session same; give one of: " in look(journal, "show", "same").stderr
    assert "has no session nobody" in look(journal, "show", "nobody").stderr
    missing = look(journal.with_name("absent"), "ls")
    assert (missing.returncode, "absent does not exist" in missing.stderr) == (1, True)
    assert not journal.with_name("absent").exists()
    other = journal.with_name("other")
    other.write_text("no database")
    assert look(other, "ls").returncode == 1


def test_remove(journal: Path) -> None:
    done = look(journal, "rm", "bob/same")
    assert (done.returncode, done.stdout) == (0, "bob/same is removed\n"), done.stderr
    assert "bob/same" not in look(journal, "ls").stdout
    assert look(journal, "show", "same").returncode == 0, "the name is now clear"
