"""The `holdfast` command: a table of sub-commands, each in a module of its own.

Owns the names of the sub-commands and nothing of what they do. A module is imported only when its command
runs, so `holdfast --help`, `holdfast sim` and `holdfast bench core` start without torch. Each module exposes
a `typer.Typer` named `app`; adding a command is one line in COMMANDS. While a shell completes a line, the
command that the line names takes the place of its entry, so that its own options are known. A line that
cannot be parsed is refused in one line. Called by the console script and by `python -m holdfast.cli`.
"""

import errno
import os
import sys
from importlib import import_module
from typing import NamedTuple

import typer
from typer.core import TyperGroup
from typer.main import get_command

from holdfast.cli.refusals import PROGRAM, misread, refusal

__all__ = ["COMMANDS", "Command", "build", "main"]

HELP = (
    "An LLM inference server for long-lived streaming sessions.\n\n"
    "\b\n"
    "holdfast chat                        talk to a small model, fetched once\n"
    "holdfast serve                       serve it on http://127.0.0.1:8000\n"
    "holdfast chat --url 127.0.0.1:8000   talk to that server\n"
    "holdfast top                         watch it\n\n"
    "holdfast COMMAND --help explains a command."
)

COMPLETION_VARIABLE = "_HOLDFAST_COMPLETE"
"""Set by the shells' completion scripts, which `holdfast --show-completion` prints."""


class Command(NamedTuple):
    """One sub-command: its name, the module whose `app` carries it out, and its line in the help."""

    name: str
    module: str
    summary: str


COMMANDS: tuple[Command, ...] = (
    Command("serve", "holdfast.cli.serve", "Serve a model over HTTP."),
    Command("chat", "holdfast.cli.chat", "Talk to a model in the terminal, here or at a server."),
    Command("top", "holdfast.cli.top", "Watch a server: sessions, turns, who holds the memory."),
    Command("sessions", "holdfast.cli.sessions", "Look into a journal: sessions that outlive a server."),
    Command("pull", "holdfast.cli.pull", "Fetch a model into the cache."),
    Command("bench", "holdfast.cli.bench", "Measure, and show each figure beside its baseline."),
    Command("sim", "holdfast.cli.sim", "Simulate a server that is being broken, on the real core."),
    Command("version", "holdfast.cli.version", "Print the version."),
)

# The arguments after the name belong to the sub-command, `--help` included: they are passed on unread.
FORWARD_UNREAD: dict[str, object] = {
    "allow_extra_args": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
    "ignore_unknown_options": True,
}


def build(commands: tuple[Command, ...] = COMMANDS) -> typer.Typer:
    """Return the application with one forwarding entry for each of `commands`; imports none of them."""
    assert len({command.name for command in commands}) == len(commands), "two commands share a name"
    app = typer.Typer(
        name=PROGRAM,
        help=HELP,
        no_args_is_help=True,
    )
    # Without a callback an application of a single command would take that command's place.
    app.callback()(_no_common_options)
    for command in commands:
        _add(app, command)
    return app


def _add(app: typer.Typer, command: Command) -> None:
    @app.command(command.name, help=command.summary, context_settings=FORWARD_UNREAD)
    def forward(context: typer.Context) -> None:
        application = import_module(command.module).app
        try:
            status = application(
                args=context.args, prog_name=f"{PROGRAM} {command.name}", standalone_mode=False
            )
        except typer.TyperException as error:
            raise misread(_named(command, application, context.args), error) from error
        raise typer.Exit(status or 0)


def _named(command: Command, application: typer.Typer, arguments: list[str]) -> str:
    """The command that a line names, with the one below it where it has some."""
    group = get_command(application)
    below = group.commands if isinstance(group, TyperGroup) else {}
    return " ".join([command.name, *(name for name in arguments[:1] if name in below)])


def _no_common_options() -> None:
    """There are no options in front of the sub-command."""


def completing(line: str) -> TyperGroup:
    """The application for a shell that completes `line`: the command that it names brings its options."""
    group = get_command(build())
    assert isinstance(group, TyperGroup)
    words = line.split()
    for command in COMMANDS:
        if command.name in words:
            group.commands[command.name] = get_command(import_module(command.module).app)
    return group


def main() -> None:
    """Run the sub-command that the process arguments name; always leaves by SystemExit."""
    if COMPLETION_VARIABLE in os.environ:
        # Bash leaves the line in the first of these, other shells in the second.
        line = " ".join(os.environ.get(name, "") for name in ("COMP_WORDS", "_TYPER_COMPLETE_ARGS"))
        completing(line)(prog_name=PROGRAM)
    try:
        status = build()(prog_name=PROGRAM, standalone_mode=False)
    except typer.TyperException as error:
        status = misread("", error).exit_code
    except typer.Abort:
        status = refusal("", "ended before it was done").exit_code
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        status = refusal("", f"{error.strerror}: {error.filename or 'where its output goes'}").exit_code
    sys.exit(status)
