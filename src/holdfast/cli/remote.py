"""Errors of servers in the commands that talk to one, with what to do next."""

from __future__ import annotations

import typer

from holdfast.cli.refusals import WRONG, refusal
from holdfast.client.errors import (
    BadArgument,
    ConnectionFailed,
    Forbidden,
    HoldfastError,
    Unauthorized,
    Unavailable,
)

__all__ = ["server_refusal"]

NEXT: tuple[tuple[type[HoldfastError], str], ...] = (
    (ConnectionFailed, "is a server running there? `holdfast serve` starts one, --url names another"),
    (Unauthorized, "give its key with --api-key or HOLDFAST_API_KEY"),
    (Forbidden, "give another key with --api-key or HOLDFAST_API_KEY"),
    (Unavailable, "try again in a moment"),
)
"""What to do next, by kind of error."""


def server_refusal(command: str, error: HoldfastError) -> typer.Exit:
    """Print an error of a server and what to do next; raise the returned exception."""
    advice = [words for kind, words in NEXT if isinstance(error, kind)]
    status = WRONG if isinstance(error, BadArgument) else 1
    return refusal(command, "; ".join([str(error), *advice]), status)
