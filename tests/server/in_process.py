"""The engine's side of the boundary in the test's own process: commands in, reports out, no socket."""

from holdfast.engine.echo import open_echo
from holdfast.engine.options import make_options
from holdfast.engine.start.assembly import Clock
from holdfast.server.link.commands import EngineCommands
from holdfast.server.link.results import Outbox

__all__ = ["echo_commands"]


SMALL = {"kv_tokens": 1 << 14, "window_tokens": 1 << 14, "state_slots": 64}
"""Pools that a strict audit counts quickly."""


def echo_commands(model: str = "echo", clock: Clock | None = None, **options: object) -> EngineCommands:
    """The commands of an echo engine; its pools are small if no size is given."""
    outbox = Outbox()
    options = options if "kv_tokens" in options else SMALL | options
    timed = {} if clock is None else {"clock": clock}
    return EngineCommands(open_echo(model, make_options(**options), outbox, **timed), outbox)
