"""`holdfast sessions`: look into a journal, without a server and without torch.

`ls` and `show` only read, and may do so beside a server that writes. `rm` closes a session for good and needs
the journal to itself. What was said is shown only where `--text` asks for it. A session is named as the
journal names it, `tenant/name`, or by its name alone where only one tenant has it.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast.cli.refusals import refusal
from holdfast.cli.terminal import printable
from holdfast.engine.durable.journal import Journal, JournalError, JournalInUse
from holdfast.engine.durable.journal_reading import read_log, read_sessions, read_vocabulary
from holdfast.engine.durable.records import Closed, StoredSession

__all__ = ["app"]

app = typer.Typer(
    help="Look into a journal: the sessions that outlive a server.",
    no_args_is_help=True,
    add_completion=False,
)

JOURNAL = Annotated[
    Path,
    typer.Option(
        "--journal",
        envvar="HOLDFAST_JOURNAL",
        metavar="FILE",
        help="The file that `serve --journal` writes.",
    ),
]
NAME = Annotated[str, typer.Argument(help="The session: tenant/name, or the name where it is the only one.")]
AS_JSON = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]


@contextmanager
def _explained(journal: Path) -> Iterator[None]:
    """What is wrong with a journal, in one line."""
    try:
        yield
    except JournalError as error:
        raise refusal("sessions", str(error)) from error
    except (sqlite3.Error, OSError) as error:
        raise refusal("sessions", f"{journal} is no journal that can be read: {error}") from error


def _read(journal: Path) -> list[StoredSession]:
    if not journal.exists():
        raise JournalError(f"{journal} is not there; `holdfast serve --journal {journal}` writes one")
    if not journal.is_file():
        raise JournalError(f"{journal} is no file, and a journal is one")
    return read_sessions(journal)


def _find(journal: Path, name: str) -> StoredSession:
    sessions = _read(journal)
    exact = [session for session in sessions if session.id == name]
    found = exact or [session for session in sessions if session.id.partition("/")[2] == name]
    if not found:
        raise JournalError(f"{journal} has no session {printable(name)}; `holdfast sessions ls` lists them")
    if len(found) > 1:
        raise JournalError("several tenants have it: " + ", ".join(session.id for session in found))
    return found[0]


def _described(session: StoredSession) -> dict[str, Any]:
    return {
        "name": "session",
        "value": session.tokens,
        "unit": "tokens",
        "id": session.id,
        "tenant": session.tenant,
        "turns": len(session.turns),
        "created": session.created,
        "ttl": session.ttl,
        "parent": session.parent,
        "snapshot_bytes": session.snapshot.bytes if session.snapshot is not None else 0,
        "damaged": session.damaged,
    }


@app.command("ls")
def list_sessions(journal: JOURNAL, as_json: AS_JSON = False) -> None:
    """The sessions of a journal."""
    with _explained(journal):
        sessions = _read(journal)
    if as_json:
        for session in sessions:
            typer.echo(json.dumps(_described(session)))
        return
    counted = "1 session" if len(sessions) == 1 else f"{len(sessions)} sessions"
    table = Table(caption=_plain(f"{counted} in {journal}"))
    for heading in ("session", "created", "from"):
        table.add_column(heading)
    for heading in ("turns", "tokens", "on disk"):
        table.add_column(heading, justify="right")
    for session in sessions:
        created = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(session.created))
        held = f"{session.snapshot.length} tokens" if session.snapshot is not None else ""
        shown = f"{session.id} (damaged)" if session.damaged else session.id
        parent = _plain(session.parent or "")
        table.add_row(_plain(shown), created, parent, str(len(session.turns)), str(session.tokens), held)
    Console().print(table)


@app.command("show")
def show(
    name: NAME,
    journal: JOURNAL,
    text: Annotated[bool, typer.Option("--text", help="Show what the last turns said, too.")] = False,
    as_json: AS_JSON = False,
) -> None:
    """One session: its turns, and what happened to it lately."""
    with _explained(journal):
        session = _find(journal, name)
        happened = read_log(journal, session.id)
    said = _said(session) if text else {}
    if as_json:
        typer.echo(json.dumps(_described(session)))
        for turn in session.turns:
            line: dict[str, Any] = {"name": "turn", "value": len(turn.output), "unit": "tokens"}
            line |= {"turn_id": turn.turn_id, "input_tokens": len(turn.input), "finish_reason": turn.finish}
            if turn.turn_id in said:
                line["text"] = said[turn.turn_id]
            typer.echo(json.dumps(line))
        return
    console = Console(highlight=False)
    table = Table(title=_plain(session.id))
    for heading in ("turn", "tokens in", "tokens out", "ended by"):
        table.add_column(heading, justify="right" if "tokens" in heading else "left")
    for turn in session.turns:
        table.add_row(_plain(turn.turn_id), str(len(turn.input)), str(len(turn.output)), turn.finish)
    console.print(table)
    for turn_id, words in said.items():
        console.print(_plain(f"{turn_id}: {words}"))
    for kind, detail in happened:
        console.print(_plain(f"{kind.lower()} {detail}".rstrip()), style="dim")


def _plain(text: str) -> Text:
    """Text as it is: names may be of any letters where an engine was used without a server."""
    return Text(printable(text))


def _said(session: StoredSession) -> dict[str, str]:
    """What the turns of a session said, as far as it is remembered. Where one was cut, that is told: the text
    is that of the whole turn, because what its tokens mean is not known here."""
    remembered = {turn.turn_id: turn for turn in session.finished}
    said = {}
    for turn in session.turns:
        found = remembered.get(turn.turn_id)
        if found is not None:
            cut = len(turn.output) < len(found.tokens)
            kept = f" (cut: {len(turn.output)} of {len(found.tokens)} tokens stand)" if cut else ""
            said[turn.turn_id] = found.text + kept
    return said


@app.command("rm")
def remove(name: NAME, journal: JOURNAL) -> None:
    """Close a session for good; no server may be using the journal.

    Its file, where there is one, goes when a server is next started.
    """
    with _explained(journal):
        session = _find(journal, name)
        try:
            with Journal(journal, "fsync", read_vocabulary(journal)) as opened:
                opened.append(Closed(session.id, "removed"))
                if not opened.flush():
                    raise JournalError(f"{journal} cannot be written: {opened.fault}")
        except JournalInUse as error:
            called = session.id.partition("/")[2]
            raise JournalError(
                f"{error}: stop the server first, or let it close the session: DELETE /v1/sessions/{called}"
            ) from error
    typer.echo(f"{printable(session.id)} is gone")
