"""The model that an engine serves, and how the engine was set up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.engine.grammars import Grammars
from holdfast.engine.options import EngineOptions, OptionError
from holdfast.engine.start.memory_plan import MemoryPlan
from holdfast.engine.start.tuning import Tuning
from holdfast.engine.text.chat_renderer import ChatRenderer
from holdfast.engine.text.tokenizer import Tokenizer
from holdfast.engine.tools.choose import Chosen
from holdfast.engine.tools.formats import call_format
from holdfast.engine.tools.options import AUTO, NONE, choose_formats
from holdfast.models.generation import GenerationDefaults
from holdfast.models.model import ModelDescription

__all__ = ["AnswerSetup", "EngineSetup", "formats_of"]


def formats_of(options: EngineOptions, tokenizer: Tokenizer, config: Mapping[str, Any]) -> Chosen:
    """How a model writes tool calls and marks its reasoning: by the options, or as its checkpoint shows."""
    template = None if tokenizer.template is None else tokenizer.template.source
    parsers = options.tool_parser, options.reasoning_parser
    tokens = tokenizer.added_tokens.values()
    try:
        chosen = choose_formats(*parsers, template, tokens, config, tokenizer.response_template)
    except ValueError as error:
        raise OptionError("tool_parser", f"{options.tool_parser} cannot be used: {error}") from error
    if options.tool_parser not in (AUTO, NONE):
        _require_effect(chosen, tokenizer, options.tool_parser)
    return chosen


def _require_effect(chosen: Chosen, tokenizer: Tokenizer, stated: str) -> None:
    """Refuse a format of calls that is not the one that the model would be told to write."""
    if chosen.calls is None or tokenizer.template is None or call_format(chosen.calls).reasons:
        return
    chat = ChatRenderer(
        tokenizer.template,
        list(tokenizer.added_tokens.values()),
        chosen.calls,
        tokenizer.response_template,
    )
    if chat.call_format != chosen.calls:
        told = f"its chat template has no tools, so the model is told to write {chat.call_format} calls"
        raise OptionError("tool_parser", f"{stated} cannot be used with this model: {told}")


@dataclass(frozen=True, slots=True)
class AnswerSetup:
    """What answers may be: the formats of tool calls and reasoning, and the compiler of grammars."""

    formats: Chosen
    grammars: Grammars


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """Everything that is chosen at start-up: model, tokenizer, sampling defaults, options, memory pools.

    The options have the values in use, derived ones included. `formats` are those of the model's tool calls
    and reasoning; `grammars` compiles what turns must match.
    """

    model: ModelDescription
    tokenizer: Tokenizer
    defaults: GenerationDefaults
    options: EngineOptions
    memory_plan: MemoryPlan
    formats: Chosen
    grammars: Grammars

    @property
    def tuning(self) -> Tuning:
        """The sizes of pages and steps."""
        return self.memory_plan.tuning

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The tokens that end a turn: the checkpoint's, or else the tokenizer's."""
        return self.defaults.eos_tokens or self.tokenizer.eos_tokens
