"""Texts for the model that repeats what it is told."""

LONG = "x" * 4000
"""A text that takes long enough to repeat to be cut."""
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "me"}}\n</tool_call>'
"""A text that is a call when it is repeated, in the very form that a constraint on calls forces."""
