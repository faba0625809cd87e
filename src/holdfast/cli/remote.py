"""What commands that talk to a server say when it does not do what they ask, and what to do about it."""

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
"""What to do next about a kind of error; the others say it themselves."""


def server_refusal(command: str, error: HoldfastError) -> typer.Exit:
    """Say what went wrong at a server, and what to do next; raise what is returned."""
    advice = [words for kind, words in NEXT if isinstance(error, kind)]
    status = WRONG if isinstance(error, BadArgument) else 1
    return refusal(command, "; ".join([str(error), *advice]), status)
