"""The call and reasoning formats by name, as `--tool-parser` and `--reasoning-parser` give them.

A format says which markers it has, how to build its machine, and which family of grammar constrains it (see
`constraint`). `holdfast.engine.tools.choose` picks one for a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from holdfast.engine.tools import harmony, xml_calls
from holdfast.engine.tools.emitter import Emitter
from holdfast.engine.tools.harmony import HarmonyCalls
from holdfast.engine.tools.json_calls import JsonCallFormat, JsonCalls
from holdfast.engine.tools.machine import Machine, OfferedTools, PlainText
from holdfast.engine.tools.markers import MarkerLexer
from holdfast.engine.tools.pythonic_calls import PythonicCalls, PythonicFormat
from holdfast.engine.tools.reasoning import ReasoningFormat
from holdfast.engine.tools.values import Notation
from holdfast.engine.tools.xml_calls import XmlCalls

NO_CALLS = "none"
"""The format of a model whose calls are not read: all that it says is text."""

RESPONSE_TEMPLATE = "response-template"
"""The format that the checkpoint itself describes; `template_calls.template_format` builds its machine."""

BuildMachine = Callable[[Emitter, MarkerLexer, OfferedTools | None], Machine]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family writes tool calls. `reasons`: its machine separates reasoning too.

    `reads_special_tokens`: special tokens must be given to `feed` as text, like all others.
    `reasoning_end` ends the reasoning of a format that has some.
    """

    name: str
    markers: tuple[str, ...]
    build: BuildMachine
    reasons: bool = False
    reads_special_tokens: bool = False
    reasoning_end: str = ""


def _json(name: str, call_format: JsonCallFormat) -> CallFormat:
    return CallFormat(name, call_format.markers, partial(JsonCalls, call_format))


def _pythonic(name: str, call_format: PythonicFormat) -> CallFormat:
    return CallFormat(name, call_format.markers, partial(PythonicCalls, call_format))


def _plain(emitter: Emitter, lexer: MarkerLexer, _: OfferedTools | None) -> Machine:
    return PlainText(emitter, lexer)


MISTRAL = JsonCallFormat(opens="[TOOL_CALLS]", named=True, call_id="[CALL_ID]", arguments="[ARGS]")

GEMMA = JsonCallFormat(
    opens="<|tool_call>",
    closes="<tool_call|>",
    named=True,
    prefix="call:",
    notation=Notation.GEMMA,
    quote='<|"|>',
)
FUNCTION_GEMMA = replace(GEMMA, opens="<start_function_call>", closes="<end_function_call>", quote="<escape>")

CALL_FORMATS: Mapping[str, CallFormat] = {
    each.name: each
    for each in (
        _json("hermes", JsonCallFormat(opens="<tool_call>", closes="</tool_call>")),
        CallFormat("qwen3-coder", xml_calls.MARKERS, XmlCalls),
        _json("llama3-json", JsonCallFormat(opens="<|python_tag|>", at_start=True)),
        _pythonic("pythonic", PythonicFormat("<|python_start|>", "<|python_end|>", at_start=True)),
        _pythonic("lfm2", PythonicFormat("<|tool_call_start|>", "<|tool_call_end|>", at_start=False)),
        _json("mistral", MISTRAL),
        _json("mistral-json", MISTRAL),
        _json("nemotron", JsonCallFormat(opens="<TOOLCALL>", closes="</TOOLCALL>")),
        _json("gemma4", GEMMA),
        _json("functiongemma", FUNCTION_GEMMA),
        CallFormat("harmony", harmony.MARKERS, HarmonyCalls, reasons=True, reasoning_end=harmony.END),
    )
}
"""`mistral` and `mistral-json` read both generations; they differ in the grammar that constrains answers."""

NO_FORMAT = CallFormat(NO_CALLS, (), _plain)

OWN_FORMAT = CallFormat(RESPONSE_TEMPLATE, (), _plain, reasons=True, reads_special_tokens=True)

CALL_FORMAT_ALIASES: Mapping[str, str] = {
    "qwen": "hermes",
    "qwen2.5": "hermes",
    "qwen3": "hermes",
    "granite4": "hermes",
    "qwen3_coder": "qwen3-coder",
    "qwen3.5": "qwen3-coder",
    "nemotron3": "qwen3-coder",
    "llama3_json": "llama3-json",
    "llama4_pythonic": "pythonic",
    "gpt-oss": "harmony",
    "openai": "harmony",
}

REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "think": ReasoningFormat("<think>", "</think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "gemma4": ReasoningFormat("<|channel>", "<channel|>", label="thought"),
    "seed": ReasoningFormat("<seed:think>", "</seed:think>"),
}

REASONING_FORMAT_ALIASES: Mapping[str, str] = {
    "deepseek-r1": "think",
    "deepseek_r1": "think",
    "qwen3": "think",
    "nemotron": "think",
}


def call_format(name: str) -> CallFormat:
    """The call format of that name or alias; ValueError lists the names."""
    found = {RESPONSE_TEMPLATE: OWN_FORMAT, NO_CALLS: NO_FORMAT}.get(name)
    found = found or CALL_FORMATS.get(CALL_FORMAT_ALIASES.get(name, name))
    if found is None:
        names = ", ".join(sorted([*CALL_FORMATS, *CALL_FORMAT_ALIASES]))
        raise ValueError(f"unknown tool parser {name!r}; one of: {names}")
    return found


def reasoning_format(name: str) -> ReasoningFormat:
    """The reasoning format of that name or alias; ValueError lists the names."""
    found = REASONING_FORMATS.get(REASONING_FORMAT_ALIASES.get(name, name))
    if found is None:
        names = ", ".join(sorted([*REASONING_FORMATS, *REASONING_FORMAT_ALIASES]))
        raise ValueError(f"unknown reasoning parser {name!r}; one of: {names}")
    return found
