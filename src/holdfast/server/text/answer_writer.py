"""Answer specifications, built in the text process: the fields of jobs and of the wire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.engine.answer_builder import AnswerBuilder, AnswerRefused, Asked
from holdfast.engine.constraints.errors import Fault, GrammarError
from holdfast.engine.constraints.grammar import Grammar, Kind
from holdfast.engine.tools.answer import AnswerSpec
from holdfast.engine.tools.request import Tools, read_tools
from holdfast.server.link import wire
from holdfast.server.text import jobs

__all__ = ["CODES", "read_asked_tools", "written"]

CODES: Mapping[Fault, str] = {
    Fault.INVALID: "invalid_grammar",
    Fault.UNSUPPORTED: "unsupported_grammar",
    Fault.TOO_LARGE: "grammar_too_large",
}


def read_asked_tools(asks: jobs.Asks) -> Tools:
    """The tools of a turn; raises `ToolsRefused` with the field's name."""
    return read_tools(asks.tools, asks.tool_choice, asks.parallel_tool_calls)


def written(builder: AnswerBuilder, prompt: Sequence[int], asks: jobs.Asks, tools: Tools) -> jobs.Written:
    """The prompt's tokens, and the grammar and the specification of its answer; raises `AnswerRefused`."""
    grammar, field = None, ""
    if asks.constraint is not None:
        grammar, field = _constraint(builder, asks.constraint), asks.constraint.field
    asked = Asked(tools, grammar, field, asks.separate_reasoning, asks.thinking_tokens, asks.reads)
    built = builder.build(prompt, asked)
    return jobs.Written(
        list(prompt),
        None if built.grammar is None else wire.GrammarFields(built.grammar.kind.value, built.grammar.source),
        None if built.answer is None else _answer_fields(built.answer),
    )


def _constraint(builder: AnswerBuilder, asked: jobs.ConstraintFields) -> Grammar:
    try:
        return Grammar.of(Kind(asked.kind), asked.value, control_tokens=builder.control_tokens)
    except GrammarError as error:
        raise AnswerRefused(error, asked.field) from error


def _answer_fields(spec: AnswerSpec) -> wire.AnswerFields:
    return wire.AnswerFields(
        calls=spec.calls,
        reasoning=spec.reasoning,
        reasoning_is_open=spec.reasoning_is_open,
        thinking_tokens=spec.thinking_tokens,
        tools={
            tool: {name: list(types) for name, types in parameters.items()}
            for tool, parameters in spec.tools.items()
        },
        prompt_end=spec.prompt_end,
    )
