"""Texts for the model that repeats what it is told, and the answers of the tool `look`."""

import json

LONG = "x" * 4000
"""A text that takes long enough to repeat to be cut."""


def calling(at: str) -> str:
    """A text that is a call when it is repeated, in the very form that a constraint on calls forces."""
    return f'<tool_call>\n{{"name": "look", "arguments": {json.dumps({"at": at})}}}\n</tool_call>'


CALL = calling("me")
TWICE = calling("twice")
"""A call whose result is a call: two rounds."""
BOTH = f"{calling('left')}\n{calling('right')}"
"""Two calls of one answer."""
SEEN = "seen"


def look(at: str) -> str:
    """What the tool answers."""
    return CALL if at == "twice" else SEEN
