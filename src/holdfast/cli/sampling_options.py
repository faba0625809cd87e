"""The command line's table over the declared sampling fields: which it has, and its own defaults."""

from __future__ import annotations

from holdfast.engine.chat_sampling import CHAT_DEFAULTS, SUGGESTIONS
from holdfast.engine.fields import Declared, declarations
from holdfast.engine.sampling import Sampling

__all__ = ["CHAT_DEFAULTS", "SAMPLING_FIELDS", "SUGGESTIONS"]

SAMPLING_FIELDS: tuple[Declared, ...] = tuple(
    declarations(Sampling)[name] for name in ("max_tokens", "temperature", "top_p", "seed")
)
"""The fields that have an option; the command has no options for the others."""
