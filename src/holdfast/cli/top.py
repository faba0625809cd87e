"""`holdfast top`: watch a server: sessions, turns, throughput, and memory by holder.

Polls the server every second; `--once` draws once, `--json` prints one object a line for each figure.
Throughput and turns come from /metrics, which may need the admin key; without it they are counted from the
sessions that the key may see.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from holdfast.cli.remote import server_refusal
from holdfast.cli.terminal import engine_pools, heard_tokens, listening, memory_table, printable
from holdfast.client import Client, Forbidden, HoldfastError, NotFound, Retries, SessionView
from holdfast.client.calls import DEFAULT_URL
from holdfast.client.values import LISTENING

__all__ = ["Frame", "app", "compare", "draw", "look"]

app = typer.Typer(add_completion=False)

SESSIONS_SHOWN = 20
FINDINGS_SHOWN = 5

HELP = (
    "Watch a server: sessions, turns, throughput, and memory by holder.\n\n"
    "\b\n"
    "holdfast top                    the server on this machine\n"
    "holdfast top --once             print once, for a script or a report\n"
    "holdfast top --json             one JSON object a line for each figure"
)


@dataclass(frozen=True, slots=True)
class Frame:
    """The state of a server at one moment."""

    at: float
    models: tuple[str, ...]
    sessions: tuple[SessionView, ...]
    memory: dict[str, Any]
    metrics: dict[str, float]

    def figure(self, name: str) -> float | None:
        """A figure of /metrics, summed over its labels; None if it is not visible."""
        found = [value for key, value in self.metrics.items() if key.partition("{")[0] == name]
        return sum(found) if found else None

    @property
    def tokens(self) -> float:
        """Tokens generated so far; without /metrics, all tokens of the visible sessions."""
        counted = self.figure("holdfast_generated_tokens_total")
        return float(sum(session.tokens_known for session in self.sessions)) if counted is None else counted

    @property
    def turns(self) -> float:
        """Turns ended so far; without /metrics, those of the visible sessions."""
        counted = self.figure("holdfast_turns_total")
        return float(sum(session.turns for session in self.sessions)) if counted is None else counted


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates per second between two frames."""

    tokens: float
    turns: float


def look(client: Client) -> Frame:
    """Query a server for a frame."""
    try:
        metrics = client.metrics()
    except (Forbidden, NotFound):
        metrics = {}
    return Frame(time.monotonic(), tuple(client.models()), tuple(client.sessions()), client.memory(), metrics)


def compare(before: Frame | None, now: Frame) -> Rates | None:
    """The rates between two frames; None for the first."""
    if before is None or now.at <= before.at:
        return None
    seconds = now.at - before.at
    return Rates(max(0.0, now.tokens - before.tokens) / seconds, max(0.0, now.turns - before.turns) / seconds)


@app.command(help=HELP)
def top(
    url: Annotated[str, typer.Option(help="The server's address.", envvar="HOLDFAST_URL")] = DEFAULT_URL,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="API key of the server; the admin key shows everything.", envvar="HOLDFAST_API_KEY"
        ),
    ] = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two polls.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Poll once and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Watch a server."""
    console = Console()
    try:
        # No retries: a failed poll is followed by the next one.
        with Client(url, api_key, retries=Retries(attempts=1), timeout=30.0) as client:
            if once or as_json:
                _print_frames(client, console, interval, once, as_json)
            else:
                _watch(client, console, interval)
    except HoldfastError as error:
        raise server_refusal("top", error) from error
    except KeyboardInterrupt:
        console.print()


def _print_frames(client: Client, console: Console, interval: float, once: bool, as_json: bool) -> None:
    before: Frame | None = None
    while True:
        frame = look(client)
        rates = compare(before, frame)
        if as_json:
            for line in figures(client.url, frame, rates):
                typer.echo(json.dumps(line))
        else:
            console.print(draw(client.url, frame, rates))
        if once:
            return
        before = frame
        time.sleep(interval)


def _watch(client: Client, console: Console, interval: float) -> None:
    """Draw until Ctrl-C; keeps polling while the server is unreachable.

    Ctrl-C sets a flag, since a library may swallow an exception raised during a poll.
    """
    before: Frame | None = look(client)
    assert before is not None
    with (
        listening() as interrupt,
        Live(draw(client.url, before, None), console=console, screen=console.is_terminal) as live,
    ):
        while not interrupt.pressed:
            time.sleep(interval)
            try:
                frame = look(client)
            except HoldfastError as error:
                live.update(Text(f"{client.url}: {error}", style="red"))
                before = None
                continue
            live.update(draw(client.url, frame, compare(before, frame)))
            before = frame


def draw(url: str, frame: Frame, rates: Rates | None) -> Group:
    """A frame as text and tables."""
    parts: list[Any] = [_headline(url, frame, rates), memory_table(frame.memory), _sessions(frame)]
    findings = frame.memory["findings"]
    parts += [
        Text(f"finding: {printable(str(finding.get('detail', finding)))}", style="red")
        for finding in findings[-FINDINGS_SHOWN:]
    ]
    return Group(*parts)


def _headline(url: str, frame: Frame, rates: Rates | None) -> Text:
    shown = [f"{url}  {', '.join(frame.models)}  sessions {len(frame.sessions)}"]
    for name, word in (("holdfast_turns_running", "running"), ("holdfast_turns_queued", "queued")):
        figure = frame.figure(name)
        if figure is not None:
            shown.append(f"{word} {figure:.0f}")
    listening = sum(session.state == LISTENING for session in frame.sessions)
    if listening:
        shown.append(f"listening {listening}")
    if rates is not None:
        shown.append(f"{rates.tokens:.1f} tokens/s")
        shown.append(f"{rates.turns:.1f} turns/s")
    return Text("  ".join(shown), style="bold")


def _sessions(frame: Frame) -> Table:
    """The sessions, most recently active first."""
    recent = sorted(frame.sessions, key=lambda session: (session.state == "IDLE", session.idle_seconds))
    more = len(recent) - SESSIONS_SHOWN
    table = Table(caption=f"and {more} more" if more > 0 else None)
    for heading in ("session", "state", "tier"):
        table.add_column(heading)
    for heading in ("turns", "tokens", "computed", "heard", "memory", "idle"):
        table.add_column(heading, justify="right")
    for session in recent[:SESSIONS_SHOWN]:
        counts = (session.turns, session.tokens_known, session.tokens_computed)
        held, idle = plain_bytes(session_bytes(session)), f"{session.idle_seconds:.0f} s"
        heard = heard_tokens(session)
        table.add_row(session.id, session.state, session.tier, *map(str, counts), heard, held, idle)
    return table


def session_bytes(session: SessionView) -> int:
    """Bytes that a session holds itself, over all components."""
    held = [part for part in session.memory.values() if isinstance(part, dict) and "bytes" in part]
    return sum(int(part["bytes"]) for part in held)


def plain_bytes(count: float) -> str:
    """A number of bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def figures(url: str, frame: Frame, rates: Rates | None) -> Iterator[dict[str, object]]:
    """A frame as figures: name, value, unit and labels."""

    def line(name: str, value: float, unit: str, **more: object) -> dict[str, object]:
        return {"name": name, "value": value, "unit": unit, "url": url, "step": frame.memory["step"], **more}

    yield line("sessions", len(frame.sessions), "sessions")
    yield line("listening", sum(each.state == LISTENING for each in frame.sessions), "sessions")
    yield line("heard", sum(each.tokens_heard for each in frame.sessions), "tokens")
    for name, metric in (("running", "holdfast_turns_running"), ("queued", "holdfast_turns_queued")):
        figure = frame.figure(metric)
        if figure is not None:
            yield line(name, figure, "turns")
    if rates is not None:
        yield line("throughput", round(rates.tokens, 2), "tokens/s")
        yield line("turns", round(rates.turns, 2), "turns/s")
    for engine, pool in engine_pools(frame.memory):
        for holder, units in pool["holders"].items():
            place = {"component": pool["component"], "tier": pool["tier"], "holder": holder}
            if engine:
                place["engine"] = engine
            yield line("units", units, f"{pool['unit']}s", **place)
    yield line("findings", len(frame.memory["findings"]), "findings")
