"""Names of responses, of their items and of conversations.

A response is a turn on a hidden session; its id holds the name of the session and that of the turn, so that
it can be found again after a restart. An item's id holds the id of the response that it belongs to.

    resp_ r0123456789abcdef 0123456789abcdef    a response: session, turn
    msg_  r0123456789abcdef 0123456789abcdef    its output; i3 after it is the fourth item of its input,
                                                b2 the second message of its stream
    conv_ c0123456789abcdef                     a conversation: the session that describes it
"""

from __future__ import annotations

import re
import secrets
from typing import NamedTuple

__all__ = [
    "Place",
    "conversation_key",
    "conversation_of",
    "item_place",
    "kept_item_id",
    "new_key",
    "new_turn",
    "response_of",
]

SESSION = "r"
CONVERSATION = "c"
UNSTORED = "n"
"""The first letter of a session's key: of responses, of a conversation, of a response that is not stored."""

_PLACE = r"(r[0-9a-f]{16})([0-9a-f]{16})"
_RESPONSE = re.compile(f"resp_{_PLACE}")
_ITEM = re.compile(rf"[a-z]{{1,8}}_{_PLACE}(?:i?[0-9]{{1,6}}|(?P<part>b[0-9]{{1,6}}))?")
_CONVERSATION = re.compile(r"conv_(c[0-9a-f]{16})")


class Place(NamedTuple):
    """A turn of a hidden session: the key of the session, and the turn's name."""

    session: str
    turn: str

    @property
    def key(self) -> str:
        """Both, as ids hold them."""
        return self.session + self.turn

    @property
    def response_id(self) -> str:
        """The id of the response that is this turn."""
        return f"resp_{self.key}"


def new_key(kind: str = SESSION) -> str:
    """The key of a new hidden session."""
    return kind + secrets.token_hex(8)


def new_turn() -> str:
    """The name of a new turn."""
    return secrets.token_hex(8)


def response_of(response_id: str) -> Place | None:
    """The turn that a response's id stands for; None if it is not an id of a stored response."""
    found = _RESPONSE.fullmatch(response_id)
    return None if found is None else Place(found[1], found[2])


def item_place(item_id: str) -> Place | None:
    """The turn that an item belongs to; None if the id does not say."""
    found = _ITEM.fullmatch(item_id)
    return None if found is None else Place(found[1], found[2])


def kept_item_id(item_id: str) -> str:
    """The id under which an item is kept.

    A stream has a message of its own for text that follows a call. What is kept of a response has one
    message, with all of its text, and one item of reasoning; later ones of a stream are parts of these.
    """
    found = _ITEM.fullmatch(item_id)
    return item_id if found is None or found["part"] is None else item_id[: found.start("part")]


def conversation_of(conversation_id: str) -> str | None:
    """The key of a conversation's session; None if it is not an id of a conversation."""
    found = _CONVERSATION.fullmatch(conversation_id)
    return None if found is None else found[1]


def conversation_key(key: str) -> str:
    """The id of the conversation that a session describes."""
    return f"conv_{key}"
