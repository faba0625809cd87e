"""Answer options: the declaration of a request's answer fields besides sampling.

Constraints, tools and reasoning. The API process turns them into the grammar and the answer specification of
a turn (`server/turn_writer.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from holdfast.engine.constraints.grammar import SOURCE_BYTES_MAX
from holdfast.engine.fields import INTEGER_MAX, Bound, declared
from holdfast.engine.tools.request import TOOLS_MAX
from holdfast.server.dialects.constraints import Constraint

__all__ = ["GRAMMAR", "TEMPLATE_KWARGS", "TOOLS", "AnswerOptions", "Effort"]

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

NESTED_MAX = 72
"""A schema of the grammar's greatest depth, and what wraps it."""
TOOLS_BYTES_MAX = 1 << 20
KWARGS_BYTES_MAX = 16 << 10
KWARGS_DEPTH_MAX = 16
RETURN_SECONDS_MAX = 86_400.0

GRAMMAR = Bound(size=SOURCE_BYTES_MAX, depth=NESTED_MAX, characters=SOURCE_BYTES_MAX)
TOOLS = Bound(entries=TOOLS_MAX, size=TOOLS_BYTES_MAX, depth=NESTED_MAX)
TEMPLATE_KWARGS = Bound(size=KWARGS_BYTES_MAX, depth=KWARGS_DEPTH_MAX)


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """Constraints, tools and reasoning of an answer."""

    constraint: Constraint | None = declared(  # noqa: RUF009
        None, GRAMMAR, "The grammar that the answer must match."
    )
    tools: Sequence[Mapping[str, Any]] | None = declared(
        None, TOOLS, "Functions that the model may call, in OpenAI's form."
    )
    tool_choice: str | Mapping[str, Any] | None = declared(
        None,
        Bound(characters=64, size=4096, depth=8),
        "Whether the model calls tools: auto, none, required, or the name of one function as an object.",
    )
    parallel_tool_calls: bool | None = declared(
        None, None, "Whether an answer may have more than one call; true if left out."
    )
    thinking: bool | None = declared(
        None, None, "Whether the model reasons before it answers, if its chat template can switch it."
    )
    thinking_tokens: int | None = declared(
        None,
        Bound(0, INTEGER_MAX),
        "Maximum number of reasoning tokens; then the end of the reasoning is forced.",
    )
    reasoning_effort: Effort | None = declared(  # noqa: RUF009
        None, None, "How much the model reasons, where its chat template can tell it; none switches it off."
    )
    chat_template_kwargs: Mapping[str, Any] | None = declared(
        None, TEMPLATE_KWARGS, "Variables for the chat template."
    )
    separate_reasoning: bool = declared(True, None, "Separate the reasoning from the text of the answer.")
    stream_reasoning: bool = declared(
        True, None, "Stream the reasoning as it is generated, rather than in one piece."
    )
    keep_reasoning: bool | None = declared(
        None, None, "Whether the session keeps the reasoning of the turn; as the session says if left out."
    )
    expect_return_seconds: float | None = declared(
        None,
        Bound(0.0, RETURN_SECONDS_MAX),
        "Seconds until the client is expected back with a tool's result; a hint for eviction and prefetch.",
    )

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Variables for the chat template: those given, after those that the other options stand for."""
        made: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            made["reasoning_effort"] = self.reasoning_effort
        thinks = False if self.reasoning_effort == "none" and self.thinking is None else self.thinking
        if thinks is not None:
            made |= {"enable_thinking": thinks, "thinking": thinks}
        return {**made, **(self.chat_template_kwargs or {})}
