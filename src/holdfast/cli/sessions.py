"""`holdfast sessions`: the sessions of a journal, and those of a running server, without torch.

`ls` and `show` only read, also while a server writes the journal. `rm` closes a session for good, which needs
the journal's lock. Texts are shown only with `--text`. A session is given as `tenant/name`, or by its name
alone if only one tenant has it. `set` and `compact` change an open session of a server.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast.cli.refusals import refusal
from holdfast.cli.remote import server_refusal
from holdfast.cli.terminal import heard_tokens, printable
from holdfast.client import Client, HoldfastError
from holdfast.client.calls import DEFAULT_URL
from holdfast.client.values import LISTENING, SessionChange, SessionView
from holdfast.engine.durable.places import fault_of, is_database, shown
from holdfast.engine.durable.records import JournalError, StoredSession
from holdfast.engine.durable.store import JournalInUse
from holdfast.engine.durable.stores import open_store, read_log, read_sessions, read_vocabulary

__all__ = ["app"]

app = typer.Typer(
    help="List, show and remove the sessions of a journal; change those of a server.",
    no_args_is_help=True,
    add_completion=False,
)

JOURNAL = Annotated[
    str,
    typer.Option(
        "--journal",
        envvar="HOLDFAST_JOURNAL",
        metavar="FILE|URL",
        help="The journal of `holdfast serve --journal`.",
    ),
]
NAME = Annotated[str, typer.Argument(help="The session: tenant/name, or the name alone if it is unique.")]
OPEN = Annotated[str, typer.Argument(help="The session's name on the server.")]
URL = Annotated[str, typer.Option(help="The server's address.", envvar="HOLDFAST_URL")]
API_KEY = Annotated[str | None, typer.Option(help="API key of the server.", envvar="HOLDFAST_API_KEY")]
AS_JSON = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]


@contextmanager
def _errors_in_one_line(journal: str) -> Iterator[None]:
    """Report a journal that cannot be used in one line."""
    try:
        yield
    except JournalError as error:
        raise refusal("sessions", str(error)) from error
    except (sqlite3.Error, OSError) as error:
        raise refusal("sessions", f"{shown(journal)} cannot be read as a journal: {error}") from error


def _read(journal: str) -> list[StoredSession]:
    if not is_database(journal):
        if fault := fault_of(journal):
            raise JournalError(f"--journal {fault}")
        if not Path(journal).exists():
            raise JournalError(f"{journal} does not exist; `holdfast serve --journal {journal}` creates it")
        if not Path(journal).is_file():
            raise JournalError(f"{journal} is not a file")
    return read_sessions(journal)


def _find(journal: str, name: str) -> StoredSession:
    sessions = _read(journal)
    exact = [session for session in sessions if session.id == name]
    found = exact or [session for session in sessions if session.id.partition("/")[2] == name]
    if not found:
        raise JournalError(
            f"{shown(journal)} has no session {printable(name)}; `holdfast sessions ls` lists them"
        )
    if len(found) > 1:
        raise JournalError(
            f"several tenants have a session {printable(name)}; give one of: "
            + ", ".join(session.id for session in found)
        )
    return found[0]


def _described(session: StoredSession) -> dict[str, Any]:
    return {
        "name": "session",
        "value": session.tokens,
        "unit": "tokens",
        "id": session.id,
        "tenant": session.tenant,
        "turns": len(session.turns),
        "created": session.about.created,
        "ttl": session.about.ttl,
        "settings": json.loads(session.about.settings),
        "parent": session.about.parent,
        "snapshot_bytes": session.snapshot.bytes if session.snapshot is not None else 0,
        "damaged": session.damaged,
    }


@app.command("ls")
def list_sessions(
    journal: Annotated[
        str | None,
        typer.Option(
            envvar="HOLDFAST_JOURNAL",
            metavar="FILE|URL",
            help="The journal of `holdfast serve --journal`.",
        ),
    ] = None,
    url: Annotated[str | None, typer.Option(help="List the open sessions of this server instead.")] = None,
    api_key: API_KEY = None,
    as_json: AS_JSON = False,
) -> None:
    """List the sessions of a journal, or those that are open on a server."""
    if url is not None:
        _list_open(url, api_key, as_json)
        return
    if journal is None:
        raise typer.BadParameter("give the journal with --journal, or a server with --url")
    with _errors_in_one_line(journal):
        sessions = _read(journal)
    if as_json:
        for session in sessions:
            typer.echo(json.dumps(_described(session)))
        return
    texts, numbers = ("session", "created", "from"), ("turns", "tokens", "on disk")
    table = _table(len(sessions), f"in {shown(journal)}", texts, numbers)
    for session in sessions:
        created = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(session.about.created))
        held = f"{session.snapshot.length} tokens" if session.snapshot is not None else ""
        called = f"{session.id} (damaged)" if session.damaged else session.id
        parent = _plain(session.about.parent or "")
        table.add_row(_plain(called), created, parent, str(len(session.turns)), str(session.tokens), held)
    Console().print(table)


def _list_open(url: str, api_key: str | None, as_json: bool) -> None:
    """List the open sessions of a server, with their incoming input."""
    with _on_server(url, api_key) as client:
        sessions = client.sessions()
    if as_json:
        for session in sessions:
            typer.echo(json.dumps(_described_open(session)))
        return
    texts, numbers = ("session", "state", "tier"), ("turns", "tokens", "heard")
    table = _table(len(sessions), f"on {url}", texts, numbers)
    for session in sessions:
        counts = (str(session.turns), str(session.tokens_known), heard_tokens(session))
        table.add_row(_plain(session.id), session.state, session.tier, *counts)
    Console().print(table)


def _table(count: int, where: str, texts: Sequence[str], numbers: Sequence[str]) -> Table:
    """An empty table of sessions: columns of texts, then columns of numbers."""
    table = Table(caption=_plain(f"{count} session{'' if count == 1 else 's'} {where}"))
    for heading in texts:
        table.add_column(heading)
    for heading in numbers:
        table.add_column(heading, justify="right")
    return table


def _described_open(session: SessionView) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "name": "session",
        "value": session.tokens_known,
        "unit": "tokens",
        "id": session.id,
        "state": session.state,
        "tier": session.tier,
        "turns": session.turns,
    }
    if session.state == LISTENING:
        shown |= {"heard": session.tokens_heard, "ahead": session.tokens_ahead}
    return shown


@app.command("show")
def show(
    name: NAME,
    journal: JOURNAL,
    text: Annotated[bool, typer.Option("--text", help="Show the texts of the last turns, too.")] = False,
    as_json: AS_JSON = False,
) -> None:
    """Show one session: its turns and its latest changes."""
    with _errors_in_one_line(journal):
        session = _find(journal, name)
        changes = read_log(journal, session.id)
    texts = _texts(session) if text else {}
    if as_json:
        typer.echo(json.dumps(_described(session)))
        for turn in session.turns:
            line: dict[str, Any] = {"name": "turn", "value": len(turn.output), "unit": "tokens"}
            line |= {"turn_id": turn.turn_id, "input_tokens": len(turn.input), "finish_reason": turn.finish}
            if turn.turn_id in texts:
                line["text"] = texts[turn.turn_id]
            typer.echo(json.dumps(line))
        return
    console = Console(highlight=False)
    table = Table(title=_plain(session.id))
    for heading in ("turn", "tokens in", "tokens out", "ended by"):
        table.add_column(heading, justify="right" if "tokens" in heading else "left")
    for turn in session.turns:
        table.add_row(_plain(turn.turn_id), str(len(turn.input)), str(len(turn.output)), turn.finish)
    console.print(table)
    for turn_id, words in texts.items():
        console.print(_plain(f"{turn_id}: {words}"))
    for kind, detail in changes:
        console.print(_plain(f"{kind.lower()} {detail}".rstrip()), style="dim")


def _plain(text: str) -> Text:
    """Text without markup and control characters: the in-process engine allows any letters in names."""
    return Text(printable(text))


def _texts(session: StoredSession) -> dict[str, str]:
    """The texts of a session's turns, as far as the journal has their results.

    The text of a truncated turn is that of the whole turn, with a note: no tokenizer is at hand to cut it.
    """
    results = {turn.turn_id: turn for turn in session.finished}
    texts = {}
    for turn in session.turns:
        found = results.get(turn.turn_id)
        if found is not None:
            cut = len(turn.output) < len(found.tokens)
            kept = f" (cut: {len(turn.output)} of {len(found.tokens)} tokens remain)" if cut else ""
            texts[turn.turn_id] = found.text + kept
    return texts


@app.command("rm")
def remove(name: NAME, journal: JOURNAL) -> None:
    """Close a session for good; no server may be using the journal.

    The next server that uses the journal removes its snapshot file, if it has one.
    """
    with _errors_in_one_line(journal):
        session = _find(journal, name)
        try:
            with closing(open_store(journal, "fsync", read_vocabulary(journal))) as opened:
                if not opened.remove(session.id):
                    raise JournalError(f"{opened.place} cannot be written: {opened.fault}")
        except JournalInUse as error:
            called = session.id.partition("/")[2]
            raise JournalError(
                f"{error}: stop the server first, or close the session with DELETE /v1/sessions/{called}"
            ) from error
    typer.echo(f"{printable(session.id)} is removed")


@app.command("set")
def change(
    name: OPEN,
    ttl: Annotated[
        float | None, typer.Option(help="Idle time in seconds until it is closed; 0 for the default.")
    ] = None,
    pin: Annotated[
        bool | None, typer.Option("--pin/--no-pin", help="Evict its memory after that of other sessions.")
    ] = None,
    priority: Annotated[
        int | None, typer.Option(min=-4, max=4, help="Sessions with the lowest priority are evicted first.")
    ] = None,
    keep_reasoning: Annotated[
        bool | None,
        typer.Option("--keep-reasoning/--drop-reasoning", help="Whether turns keep the model's reasoning."),
    ] = None,
    url: URL = DEFAULT_URL,
    api_key: API_KEY = None,
) -> None:
    """Change settings of an open session of a server; omitted ones stay."""
    asked: SessionChange = {}
    if ttl is not None:
        asked["ttl"] = ttl or None
    if pin is not None:
        asked["pin"] = pin
    if priority is not None:
        asked["priority"] = priority
    if keep_reasoning is not None:
        asked["keep_reasoning"] = keep_reasoning
    if not asked:
        raise refusal("sessions", "nothing to set: give --ttl, --pin, --priority or --keep-reasoning")
    with _on_server(url, api_key) as client:
        view = client.resume(name).update(**asked)
    ttl_shown = "none" if view.ttl is None else f"{view.ttl:g} s"
    pinned = "pinned" if view.pin else "not pinned"
    reasoning = "kept" if view.keep_reasoning else "dropped"
    shown = f"ttl {ttl_shown}, {pinned}, priority {view.priority}, reasoning {reasoning}"
    typer.echo(f"{printable(view.id)}: {shown}")


@app.command("compact")
def compact(
    name: OPEN,
    from_turn: Annotated[int, typer.Argument(min=1, help="The first turn to replace, counted from 1.")],
    to_turn: Annotated[int, typer.Argument(min=1, help="The last turn to replace.")],
    text: Annotated[str, typer.Argument(help="The user message that replaces them.")],
    url: URL = DEFAULT_URL,
    api_key: API_KEY = None,
) -> None:
    """Replace a range of turns of an open session by a text."""
    with _on_server(url, api_key) as client:
        session = client.resume(name)
        left = session.compact(from_turn, to_turn, text)
        turns = session.turns
    typer.echo(f"{printable(name)}: {turns} turns left; the next turn computes {left} tokens again")


@contextmanager
def _on_server(url: str, api_key: str | None) -> Iterator[Client]:
    """A client whose errors are reported in one line."""
    try:
        with Client(url, api_key) as client:
            yield client
    except HoldfastError as error:
        raise server_refusal("sessions", error) from error
