"""From the tools of a request to a grammar in the family's format.

`tool_grammar` gives the text of a Lark grammar for llguidance. With `auto` the answer is free until a trigger
(the format's marker), then a call must follow the grammar; `required` and a named tool constrain from the
first token, after the reasoning where the model reasons first. The arguments of strict tools follow their
schema always; those of others follow it when a call is required, and are any JSON object when the model
decides. The end of the turn is not part of a grammar: it is allowed where the grammar accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from holdfast.engine.tools import harmony, xml_calls
from holdfast.engine.tools.formats import FUNCTION_GEMMA, GEMMA
from holdfast.engine.tools.json_calls import JsonCallFormat
from holdfast.engine.tools.lark import Grammar, in_order, json_of, literal, required_names
from holdfast.engine.tools.reasoning import ReasoningFormat
from holdfast.engine.tools.request import Mode, Tool, Tools, parameter_types, resolved
from holdfast.engine.tools.values import Notation

_OPEN_KEYWORDS = ("additionalProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf")


@dataclass(frozen=True, slots=True)
class Reasons:
    """How the model reasons before it answers; `is_open` if the prompt ends inside the reasoning."""

    format: ReasoningFormat
    is_open: bool = False


@dataclass(frozen=True, slots=True)
class _Calls:
    """Grammar of one format: `trigger` begins a group of calls, `body` follows it and ends the group."""

    trigger: str
    body: str
    repeats: bool
    """Whether further groups may follow."""
    separator: str = ""
    starts: str = ""
    """The character that begins calls where they may begin the answer without a marker."""


def tool_grammar(
    format_name: str,
    tools: Tools,
    tokens: Mapping[str, int],
    reasons: Reasons | None = None,
    final: str = "",
) -> str | None:
    """The grammar of an answer, None where it is free.

    `tokens` maps marker texts that are tokens to their ids. An answer without calls matches the rule `final`.
    """
    if not tools.callable_tools and not final:
        return None
    grammar = Grammar(tokens)
    if format_name == "harmony":
        return grammar.text(_harmony(grammar, tools, final))
    must_call = bool(tools.callable_tools) and tools.mode in (Mode.REQUIRED, Mode.NAMED)
    answer = grammar.rule(final) if final else ""
    if tools.callable_tools:
        calls = _FORMATS[format_name](grammar, tools)
        if must_call:
            answer = _required(grammar, tools, calls)
        elif final:
            answer = f"{_required(grammar, tools, calls)} | {answer}"
        else:
            answer = _auto(grammar, tools, calls)
    return grammar.text(_after_reasoning(grammar, reasons, answer, must_call=must_call or bool(final)))


def _several(tools: Tools) -> bool:
    """Whether an answer may have more than one call."""
    return tools.parallel and tools.mode is not Mode.NAMED


def _required(grammar: Grammar, tools: Tools, calls: _Calls) -> str:
    trigger = grammar.marker(calls.trigger) if not calls.starts else ""
    group = grammar.rule(f"{trigger} {calls.body}".strip())
    if not (_several(tools) and calls.repeats):
        return group
    return f"{group} ({calls.separator} {group})*"


def _auto(grammar: Grammar, tools: Tools, calls: _Calls) -> str:
    if calls.starts:
        trigger = f"{grammar.marker(calls.trigger)}? " if grammar.is_token(calls.trigger) else ""
        text = grammar.rule(rf"/[ \n]*([^\{calls.starts} \n](.|\n)*)?/")
        group = grammar.rule(calls.body)
        more = f" ({calls.separator} {group})*" if _several(tools) and calls.repeats else ""
        return f"{text} | {trigger}{group}{more}"
    group = grammar.rule(f"{grammar.text_up_to(calls.trigger)} {calls.body}")
    if _several(tools) and calls.repeats:
        return f"{group}* {grammar.free_text()}"
    return f"{group} | {grammar.free_text()}"


def _after_reasoning(grammar: Grammar, reasons: Reasons | None, answer: str, *, must_call: bool) -> str:
    if reasons is None:
        return answer
    space = grammar.rule(r"/[ \n]{0,4}/")
    thought = f"{grammar.text_up_to(reasons.format.closes)} {space}"
    if reasons.is_open:
        return f"{thought} ({answer})"
    if not grammar.is_token(reasons.format.opens) and not must_call:
        return answer  # Free text: the reasoning is part of it.
    return f"({grammar.marker(reasons.format.opens)} {thought})? ({answer})"


def _arguments(tools: Tools, tool: Tool) -> str:
    """JSON arguments of a tool."""
    follows = tool.strict or tools.mode in (Mode.REQUIRED, Mode.NAMED)
    return json_of(_closed(tool.parameters) if follows else {"type": "object"}, strict=tool.strict)


def _closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema of arguments without parameters that it does not name, unless it may have some elsewhere."""
    closed = {"type": "object", **schema}
    named = not schema or isinstance(schema.get("properties"), Mapping)
    if named and not any(key in schema for key in _OPEN_KEYWORDS):
        closed["additionalProperties"] = False
    return closed


def _either(grammar: Grammar, bodies: list[str]) -> str:
    """One of several bodies, as the name of a rule."""
    return grammar.rule(" | ".join(grammar.rule(body) for body in bodies))


def _objects(grammar: Grammar, tools: Tools, key: str) -> str:
    """{"name": …, "arguments": …} of one of the tools."""
    return _either(
        grammar,
        [
            f'{literal(f"""{{"name": "{tool.name}", "{key}": """)} {_arguments(tools, tool)} "}}"'
            for tool in tools.callable_tools
        ],
    )


def _hermes(grammar: Grammar, tools: Tools) -> _Calls:
    body = f'"\\n" {_objects(grammar, tools, "arguments")} "\\n" {grammar.marker("</tool_call>")}'
    return _Calls("<tool_call>", body, repeats=True, separator='"\\n"')


def _array(grammar: Grammar, tools: Tools) -> str:
    call = _objects(grammar, tools, "arguments")
    return f'"[" {call} (", " {call})* "]"' if _several(tools) else f'"[" {call} "]"'


def _nemotron(grammar: Grammar, tools: Tools) -> _Calls:
    body = f"{_array(grammar, tools)} {grammar.marker('</TOOLCALL>')}"
    return _Calls("<TOOLCALL>", body, repeats=False)


def _mistral_json(grammar: Grammar, tools: Tools) -> _Calls:
    return _Calls("[TOOL_CALLS]", _array(grammar, tools), repeats=False)


def _mistral(grammar: Grammar, tools: Tools) -> _Calls:
    call_id = f"({grammar.marker('[CALL_ID]')} /[a-zA-Z0-9]{{9}}/)?" if grammar.is_token("[CALL_ID]") else ""
    body = _either(
        grammar,
        [
            f"{literal(tool.name)} {call_id} {grammar.marker('[ARGS]')} {_arguments(tools, tool)}"
            for tool in tools.callable_tools
        ],
    )
    return _Calls("[TOOL_CALLS]", body, repeats=True)


def _llama(grammar: Grammar, tools: Tools) -> _Calls:
    body = _objects(grammar, tools, "parameters")
    return _Calls("<|python_tag|>", body, repeats=True, separator='"; "', starts="{")


def _xml(grammar: Grammar, tools: Tools) -> _Calls:
    function = _either(grammar, [_xml_function(grammar, tools, tool) for tool in tools.callable_tools])
    body = f'"\\n" {function} "\\n" {grammar.marker(xml_calls.CLOSES)}'
    return _Calls(xml_calls.OPENS, body, repeats=True, separator='"\\n"')


def _xml_function(grammar: Grammar, tools: Tools, tool: Tool) -> str:
    follows = tool.strict or tools.mode in (Mode.REQUIRED, Mode.NAMED)
    properties = tool.parameters.get("properties")
    required = required_names(tool.parameters) if follows else frozenset()
    types = parameter_types(tool.parameters)
    parameters: list[str] = []
    for name, schema in properties.items() if isinstance(properties, Mapping) else ():
        value = _xml_value(grammar, tool, schema, types[str(name)])
        parameter = grammar.rule(f"{literal(f'<parameter={name}>' + chr(10))} {value}")
        parameters.append(parameter if name in required else f"{parameter}?")
    return " ".join([literal(f"<function={tool.name}>\n"), *parameters, literal("</function>")])


def _xml_value(grammar: Grammar, tool: Tool, schema: object, types: tuple[str, ...]) -> str:
    """A value and the end of its tag: text as it is, anything else as JSON."""
    end = f"\n{xml_calls.PARAMETER_END}\n"
    meant = resolved(schema, tool.parameters)
    choices = meant.get("enum") if isinstance(meant, Mapping) else None
    if isinstance(choices, list) and all(isinstance(each, str) for each in choices):
        return f"({' | '.join(map(literal, choices))}) {literal(end)}"
    if not types or "string" in types:
        return grammar.text_up_to(end)
    shared = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    described = {**shared, **schema} if isinstance(schema, Mapping) else {}
    return f"{grammar.rule(json_of(described, strict=tool.strict))} {literal(end)}"


def _in_notation(grammar: Grammar, tool: Tool, notation: Notation, quote: str = "") -> str:
    """The arguments of a tool between its brackets."""
    properties = tool.parameters.get("properties")
    sign = "=" if notation is Notation.PYTHON else ":"
    pairs = [
        (f"{literal(f'{name}{sign}')} {grammar.value(schema, tool.parameters, notation, quote)}", str(name))
        for name, schema in (properties.items() if isinstance(properties, Mapping) else ())
    ]
    comma = literal(", ") if notation is Notation.PYTHON else literal(",")
    return in_order(grammar, pairs, required_names(tool.parameters), comma)


def _python_list(grammar: Grammar, tools: Tools) -> str:
    call = _either(
        grammar,
        [
            f'{literal(f"{tool.name}(")} {_in_notation(grammar, tool, Notation.PYTHON)} ")"'
            for tool in tools.callable_tools
        ],
    )
    return f'"[" {call} (", " {call})* "]"' if _several(tools) else f'"[" {call} "]"'


def _pythonic(grammar: Grammar, tools: Tools) -> _Calls:
    return _Calls("<|python_start|>", _python_list(grammar, tools), repeats=False, starts="[")


def _lfm2(grammar: Grammar, tools: Tools) -> _Calls:
    body = f"{_python_list(grammar, tools)} {grammar.marker('<|tool_call_end|>')}"
    return _Calls("<|tool_call_start|>", body, repeats=False)


def _gemma(call_format: JsonCallFormat, grammar: Grammar, tools: Tools) -> _Calls:
    assert call_format.opens is not None and call_format.closes is not None
    bodies = [
        [
            literal(f"call:{tool.name}{{"),
            _in_notation(grammar, tool, Notation.GEMMA, call_format.quote),
            '"}"',
        ]
        for tool in tools.callable_tools
    ]
    call = _either(grammar, [" ".join(body) for body in bodies])
    return _Calls(call_format.opens, f"{call} {grammar.marker(call_format.closes)}", repeats=True)


def _harmony(grammar: Grammar, tools: Tools, constrained: str = "") -> str:
    """Messages on channels; a call ends the turn, so there is one at most."""
    channel, message = grammar.marker(harmony.CHANNEL), grammar.marker(harmony.MESSAGE)
    text = grammar.free_text()
    next_message = f'{grammar.marker(harmony.END)} {grammar.marker(harmony.START)} "assistant"'
    before = grammar.rule(f'{channel} ("analysis" | "commentary") {message} {text} {next_message}')
    calls = [
        f"{channel} {literal(f'commentary to={harmony.NAMESPACE}{tool.name} ')} "
        f'{grammar.marker(harmony.CONSTRAIN)} "json" {message} {_arguments(tools, tool)}'
        for tool in tools.callable_tools
    ]
    if not calls:
        return f'{before}* {channel} "final" {message} {grammar.rule(constrained)}'
    call = _either(grammar, calls)
    if tools.mode in (Mode.REQUIRED, Mode.NAMED):
        return f"{before}* {call}"
    if constrained:
        return f'{before}* ({call} | {channel} "final" {message} {grammar.rule(constrained)})'
    final = grammar.rule(f'{channel} ("final" | "analysis" | "commentary") {message} {text}')
    return f"{before}* ({call} | {final})"


_FORMATS: Mapping[str, Callable[[Grammar, Tools], _Calls]] = {
    "hermes": _hermes,
    "qwen3-coder": _xml,
    "llama3-json": _llama,
    "pythonic": _pythonic,
    "lfm2": _lfm2,
    "mistral": _mistral,
    "mistral-json": _mistral_json,
    "nemotron": _nemotron,
    "gemma4": partial(_gemma, GEMMA),
    "functiongemma": partial(_gemma, FUNCTION_GEMMA),
}
