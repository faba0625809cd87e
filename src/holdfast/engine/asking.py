"""What a caller in this process asks of a turn's answer: tools, a grammar, a thinking budget.

`ask` makes them into the grammar and the `AnswerSpec` of a turn; behind the server the text process does the
same for requests. Used by `engine`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from holdfast.engine.constraints import lark
from holdfast.engine.constraints.grammar import Form, Grammar, Kind
from holdfast.engine.constraints.vocabulary import control_tokens
from holdfast.engine.setup import EngineSetup
from holdfast.engine.tools.answer import AnswerSpec
from holdfast.engine.tools.constraint import Reasons, tool_grammar
from holdfast.engine.tools.formats import CALL_FORMATS, reasoning_format
from holdfast.engine.tools.plain_rendering import PLAIN_FORMAT
from holdfast.engine.tools.request import Mode, Tools

__all__ = ["Asked", "ask", "grammar_of"]

TAIL_TOKENS = 32
"""Tokens at the end of a prompt in which the marker of reasoning is looked for."""


class Asked(NamedTuple):
    """The grammar of a turn, and how its answer is read."""

    grammar: Grammar | None = None
    answer: AnswerSpec | None = None


def grammar_of(asked: Grammar | Mapping[str, Any] | None) -> Grammar | None:
    """A grammar, or that of a JSON schema; raises `GrammarError` for a schema that is none."""
    if asked is None or isinstance(asked, Grammar):
        return asked
    return Grammar.of(Kind.JSON_SCHEMA, dict(asked))


def ask(
    setup: EngineSetup,
    prompt: Sequence[int],
    tools: Tools,
    grammar: Grammar | None,
    thinking_tokens: int | None,
    turn_id: str,
) -> Asked:
    """What a turn after this prompt is asked for. The grammar applies after the reasoning, not to calls."""
    reasons = _reasons(setup, prompt)
    shown = setup.formats.calls
    channels = shown is not None and CALL_FORMATS[shown].reasons
    calls = _call_format(setup) if tools.callable_tools or channels else None
    spec = None
    if calls is not None or setup.formats.reasoning is not None:
        types = tools.for_parser().types if tools.callable_tools else {}
        is_open = reasons is not None and reasons.is_open
        spec = AnswerSpec(calls, setup.formats.reasoning, is_open, thinking_tokens, types, turn_id)
    must_call = bool(tools.callable_tools) and tools.mode in (Mode.REQUIRED, Mode.NAMED)
    constrains = must_call or any(tool.strict for tool in tools.callable_tools) or not tools.parallel
    if grammar is not None and must_call:
        raise ValueError("a grammar and a required tool call exclude each other")
    if grammar is not None and (spec is None or not (calls or reasons)):
        return Asked(grammar, spec)
    if grammar is None and not (constrains and tools.callable_tools):
        return Asked(None, spec)
    final = "" if grammar is None else _embedded(grammar)
    source = tool_grammar(calls or PLAIN_FORMAT, tools, control_tokens(setup.tokenizer), reasons, final)
    assert source is not None, "there are calls or a grammar"
    return Asked(Grammar(Kind.LARK, source), spec)


def _call_format(setup: EngineSetup) -> str:
    """How calls are written: as the template tells the model."""
    named = setup.formats.calls
    if setup.tokenizer.template is None or (named is not None and CALL_FORMATS[named].reasons):
        return PLAIN_FORMAT if named is None else named
    return setup.tokenizer.chat.call_format


def _reasons(setup: EngineSetup, prompt: Sequence[int]) -> Reasons | None:
    """How the answer to a prompt reasons; None if the model does not, or the prompt has ended it."""
    if setup.formats.reasoning is None:
        return None
    markers = reasoning_format(setup.formats.reasoning)
    end = setup.tokenizer.decode(prompt[-TAIL_TOKENS:], skip_special_tokens=False)
    if end.rstrip().endswith(markers.closes):
        return None
    return Reasons(markers, markers.is_open_in(end))


def _embedded(grammar: Grammar) -> str:
    """A grammar as the body of a rule of a larger one."""
    match grammar.kind.form:
        case Form.SCHEMA:
            return f"%json {grammar.source}"
        case Form.REGEX:
            return lark.pattern(grammar.source)
        case Form.LARK:
            return f"%lark {{\n{grammar.source}\n}}"
