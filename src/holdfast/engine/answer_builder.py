"""Builds the grammar and the specification of an answer from the fields of a turn.

`AnswerBuilder` serves one model, in the text process of a server and for callers in this process. The end of
the prompt shows whether the answer begins inside the reasoning. A turn with optional tools has no grammar
unless a tool is strict, or only one call or only some tools are allowed: free text costs no masks. A
constraint on the text of an answer applies after the reasoning, and not to calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from holdfast.engine.constraints import lark, schema
from holdfast.engine.constraints.errors import Fault, GrammarError
from holdfast.engine.constraints.grammar import SOURCE_BYTES_MAX, Form, Grammar, Kind
from holdfast.engine.constraints.vocabulary import control_tokens
from holdfast.engine.text.tokenizer import Tokenizer
from holdfast.engine.tools.answer import AnswerSpec
from holdfast.engine.tools.choose import Chosen
from holdfast.engine.tools.constraint import Reasons, tool_grammar
from holdfast.engine.tools.formats import NO_CALLS, RESPONSE_TEMPLATE, call_format, reasoning_format
from holdfast.engine.tools.plain_rendering import PLAIN_FORMAT
from holdfast.engine.tools.request import Mode, Tools, ToolsRefused

__all__ = ["TAIL_TOKENS", "AnswerBuilder", "AnswerRefused", "Asked", "Built"]

TAIL_TOKENS = 32
"""Tokens at the end of a prompt in which the marker of reasoning is looked for."""


class AnswerRefused(ValueError):
    """The grammar that `field` of a request asks for cannot be used."""

    def __init__(self, error: GrammarError, field: str) -> None:
        super().__init__(error.of_field(field))
        self.fault = error.fault
        self.field = field


@dataclass(frozen=True, slots=True)
class Asked:
    """Requirements of a turn's answer: `grammar`, from the request's `field`, constrains its text.

    Without `reads`, all of the answer is text: a plain completion. Calls get ids from `seed`.
    """

    tools: Tools
    grammar: Grammar | None = None
    field: str = "grammar"
    separate_reasoning: bool = True
    thinking_tokens: int | None = None
    reads: bool = True
    seed: str = ""


@dataclass(frozen=True, slots=True)
class Built:
    """The grammar of a turn, and how its answer is read; None where it is free, or all of it is text."""

    grammar: Grammar | None = None
    answer: AnswerSpec | None = None


class AnswerBuilder:
    """Builds the answers' side of turns, for one model."""

    def __init__(self, tokenizer: Tokenizer, formats: Chosen) -> None:
        self._tokenizer = tokenizer
        self._calls = None if formats.calls is None else call_format(formats.calls)
        self._reasoning = formats.reasoning
        self._markers = None if formats.reasoning is None else reasoning_format(formats.reasoning)

    @cached_property
    def control_tokens(self) -> dict[str, int]:
        """The ids of the vocabulary's control tokens, which grammars may name."""
        return control_tokens(self._tokenizer)

    def build(self, prompt: Sequence[int], asked: Asked) -> Built:
        """The grammar and the specification of the answer to a prompt.

        Raises `AnswerRefused`, or `ToolsRefused` for a call that must be made where none is read.
        """
        if self._calls is not None and self._calls.name == NO_CALLS:
            asked = _without_calls(asked)
        reasons = self._reasons(prompt) if asked.reads else None
        answer = self._answer(prompt, asked, reasons) if asked.reads else None
        return Built(self._grammar(asked, reasons), answer)

    def _answer(self, prompt: Sequence[int], asked: Asked, reasons: Reasons | None) -> AnswerSpec | None:
        """How the answer is read; None where all of it is text."""
        tools = asked.tools
        calls = self._call_format if tools.callable_tools else None
        if calls is None and self._channels and self._calls is not None:
            calls = self._calls.name
        reasoning = self._reasoning if asked.separate_reasoning else None
        if calls is None and reasoning is None:
            return None
        return AnswerSpec(
            calls=calls,
            reasoning=reasoning,
            reasoning_is_open=reasoning is not None and reasons is not None and reasons.is_open,
            thinking_tokens=asked.thinking_tokens,
            tools=tools.for_parser().types if tools.callable_tools else {},
            seed=asked.seed,
            prompt_end=self._end_of(prompt) if calls == RESPONSE_TEMPLATE else "",
        )

    @property
    def _channels(self) -> bool:
        """Whether the model writes text, reasoning and calls on channels, tools or not."""
        return self._calls is not None and self._calls.reasons

    @property
    def _call_format(self) -> str:
        """How calls are written: as the template tells the model."""
        named = PLAIN_FORMAT if self._calls is None else self._calls.name
        if self._tokenizer.template is None or (self._channels and named != RESPONSE_TEMPLATE):
            return named
        return call_format(self._tokenizer.chat.call_format).name

    def _reasons(self, prompt: Sequence[int]) -> Reasons | None:
        """How the answer to a prompt reasons; None if the model does not, or the prompt has ended it."""
        if self._markers is None:
            return None
        end = self._end_of(prompt)
        if end.rstrip().endswith(self._markers.closes):
            return None
        return Reasons(self._markers, self._markers.is_open_in(end))

    def _end_of(self, prompt: Sequence[int]) -> str:
        return self._tokenizer.decode(prompt[-TAIL_TOKENS:], skip_special_tokens=False)

    def _grammar(self, asked: Asked, reasons: Reasons | None) -> Grammar | None:
        tools, constraint = asked.tools, asked.grammar
        has_parts = bool(tools.callable_tools or reasons or (asked.reads and self._channels))
        if constraint is not None and not has_parts:
            return constraint
        if constraint is None and not _constrains_calls(tools):
            return None
        field = "tools" if constraint is None else asked.field
        if self._calls is not None and self._calls.name == RESPONSE_TEMPLATE:
            problem = "answers in the format of the checkpoint's response template cannot be constrained"
            raise AnswerRefused(GrammarError(Fault.UNSUPPORTED, problem), field)
        _require_strict_schemas(tools)
        final = "" if constraint is None or _must_call(tools) else _embedded(constraint)
        calls = self._call_format if tools.callable_tools or self._channels else PLAIN_FORMAT
        source = tool_grammar(calls, tools, self.control_tokens, reasons, final)
        assert source is not None, "there are calls or a constraint"
        if len(source.encode("utf-8", "replace")) > SOURCE_BYTES_MAX:
            problem = f"the grammar of its calls has more than {SOURCE_BYTES_MAX} bytes"
            raise AnswerRefused(GrammarError(Fault.TOO_LARGE, problem), field)
        return Grammar(Kind.LARK, source)


def _without_calls(asked: Asked) -> Asked:
    """The same for a model whose calls are not read: its tools are only described."""
    if _must_call(asked.tools):
        problem = "cannot be met: this server reads no tool calls (--tool-parser none); send 'auto' or 'none'"
        raise ToolsRefused("tool_choice", problem)
    return replace(asked, tools=Tools(asked.tools.offered, Mode.NONE))


def _must_call(tools: Tools) -> bool:
    return bool(tools.callable_tools) and tools.mode in (Mode.REQUIRED, Mode.NAMED)


def _constrains_calls(tools: Tools) -> bool:
    """Whether calls need a grammar: free ones are parsed only."""
    if not tools.callable_tools:
        return False
    free = tools.parallel and tools.allowed is None
    return _must_call(tools) or not free or any(tool.strict for tool in tools.callable_tools)


def _require_strict_schemas(tools: Tools) -> None:
    """Raise for a strict tool whose schema cannot be enforced, with the place."""
    for place, tool in enumerate(tools.offered):
        if tool.strict:
            try:
                schema.require_bounded(dict(tool.parameters), bytes_max=SOURCE_BYTES_MAX)
                schema.normalised(dict(tool.parameters), schema.Whitespace.SPACED)
            except GrammarError as error:
                raise AnswerRefused(error, f"tools[{place}].function.parameters") from error


def _embedded(grammar: Grammar) -> str:
    """A grammar as the body of a rule of a larger one."""
    match grammar.kind.form:
        case Form.SCHEMA:
            return f"%json {grammar.source}"
        case Form.REGEX:
            return lark.pattern(grammar.source)
        case Form.LARK:
            return f"%lark {{\n{grammar.source}\n}}"
