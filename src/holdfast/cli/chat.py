"""`holdfast chat`: talk to a model in the terminal, in this process.

The answer is shown as it comes. Ctrl-C while the model speaks cuts in: what was shown stays part of the
conversation, nothing after it does. Ctrl-C or Ctrl-D at the prompt leaves. Signals never interrupt the engine
itself: they set a flag that is looked at between steps.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from holdfast.cli.options import takes_engine_options
from holdfast.cli.progress import StartProgress
from holdfast.core.errors import Refused
from holdfast.engine.chat_template import ChatTemplateError
from holdfast.engine.engine import Engine, Session, Turn, TurnFailed
from holdfast.engine.options import OptionError
from holdfast.engine.pull import DEFAULT_MODEL, PullError
from holdfast.engine.sampling import Sampling, SamplingError
from holdfast.models.fields import ConfigurationError

__all__ = ["app"]

app = typer.Typer(add_completion=False)

HELP = """\
/rewind N   take back the last N turns (1 if left out)
/fork       go on in a second conversation from here; /fork N returns to conversation N
/memory     who holds the memory
/help       this
/quit       leave (or Ctrl-D)
Ctrl-C      while the model speaks: interrupt it; at the prompt: leave"""

LEAVE = frozenset({"/quit", "/exit"})


@app.command(
    help="Talk to a model in the terminal. Ctrl-C interrupts it; /help lists what else it understands."
)
@takes_engine_options
def chat(
    model: Annotated[
        str, typer.Argument(help="A directory, a .gguf file, or a name.", envvar="HOLDFAST_MODEL")
    ] = DEFAULT_MODEL,
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of an answer.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Share of the probability to draw from.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answers.")] = None,
    engine_options: dict[str, object] | None = None,
) -> None:
    """Load a model and talk."""
    try:
        sampling = Sampling(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
        with StartProgress(model) as progress:
            engine = Engine(model, progress=progress, **(engine_options or {}))
    except OptionError as error:
        raise _refusal(
            f"--{error.option.replace('_', '-')} {str(error).removeprefix(error.option)}"
        ) from error
    except (SamplingError, PullError, ConfigurationError) as error:
        raise _refusal(str(error)) from error
    except KeyboardInterrupt as interrupt:
        raise typer.Exit(130) from interrupt
    with engine:
        Chat(engine, system, sampling).run()


def _refusal(problem: str) -> typer.Exit:
    typer.echo(f"holdfast chat: {' '.join(problem.split())}", err=True)
    return typer.Exit(1)


class Interrupt:
    """Whether Ctrl-C was pressed since the model began to speak."""

    def __init__(self) -> None:
        self.pressed = False

    def press(self, number: int, frame: FrameType | None) -> None:
        """The signal's handler."""
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
    """One conversation after another in a terminal; forks are kept side by side."""

    def __init__(self, engine: Engine, system: str | None, sampling: Sampling) -> None:
        self.engine = engine
        self.sampling = sampling
        self.console = Console(highlight=False)
        self.sessions: list[Session] = [engine.session(system)]
        self.current = 0

    @property
    def session(self) -> Session:
        """The conversation that goes on."""
        return self.sessions[self.current]

    def run(self) -> None:
        """Read, answer, until somebody leaves."""
        self.console.print("[dim]/help lists commands; Ctrl-C interrupts the model[/]")
        while True:
            name = f"{self.current + 1}> " if len(self.sessions) > 1 else "> "
            try:
                line = self.console.input(name, markup=False).strip()
            except (EOFError, KeyboardInterrupt):
                self.console.print()
                return
            if line in LEAVE:
                return
            if line:
                self.obey(line)

    def obey(self, line: str) -> None:
        """A command, or words for the model; what is refused changes nothing."""
        try:
            if line.startswith("/"):
                self.command(line)
            else:
                self.answer(line)
        except (Refused, TurnFailed, SamplingError, ChatTemplateError) as error:
            self.console.print(f"{error}", style="red", markup=False)

    def command(self, line: str) -> None:
        """Carry out a line that begins with a slash."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name not in ("/rewind", "/fork", "/memory", "/help") or (rest and not rest.isdecimal()):
            self.console.print(f"{line} is not understood; /help lists what is", markup=False)
        elif name == "/rewind":
            self.rewind(int(rest or 1))
        elif name == "/fork":
            self.fork(int(rest) if rest else None)
        elif name == "/memory":
            self.console.print(memory_table(self.engine.memory()))
        else:
            self.console.print(HELP, markup=False)

    def rewind(self, turns: int) -> None:
        """Take back the last turns."""
        remaining = self.session.turns - turns
        if remaining < 0:
            self.console.print(f"there are {self.session.turns} turns to take back")
            return
        self.session.rewind(remaining)
        self.console.print(f"[dim]{remaining} turns remain[/]")

    def fork(self, number: int | None) -> None:
        """Go on in a copy of the conversation, or in one that there is."""
        if number is None:
            self.sessions.append(self.session.fork())
            number = len(self.sessions)
        if not 1 <= number <= len(self.sessions):
            self.console.print(f"there are {len(self.sessions)} conversations")
            return
        self.current = number - 1
        self.console.print(f"[dim]conversation {number}, {self.session.turns} turns[/]")

    def answer(self, words: str) -> None:
        """Let the model speak until it is done or interrupted."""
        began = time.monotonic()
        first: float | None = None
        with listening() as interrupt:
            turn = self.session.say(words, self.sampling)
            while not turn.done and not interrupt.pressed:
                self.engine.drive()
                if text := turn.take():
                    first = time.monotonic() if first is None else first
                    self.show(text)
            if interrupt.pressed:
                self.session.interrupt(keep=turn.tokens_shown)
            else:
                self.show(turn.take())
        ended = time.monotonic()
        self.console.print()
        self.console.print(
            summary(turn, (first or ended) - began, ended - began, interrupt.pressed),
            style="dim",
            markup=False,
        )

    def show(self, text: str) -> None:
        """Text of the model, without what would steer the terminal."""
        visible = "".join(letter for letter in text if letter.isprintable() or letter in "\n\t")
        self.console.out(visible, end="", highlight=False)
        self.console.file.flush()


def summary(turn: Turn, first: float, total: float, interrupted: bool) -> str:
    """One line about what a turn cost."""
    usage = turn.usage
    parts = [
        f"computed {usage.computed_tokens}",
        f"cached {usage.cached_tokens}",
        f"first token {first:.2f} s",
    ]
    if usage.completion_tokens > 1 and total > first:
        parts.append(f"{(usage.completion_tokens - 1) / (total - first):.1f} tokens/s")
    if interrupted:
        parts.append(f"interrupted, {usage.completion_tokens} tokens kept")
    return f"[{', '.join(parts)}]"


def memory_table(report: dict[str, object]) -> Table:
    """Units of every pool by the kind of their holder."""
    pools = report["pools"]
    assert isinstance(pools, list)
    kinds = sorted({kind for pool in pools for kind, count in pool["holders"].items() if count})
    table = Table(caption=f"step {report['step']}, {len(_findings(report))} findings")
    for heading in ("component", "tier", "units", *kinds):
        table.add_column(heading.lower(), justify="left" if heading in ("component", "tier") else "right")
    for pool in pools:
        counts = [str(pool["holders"].get(kind, 0)) for kind in kinds]
        table.add_row(pool["component"], pool["tier"], f"{pool['units']} {pool['unit']}s", *counts)
    return table


def _findings(report: dict[str, object]) -> list[object]:
    findings = report["findings"]
    assert isinstance(findings, list)
    return findings
