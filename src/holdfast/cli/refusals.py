"""Errors of a command: one line on standard error, and an exit status that is not 0.

`refusal` is for all commands, `misread` for parse errors; `remote` has the errors of servers.
"""

from __future__ import annotations

import typer

__all__ = ["PROGRAM", "UNUSABLE", "WRONG", "misread", "refusal"]

PROGRAM = "holdfast"

UNUSABLE = 1
"""The status of a valid command that failed, such as one whose model files cannot be read."""

WRONG = 2
"""The status of invalid arguments, and of a server that could not start with its options."""


def refusal(command: str, problem: str, status: int = UNUSABLE) -> typer.Exit:
    """Print one line about an error; raise the returned exception."""
    typer.echo(f"{called(command)}: {' '.join(problem.split())}", err=True)
    return typer.Exit(status)


def misread(command: str, error: typer.TyperException) -> typer.Exit:
    """Print a parse error and where the help is; raise the returned exception.

    An error without a message means that the help was shown.
    """
    problem = error.format_message().rstrip(".")
    if not problem:
        return typer.Exit(error.exit_code)
    return refusal(command, f"{problem}; see `{called(command)} --help`", error.exit_code)


def called(command: str) -> str:
    """The name of a command with the program's; of the program itself without one."""
    return f"{PROGRAM} {command}".rstrip()
