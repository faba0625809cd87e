"""The `holdfast` command: a table of sub-commands, each in a module of its own.

A module is imported only when its command runs, so `holdfast --help`, `holdfast sim` and `holdfast bench
core` start without torch. Each module has a `typer.Typer` named `app`; adding a command is one line in
COMMANDS. For shell completion the named command replaces its entry, so that its options are completed. A
parse error is printed as one line. Called by the console script and by `python -m holdfast.cli`.
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
    "holdfast chat                        chat with a small model (downloaded once)\n"
    "holdfast serve                       serve it on http://127.0.0.1:8000\n"
    "holdfast chat --url 127.0.0.1:8000   chat through that server\n"
    "holdfast top                         watch it\n\n"
    "holdfast COMMAND --help explains a command."
)

COMPLETION_VARIABLE = "_HOLDFAST_COMPLETE"
"""Set by the completion scripts that `holdfast --show-completion` prints."""


class Command(NamedTuple):
    """One sub-command: its name, the module with its `app`, and its line in the help."""

    name: str
    module: str
    summary: str


COMMANDS: tuple[Command, ...] = (
    Command("serve", "holdfast.cli.serve", "Serve a model over HTTP."),
    Command("engine", "holdfast.cli.engine", "Run an engine alone, for servers that connect to it."),
    Command("link-keys", "holdfast.cli.link_keys", "Write a key file for links between servers and engines."),
    Command(
        "chat", "holdfast.cli.chat", "Chat with a model in the terminal, in this process or through a server."
    ),
    Command("top", "holdfast.cli.top", "Watch a server: sessions, turns and memory by holder."),
    Command("sessions", "holdfast.cli.sessions", "Inspect the sessions of a journal."),
    Command("cluster", "holdfast.cli.cluster", "Look at engines, drain them, and move sessions."),
    Command("pull", "holdfast.cli.pull", "Download a model into the cache."),
    Command("bench", "holdfast.cli.bench", "Measure, and show each figure beside its baseline."),
    Command("sim", "holdfast.cli.sim", "Simulate a server with injected faults, on the real core."),
    Command("sim-cluster", "holdfast.cli.sim_cluster", "Simulate a cluster with injected faults."),
    Command("version", "holdfast.cli.version", "Print the version."),
)

# The arguments after the name, `--help` included, are passed on to the sub-command unparsed.
FORWARD_UNREAD: dict[str, object] = {
    "allow_extra_args": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
    "ignore_unknown_options": True,
}


def build(commands: tuple[Command, ...] = COMMANDS) -> typer.Typer:
    """The application with one forwarding entry for each of `commands`; imports none of them."""
    assert len({command.name for command in commands}) == len(commands), "two commands share a name"
    app = typer.Typer(
        name=PROGRAM,
        help=HELP,
        no_args_is_help=True,
    )
    # Without a callback an application of one command would be that command.
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
    """The name of the command in the arguments, with its sub-command if it has any."""
    group = get_command(application)
    below = group.commands if isinstance(group, TyperGroup) else {}
    return " ".join([command.name, *(name for name in arguments[:1] if name in below)])


def _no_common_options() -> None:
    """There are no options in front of the sub-command."""


def completing(line: str) -> TyperGroup:
    """The application for the completion of `line`: the named command with its own options."""
    group = get_command(build())
    assert isinstance(group, TyperGroup)
    words = line.split()
    for command in COMMANDS:
        if command.name in words:
            group.commands[command.name] = get_command(import_module(command.module).app)
    return group


def main() -> None:
    """Run the sub-command in the process arguments; always raises SystemExit."""
    if COMPLETION_VARIABLE in os.environ:
        # Bash leaves the line in the first of these, other shells in the second.
        line = " ".join(os.environ.get(name, "") for name in ("COMP_WORDS", "_TYPER_COMPLETE_ARGS"))
        completing(line)(prog_name=PROGRAM)
    try:
        status = build()(prog_name=PROGRAM, standalone_mode=False)
    except typer.TyperException as error:
        status = misread("", error).exit_code
    except typer.Abort:
        status = refusal("", "aborted").exit_code
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        status = refusal("", f"{error.strerror}: {error.filename or 'standard output'}").exit_code
    sys.exit(status)
