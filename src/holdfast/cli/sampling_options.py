"""The command line's table over the declared sampling fields: which it has, and its own defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.engine.fields import Declared, declarations
from holdfast.engine.sampling import Sampling

__all__ = ["CHAT_DEFAULTS", "SAMPLING_FIELDS", "SUGGESTIONS"]

SAMPLING_FIELDS: tuple[Declared, ...] = tuple(
    declarations(Sampling)[name] for name in ("max_tokens", "temperature", "top_p", "seed")
)
"""The fields that have an option; the command has no options for the others."""

CHAT_DEFAULTS: Mapping[str, Any] = {"temperature": 0.2, "top_p": 0.9}
"""Defaults of `holdfast chat` where neither the user nor the checkpoint says anything, as the makers of
SmolLM2 recommend for it. Servers sample such requests plainly, as other servers do."""

SUGGESTIONS = ("temperature", "top_p", "top_k", "min_p")
"""A checkpoint that suggests any of these is sampled as it suggests."""
