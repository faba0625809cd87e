"""The formats of a model's answers: named by the options, or found in its checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from holdfast.engine.tools.choose import Chosen, choose
from holdfast.engine.tools.formats import (
    CALL_FORMAT_ALIASES,
    CALL_FORMATS,
    REASONING_FORMAT_ALIASES,
    REASONING_FORMATS,
)

__all__ = ["AUTO", "NONE", "REASONING_PARSERS", "TOOL_PARSERS", "choose_formats"]

AUTO, NONE = "auto", "none"
TOOL_PARSERS = (AUTO, NONE, *sorted([*CALL_FORMATS, *CALL_FORMAT_ALIASES]))
REASONING_PARSERS = (AUTO, NONE, *sorted([*REASONING_FORMATS, *REASONING_FORMAT_ALIASES]))


def choose_formats(
    tool_parser: str,
    reasoning_parser: str,
    template: str | None,
    tokens: Collection[str],
    config: Mapping[str, Any],
) -> Chosen:
    """The formats by the values of the two options; see `choose` for the rest."""
    found = choose(template, tokens, config)
    calls, reasoning = found.calls, found.reasoning
    if tool_parser != AUTO:
        calls = None if tool_parser == NONE else CALL_FORMAT_ALIASES.get(tool_parser, tool_parser)
    if reasoning_parser != AUTO:
        named = REASONING_FORMAT_ALIASES.get(reasoning_parser, reasoning_parser)
        reasoning = None if reasoning_parser == NONE else named
    reasons = calls is not None and CALL_FORMATS[calls].reasons
    return Chosen(calls, None if reasons else reasoning)
