"""The formats of a model's answers: named by the options, or found in its checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from holdfast.engine.tools.choose import Chosen, choose
from holdfast.engine.tools.formats import (
    CALL_FORMAT_ALIASES,
    CALL_FORMATS,
    NO_CALLS,
    REASONING_FORMAT_ALIASES,
    REASONING_FORMATS,
    RESPONSE_TEMPLATE,
    call_format,
)
from holdfast.engine.tools.response_template import ResponseTemplate

__all__ = ["AUTO", "NONE", "REASONING_PARSERS", "TOOL_PARSERS", "choose_formats"]

AUTO, NONE = "auto", NO_CALLS
TOOL_PARSERS = (AUTO, NONE, *sorted([*CALL_FORMATS, *CALL_FORMAT_ALIASES, RESPONSE_TEMPLATE]))
REASONING_PARSERS = (AUTO, NONE, *sorted([*REASONING_FORMATS, *REASONING_FORMAT_ALIASES]))


def choose_formats(
    tool_parser: str,
    reasoning_parser: str,
    template: str | None,
    tokens: Collection[str],
    config: Mapping[str, Any],
    own: ResponseTemplate | None = None,
) -> Chosen:
    """The formats by the values of the two options; see `choose` for the rest.

    A checkpoint whose format has no parser is read by its `own` description of answers. Raises ValueError if
    the option asks for one, and there is none.
    """
    if tool_parser == RESPONSE_TEMPLATE and own is None:
        raise ValueError("the checkpoint has no response_template that can be used")
    found = choose(template, tokens, config)
    calls, reasoning = found.calls, found.reasoning
    if calls is None and own is not None and own.has_parts:
        calls = RESPONSE_TEMPLATE
    if tool_parser != AUTO:
        calls = CALL_FORMAT_ALIASES.get(tool_parser, tool_parser)
    if reasoning_parser != AUTO:
        named = REASONING_FORMAT_ALIASES.get(reasoning_parser, reasoning_parser)
        reasoning = None if reasoning_parser == NONE else named
    reasons = calls is not None and call_format(calls).reasons
    return Chosen(calls, None if reasons else reasoning)
