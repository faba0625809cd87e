"""Texts for the model that repeats what it is told."""

LONG = "x" * 4000
"""A text that takes long enough to repeat to be cut."""
CALL = '<tool_call>{"name": "look", "arguments": {"at": "me"}}</tool_call>'
"""A text that is a call when it is repeated."""
