"""A call to one of several engines: the session that it is about, and a callback that is due once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from holdfast.server.link import wire

__all__ = ["Once", "session_of"]


class Once:
    """Calls something once."""

    __slots__ = ("_act",)

    def __init__(self, act: Callable[[], None] | None) -> None:
        self._act = act

    def __call__(self) -> None:
        act, self._act = self._act, None
        if act is not None:
            act()


def session_of(command: wire.Command) -> str:
    """The session that a command is about."""
    if isinstance(command, wire.Ask):
        assert command.name is not None, f"{command.what} is asked of a session"
        return command.name
    with suppress(AttributeError):
        return str(command.session)  # type: ignore[union-attr]
    raise AssertionError("not a command of an API process")
