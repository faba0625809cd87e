"""How a command says that it cannot go on: one line on standard error, and a status that is not 0.

Used by every command that can be given something wrong. What a server said is put into words by `remote`,
and a line that cannot be parsed by `misread`.
"""

from __future__ import annotations

import typer

__all__ = ["PROGRAM", "UNUSABLE", "WRONG", "misread", "refusal"]

PROGRAM = "holdfast"

UNUSABLE = 1
"""The status of what was meant well and cannot be done, as with a model whose files cannot be read."""

WRONG = 2
"""The status of a line that cannot be meant, and of a server that could not be started as it was asked to."""


def refusal(command: str, problem: str, status: int = UNUSABLE) -> typer.Exit:
    """Say what is wrong, in one line; raise what is returned."""
    typer.echo(f"{called(command)}: {' '.join(problem.split())}", err=True)
    return typer.Exit(status)


def misread(command: str, error: typer.TyperException) -> typer.Exit:
    """Say what the parser does not understand, and where to learn more; raise what is returned.

    An error without words stands for help that has been shown.
    """
    problem = error.format_message().rstrip(".")
    if not problem:
        return typer.Exit(error.exit_code)
    return refusal(command, f"{problem}; see `{called(command)} --help`", error.exit_code)


def called(command: str) -> str:
    """How a command is called; without a name it is the program itself."""
    return f"{PROGRAM} {command}".rstrip()
