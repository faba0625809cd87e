"""Which messages a chat template shows: none may vanish between a client and the model.

Templates pass over roles that they do not know, some of them only in some places: a system message that is
not the first, a tool's answer without a call. What a template shows depends on the roles and their order, so
it is found out by rendering marks in place of the texts, once for each order of roles. A `developer` message
becomes the system's where the template does not show it as it is, or refuses it; any other message that is
not shown is refused with its place. Used by `chat_template`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["ChatTemplateError", "Message", "MessagesRefused", "ShownRoles"]

Message = Mapping[str, Any]

SHAPES_KEPT = 1024
SHAPE_MESSAGES_MAX = 64
"""Orders of roles that are remembered, and how long they may be; longer ones are rendered each time."""

Roles = tuple[str, ...]

_MARK = re.compile("\ue001[0-9]+\ue001")


class ChatTemplateError(ValueError):
    """A template cannot be used, or refuses the messages that it was given."""


class MessagesRefused(ChatTemplateError):
    """A template refuses the messages that it was given."""


class ShownRoles:
    """What one template shows; `render` is the template itself, and raises `MessagesRefused` for some."""

    def __init__(self, render: Callable[[Sequence[Message]], str]) -> None:
        self._render = render
        self._shapes: dict[Roles, tuple[Roles, int | None]] = {}

    def fitted(self, messages: Sequence[Message], known: int = 0) -> Sequence[Message]:
        """The messages under roles that the template shows; raises for the first that it would leave out.

        The first `known` messages are not the client's: places count from behind them.
        """
        roles = tuple(str(message["role"]) for message in messages)
        shown, lost = self._shape(roles)
        if lost is not None and lost >= known:
            raise ChatTemplateError(
                f"messages[{lost - known}]: the model's chat template leaves out a message of role "
                f"{roles[lost]} here; give it another role or place"
            )
        if shown == roles:
            return messages
        return [{**message, "role": role} for message, role in zip(messages, shown, strict=True)]

    def _shape(self, roles: Roles) -> tuple[Roles, int | None]:
        """The roles to use in place of these, and the place of a message that is not shown under them."""
        known = self._shapes.get(roles)
        if known is not None:
            return known
        found = self._found(roles)
        if len(roles) <= SHAPE_MESSAGES_MAX:
            if len(self._shapes) >= SHAPES_KEPT:
                self._shapes.clear()
            self._shapes[roles] = found
        return found

    def _found(self, roles: Roles) -> tuple[Roles, int | None]:
        lost: int | None = None
        for tried in dict.fromkeys((roles, tuple(_without_developer(roles)))):
            try:
                lost = self._first_lost(tried)
            except MessagesRefused:
                continue  # It says why when it gets the messages themselves.
            if lost is None:
                return tried, None
        return roles, lost

    def _first_lost(self, roles: Roles) -> int | None:
        """The place of the first message that the template does not show."""
        marks = [f"\ue001{place}\ue001" for place in range(len(roles))]
        rendered = self._render(
            [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
        )
        shown = set(_MARK.findall(rendered))
        return next((place for place, mark in enumerate(marks) if mark not in shown), None)


def _without_developer(roles: Roles) -> Sequence[str]:
    return ["system" if role == "developer" else role for role in roles]
