"""Checks that a chat template renders every message: none may be dropped silently.

Templates skip roles that they do not know, some only in some positions: a system message that is not the
first, a tool result without a call. What a template renders depends on the sequence of roles and calls, so it
is probed by rendering markers in place of the texts, once per sequence. A `developer` message becomes a
`system` message where the template skips or refuses it; any other skipped message is rejected with its index.
The text beside tool calls may be left out: some templates render the calls alone. Used by `chat_template`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["ChatTemplateError", "Message", "MessagesRefused", "ShownRoles"]

Message = Mapping[str, Any]

SHAPES_KEPT = 1024
SHAPE_MESSAGES_MAX = 64
"""Cached role sequences, and their longest; longer ones are probed each time."""

Roles = tuple[str, ...]
Shape = tuple[tuple[str, int], ...]
"""The role of each message, and the number of its tool calls."""

_MARK = re.compile("\ue001[0-9]+\ue001")


class ChatTemplateError(ValueError):
    """A template is unusable, or refuses its messages."""


class MessagesRefused(ChatTemplateError):
    """A template refuses its messages."""


class ShownRoles:
    """Which messages one template renders; `render` is the template and may raise `MessagesRefused`."""

    def __init__(self, render: Callable[..., str]) -> None:
        self._render = render
        self._shapes: dict[Shape, tuple[Roles, int | None]] = {}

    def fitted(self, messages: Sequence[Message], known: int = 0, **variables: Any) -> Sequence[Message]:
        """The messages with roles that the template renders; raises for the first that it would skip.

        The first `known` messages are not the client's: indices in errors count from behind them.
        """
        roles = tuple(str(message["role"]) for message in messages)
        shown, lost = self._known_shape(messages, roles, variables)
        if lost is not None and lost >= known:
            raise ChatTemplateError(
                f"messages[{lost - known}]: the model's chat template skips a message of role "
                f"{roles[lost]} here; give it another role or position"
            )
        return messages if shown == roles else _with_roles(messages, shown)

    def _known_shape(
        self, messages: Sequence[Message], roles: Roles, variables: Mapping[str, Any]
    ) -> tuple[Roles, int | None]:
        """The roles to use in place of these, and the index of a message that is skipped even then."""
        counts = (len(message.get("tool_calls") or ()) for message in messages)
        shape = tuple(zip(roles, counts, strict=True))
        known = self._shapes.get(shape)
        if known is not None:
            return known
        found = self._found(messages, roles, variables)
        if len(shape) <= SHAPE_MESSAGES_MAX:
            if len(self._shapes) >= SHAPES_KEPT:
                self._shapes.clear()
            self._shapes[shape] = found
        return found

    def _found(
        self, messages: Sequence[Message], roles: Roles, variables: Mapping[str, Any]
    ) -> tuple[Roles, int | None]:
        lost: int | None = None
        for tried in dict.fromkeys((roles, tuple(_without_developer(roles)))):
            try:
                lost = self._first_lost(_with_roles(messages, tried), variables)
            except MessagesRefused:
                continue  # The render of the actual messages raises with the reason.
            if lost is None:
                return tried, None
        return roles, lost

    def _first_lost(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> int | None:
        """The index of the first message that the template skips."""
        marks = [f"\ue001{place}\ue001" for place in range(len(messages))]
        rendered = self._render(
            [{**message, "content": mark} for message, mark in zip(messages, marks, strict=True)], **variables
        )
        shown = set(_MARK.findall(rendered))
        return next(
            (
                place
                for place, mark in enumerate(marks)
                if mark not in shown and not messages[place].get("tool_calls")
            ),
            None,
        )


def _with_roles(messages: Sequence[Message], roles: Roles) -> Sequence[Message]:
    return [{**message, "role": role} for message, role in zip(messages, roles, strict=True)]


def _without_developer(roles: Roles) -> Sequence[str]:
    return ["system" if role == "developer" else role for role in roles]
