"""What a turn asks of its answer, made into a grammar and an answer specification.

Runs in the text process: grammars are checked and normalised here, tools are read, and the end of the prompt
says whether the answer begins inside the reasoning. A turn with tools that the model may or may not call has
no grammar unless a tool is strict or only one call is allowed: free text costs no masks. A constraint on the
text of an answer applies after the reasoning, and not to calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from holdfast.engine.constraints import lark, schema
from holdfast.engine.constraints.errors import Fault, GrammarError
from holdfast.engine.constraints.grammar import SOURCE_BYTES_MAX, Form, Grammar, Kind
from holdfast.engine.constraints.vocabulary import control_tokens
from holdfast.engine.text.tokenizer import Tokenizer
from holdfast.engine.tools.constraint import Reasons, tool_grammar
from holdfast.engine.tools.formats import call_format, reasoning_format
from holdfast.engine.tools.plain_rendering import PLAIN_FORMAT
from holdfast.engine.tools.request import Mode, Tools, read_tools
from holdfast.server.link import wire
from holdfast.server.text import jobs

__all__ = ["TAIL_TOKENS", "AnswerWriter", "GrammarRefused", "read_asked_tools"]

TAIL_TOKENS = 32
"""Tokens at the end of a prompt in which the marker of reasoning is looked for."""

CODES: Mapping[Fault, str] = {
    Fault.INVALID: "invalid_grammar",
    Fault.UNSUPPORTED: "unsupported_grammar",
    Fault.TOO_LARGE: "grammar_too_large",
}


class GrammarRefused(ValueError):
    """A grammar that a field of the request asks for cannot be used."""

    def __init__(self, error: GrammarError, field: str) -> None:
        super().__init__(error.of_field(field))
        self.code = CODES.get(error.fault, "invalid_grammar")
        self.field = field


def read_asked_tools(asks: jobs.Asks) -> Tools:
    """The tools of a turn; raises `ToolsRefused` with the field's name."""
    return read_tools(asks.tools, asks.tool_choice, asks.parallel_tool_calls)


class AnswerWriter:
    """Writes the answers' side of turns, for one model."""

    def __init__(self, tokenizer: Tokenizer, calls: str | None, reasoning: str | None) -> None:
        """`calls` and `reasoning` name the model's formats; None where it has none."""
        self._tokenizer = tokenizer
        self._calls = None if calls is None else call_format(calls)
        self._reasoning = reasoning
        self._reasoning_format = None if reasoning is None else reasoning_format(reasoning)

    def written(self, prompt: Sequence[int], asks: jobs.Asks, tools: Tools) -> jobs.Written:
        """The grammar and the specification of the answer to a prompt, with the prompt's tokens."""
        reasons = self._reasons(prompt) if asks.reads else None
        grammar = self._grammar(asks, tools, reasons)
        return jobs.Written(
            list(prompt),
            None if grammar is None else wire.GrammarFields(grammar.kind.value, grammar.source),
            self._answer(asks, tools, reasons) if asks.reads else None,
        )

    def _answer(self, asks: jobs.Asks, tools: Tools, reasons: Reasons | None) -> wire.AnswerFields | None:
        """How the answer is read; None where all of it is text."""
        calls = None
        if tools.callable_tools or self._channels:
            calls = self._call_format
        reasoning = self._reasoning if asks.separate_reasoning else None
        if calls is None and reasoning is None:
            return None
        types = {
            tool: {name: list(each) for name, each in parameters.items()}
            for tool, parameters in tools.for_parser().types.items()
        }
        return wire.AnswerFields(
            calls=calls,
            reasoning=reasoning,
            reasoning_is_open=reasoning is not None and reasons is not None and reasons.is_open,
            thinking_tokens=asks.thinking_tokens,
            tools=types if tools.callable_tools else {},
        )

    @property
    def _channels(self) -> bool:
        """Whether the model writes text, reasoning and calls on channels, tools or not."""
        return self._calls is not None and self._calls.reasons

    @property
    def _call_format(self) -> str:
        """How calls are written: as the template tells the model."""
        if self._channels or self._tokenizer.template is None:
            return PLAIN_FORMAT if self._calls is None else self._calls.name
        return call_format(self._tokenizer.chat.call_format).name

    def _reasons(self, prompt: Sequence[int]) -> Reasons | None:
        """How the answer to a prompt reasons; None if the model does not, or the prompt has ended it."""
        if self._reasoning_format is None:
            return None
        end = self._tokenizer.decode(prompt[-TAIL_TOKENS:], skip_special_tokens=False)
        if end.rstrip().endswith(self._reasoning_format.closes):
            return None
        return Reasons(self._reasoning_format, self._reasoning_format.is_open_in(end))

    # --- grammars ---------------------------------------------------------------------------------

    def _grammar(self, asks: jobs.Asks, tools: Tools, reasons: Reasons | None) -> Grammar | None:
        constraint = None if asks.constraint is None else self._constraint(asks.constraint)
        if constraint is not None and not (
            tools.callable_tools or reasons or (asks.reads and self._channels)
        ):
            return constraint
        if constraint is None and not _constrains_calls(tools):
            return None
        _require_strict_schemas(tools)
        field = "tools" if asks.constraint is None else asks.constraint.field
        final = "" if constraint is None or _must_call(tools) else _embedded(constraint)
        source = tool_grammar(self._call_format, tools, self._controls, reasons, final)
        assert source is not None, "there are calls or a constraint"
        if len(source.encode("utf-8", "replace")) > SOURCE_BYTES_MAX:
            problem = f"the grammar of its calls has more than {SOURCE_BYTES_MAX} bytes"
            raise GrammarRefused(GrammarError(Fault.TOO_LARGE, problem), field)
        return Grammar(Kind.LARK, source)

    def _constraint(self, asked: jobs.ConstraintFields) -> Grammar:
        try:
            return Grammar.of(Kind(asked.kind), asked.value, control_tokens=self._controls)
        except GrammarError as error:
            raise GrammarRefused(error, asked.field) from error

    @cached_property
    def _controls(self) -> dict[str, int]:
        return control_tokens(self._tokenizer)


def _must_call(tools: Tools) -> bool:
    return bool(tools.callable_tools) and tools.mode in (Mode.REQUIRED, Mode.NAMED)


def _constrains_calls(tools: Tools) -> bool:
    """Whether calls need a grammar: free ones are parsed only."""
    if not tools.callable_tools:
        return False
    return _must_call(tools) or not tools.parallel or any(tool.strict for tool in tools.callable_tools)


def _require_strict_schemas(tools: Tools) -> None:
    """Raise for a strict tool whose schema cannot be enforced, with the place."""
    for place, tool in enumerate(tools.offered):
        if tool.strict:
            field = f"tools[{place}].function.parameters"
            try:
                schema.require_bounded(dict(tool.parameters), bytes_max=SOURCE_BYTES_MAX)
                schema.normalised(dict(tool.parameters), schema.Whitespace.SPACED)
            except GrammarError as error:
                raise GrammarRefused(error, field) from error


def _embedded(grammar: Grammar) -> str:
    """A grammar as the body of a rule of a larger one."""
    match grammar.kind.form:
        case Form.SCHEMA:
            return f"%json {grammar.source}"
        case Form.REGEX:
            return lark.pattern(grammar.source)
        case Form.LARK:
            return f"%lark {{\n{grammar.source}\n}}"
