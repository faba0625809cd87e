"""How a command says that it cannot go on: one line on standard error, and a status that is not 0.

Used by every command that can be given something wrong. What a server said is put into words by `remote`.
"""

from __future__ import annotations

import typer

__all__ = ["refusal"]


def refusal(command: str, problem: str, status: int = 1) -> typer.Exit:
    """Say what is wrong, in one line; raise what is returned."""
    typer.echo(f"holdfast {command}: {' '.join(problem.split())}", err=True)
    return typer.Exit(status)
