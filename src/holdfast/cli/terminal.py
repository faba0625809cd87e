"""The chat's user interface in a terminal: prompt, commands, answers, tool results, Ctrl-C, costs.

Ctrl-C while the model generates interrupts it: the text shown stays in the conversation, later text does not.
The signal handler only sets a flag that is checked between pieces. Ctrl-C or Ctrl-D at the prompt exits. The
conversations come from a `Host`, local or remote; `top` and `sessions` use the memory table and `printable`.
"""

from __future__ import annotations

import io
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table

from holdfast.cli.answer_view import AnswerView, printable
from holdfast.client.values import LISTENING, SessionView, ToolCall, TurnEvent

__all__ = [
    "Chat",
    "Cost",
    "Host",
    "Speech",
    "Talk",
    "engine_pools",
    "heard_tokens",
    "memory_table",
    "printable",
]

HELP = """\
/rewind N   remove the last N turns (default: 1)
/fork       continue in a copy of this conversation; /fork N switches to conversation N
/thinking   show the reasoning of the last answer
/memory     show who holds the memory
/help       show this list
/quit       exit (or Ctrl-D)
Ctrl-C      during an answer: interrupt it; at the prompt: exit
When the model calls tools, type the result of each; an empty line leaves the calls unanswered."""

COMMANDS = ("/rewind", "/fork", "/thinking", "/memory", "/help")

LEAVE = frozenset({"/quit", "/exit"})


class Cost(Protocol):
    """The cost of a turn, in tokens."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens before the answer, the history included."""

    @property
    def cached_tokens(self) -> int:
        """Those of them found in the cache."""

    @property
    def completion_tokens(self) -> int:
        """Generated tokens that were kept."""


class Speech(Protocol):
    """A running turn."""

    def take(self) -> Sequence[TurnEvent] | None:
        """New output, after a short wait; None at the end."""

    def cut(self) -> None:
        """Interrupt; keep the text taken so far."""

    @property
    def usage(self) -> Cost:
        """The cost of the turn, after its end."""

    @property
    def tool_calls(self) -> Sequence[ToolCall]:
        """The complete calls that the turn ended in."""


class Talk(Protocol):
    """One conversation."""

    @property
    def turns(self) -> int:
        """How many turns it has."""

    def say(self, words: str) -> Speech:
        """Begin a turn."""

    def tool_results(self, results: Mapping[str, str]) -> Speech:
        """Begin a turn with the results of tool calls, by their ids."""

    def rewind(self, turns: int) -> None:
        """Rewind so that `turns` turns remain."""

    def fork(self) -> Talk:
        """A second conversation that continues from here."""


class Host(Protocol):
    """Where the conversations are: the local engine or a server."""

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        """Exceptions that are shown in a line; the conversation continues."""

    def open(self) -> Talk:
        """Begin a conversation."""

    def memory(self) -> dict[str, Any]:
        """Who holds the memory."""


class Interrupt:
    """Whether Ctrl-C was pressed during a turn."""

    def __init__(self) -> None:
        self.pressed = False

    def press(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        assert number == signal.SIGINT
        del frame
        self.pressed = True


@contextmanager
def listening() -> Iterator[Interrupt]:
    """Catch Ctrl-C in a flag for the length of a block."""
    interrupt = Interrupt()
    before = signal.signal(signal.SIGINT, interrupt.press)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)


class Chat:
    """The loop of prompt and answer; forks are kept side by side."""

    def __init__(self, host: Host, *, shows_thinking: bool = False) -> None:
        self.host = host
        self.console = Console(highlight=False)
        self._shows_thinking = shows_thinking
        self._reasoning = ""
        self.talks: list[Talk] = [host.open()]
        self.current = 0

    @property
    def talk(self) -> Talk:
        """The current conversation."""
        return self.talks[self.current]

    def run(self) -> None:
        """Read and answer until the user exits."""
        take_any_bytes()
        self.console.print("[dim]/help lists commands; Ctrl-C interrupts the model[/]")
        while True:
            name = f"{self.current + 1}> " if len(self.talks) > 1 else "> "
            try:
                line = self.console.input(name, markup=False).strip()
            except (EOFError, KeyboardInterrupt):
                self.console.print()
                return
            if line in LEAVE:
                return
            if not is_text(line):
                self.console.print("the input is not valid text in this terminal's encoding", style="red")
            elif line:
                self.obey(line)

    def obey(self, line: str) -> None:
        """Run a command or a turn; a refusal is shown and changes nothing."""
        try:
            if line.startswith("/"):
                self.command(line)
            else:
                self.converse(line)
        except self.host.refusals as error:
            self.console.print(f"{error}", style="red", markup=False)

    def command(self, line: str) -> None:
        """Run a command line that begins with a slash."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name not in COMMANDS or (rest and not rest.isdecimal()):
            self.console.print(f"unknown command {line}; /help lists all commands", markup=False)
        elif name == "/rewind":
            self.rewind(int(rest or 1))
        elif name == "/fork":
            self.fork(int(rest) if rest else None)
        elif name == "/thinking":
            self.console.print(self._reasoning or "no reasoning to show", style="dim", markup=False)
        elif name == "/memory":
            self.console.print(memory_table(self.host.memory()))
        else:
            self.console.print(HELP, markup=False)

    def rewind(self, turns: int) -> None:
        """Remove the last turns."""
        there_are = self.talk.turns
        remaining = there_are - turns
        if remaining < 0:
            self.console.print(f"the conversation has only {there_are} turn{'' if there_are == 1 else 's'}")
            return
        self.talk.rewind(remaining)
        self.console.print(f"[dim]{remaining} turns remain[/]")

    def fork(self, number: int | None) -> None:
        """Continue in a copy of the conversation, or in conversation `number`."""
        if number is None:
            self.talks.append(self.talk.fork())
            number = len(self.talks)
        if not 1 <= number <= len(self.talks):
            self.console.print(f"there are {len(self.talks)} conversations")
            return
        self.current = number - 1
        self.console.print(f"[dim]conversation {number}, {self.talk.turns} turns[/]")

    def converse(self, words: str) -> None:
        """Run a turn, and turns with results as long as the model calls tools and the user answers."""
        calls = self.answer(lambda: self.talk.say(words))
        while calls and (results := self.ask_results(calls)):
            calls = self.answer(partial(self.talk.tool_results, results))

    def answer(self, begin: Callable[[], Speech]) -> Sequence[ToolCall]:
        """Run a turn until it ends or is interrupted; the calls that wait for results."""
        began = time.monotonic()
        first: float | None = None
        view = AnswerView(self.console, expanded=self._shows_thinking)
        with listening() as interrupt:
            speech = begin()
            while not interrupt.pressed and (events := speech.take()) is not None:
                if view.show(events) and first is None:
                    first = time.monotonic()
            if interrupt.pressed:
                speech.cut()
        ended = time.monotonic()
        view.close()
        self._reasoning = printable(view.reasoning)
        self.console.print(
            summary(speech.usage, (first or ended) - began, ended - began, interrupt.pressed),
            style="dim",
            markup=False,
        )
        return () if interrupt.pressed else speech.tool_calls

    def ask_results(self, calls: Sequence[ToolCall]) -> dict[str, str]:
        """The results of calls, as typed by the user; none if a line is empty or the input ends."""
        results: dict[str, str] = {}
        for call in calls:
            try:
                line = self.console.input(f"result of {printable(call.name)}> ", markup=False).strip()
            except (EOFError, KeyboardInterrupt):
                self.console.print()
                line = ""
            if not line or not is_text(line):
                self.console.print("[dim]the calls stay unanswered[/]")
                return {}
            results[call.id] = line
        return results


def take_any_bytes() -> None:
    """Keep invalid input bytes and unprintable output characters from raising."""
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def is_text(line: str) -> bool:
    """Whether the input decoded without lone surrogates."""
    return not any("\ud800" <= letter <= "\udfff" for letter in line)


def summary(usage: Cost, first: float, total: float, interrupted: bool) -> str:
    """One line with the cost of a turn."""
    parts = [
        f"computed {usage.prompt_tokens - usage.cached_tokens}",
        f"cached {usage.cached_tokens}",
        f"first token {first:.2f} s",
    ]
    if usage.completion_tokens > 1 and total > first:
        parts.append(f"{(usage.completion_tokens - 1) / (total - first):.1f} tokens/s")
    if interrupted:
        parts.append(f"interrupted, {usage.completion_tokens} tokens kept")
    return f"[{', '.join(parts)}]"


def memory_table(report: dict[str, Any]) -> Table:
    """Units of every pool by the kind of their holder; of each engine, where there are several."""
    pools = engine_pools(report)
    kinds = sorted({kind for _, pool in pools for kind, count in pool["holders"].items() if count})
    table = Table(caption=f"step {report['step']}, {len(report['findings'])} findings")
    apart = "engines" in report
    names = (*(["engine"] if apart else []), "component", "tier")
    for heading in (*names, "units", *kinds):
        table.add_column(heading.lower(), justify="left" if heading in names else "right")
    for engine, pool in pools:
        counts = [str(pool["holders"].get(kind, 0)) for kind in kinds]
        place = (*([printable(engine)] if apart else []), pool["component"], pool["tier"])
        table.add_row(*place, f"{pool['units']} {pool['unit']}s", *counts)
    return table


def engine_pools(report: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The pools of a memory report, each with the name of its engine; empty where there is only one."""
    if "engines" not in report:
        return [("", pool) for pool in report["pools"]]
    return [(str(part["engine"]), pool) for part in report["engines"] for pool in part["pools"]]


def heard_tokens(session: SessionView) -> str:
    """The tokens that a listening session has heard of its next turn, and computed; empty for others."""
    if session.state != LISTENING:
        return ""
    return f"{session.tokens_heard} ({session.tokens_ahead} computed)"
