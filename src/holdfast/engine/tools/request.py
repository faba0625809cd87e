"""The tools of a request: what OpenAI's `tools`, `tool_choice` and `parallel_tool_calls` say.

Read once, checked once; rendering, constraint and parser all work from `Tools`. An error names the field.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from holdfast.engine.tools.machine import OfferedTools

TOOLS_MAX = 512
REFERENCES_MAX = 32
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


class ToolsRefused(ValueError):
    """A field of the request cannot be used: `param` names it."""

    def __init__(self, param: str, problem: str) -> None:
        super().__init__(f"{param}: {problem}")
        self.param = param
        self.problem = problem


@dataclass(frozen=True, slots=True)
class Tool:
    """One function: `parameters` is the JSON schema of its arguments; `strict` arguments always follow it."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False

    def in_openai_form(self) -> dict[str, Any]:
        """The tool as templates expect it."""
        parameters = dict(self.parameters) or {"type": "object", "properties": {}}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


class Mode(Enum):
    """The mode of `tool_choice`."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of one request. `named` is the tool that must be called, where one must.

    `allowed` are the names of those that may be called, where not all may: the others are only described.
    """

    offered: tuple[Tool, ...]
    mode: Mode = Mode.AUTO
    named: str = ""
    parallel: bool = True
    allowed: frozenset[str] | None = None

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that the model may call."""
        if self.mode is Mode.NONE:
            return ()
        if self.mode is Mode.NAMED:
            return tuple(tool for tool in self.offered if tool.name == self.named)
        if self.allowed is not None:
            return tuple(tool for tool in self.offered if tool.name in self.allowed)
        return self.offered

    def for_parser(self) -> OfferedTools:
        """A parser's view of them."""
        return OfferedTools({tool.name: parameter_types(tool.parameters) for tool in self.offered})


def read_tools(tools: object, choice: object = None, parallel: object = None) -> Tools:
    """The values of `tools`, `tool_choice` and `parallel_tool_calls`, checked."""
    offered = _read_offered(tools)
    if parallel is not None and not isinstance(parallel, bool):
        raise ToolsRefused("parallel_tool_calls", "must be true or false")
    mode, named, allowed = _read_choice(choice, offered)
    return Tools(offered, mode, named, parallel is not False, allowed)


def _read_offered(tools: object) -> tuple[Tool, ...]:
    if tools is None:
        return ()
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise ToolsRefused("tools", "must be an array")
    if len(tools) > TOOLS_MAX:
        raise ToolsRefused("tools", f"has {len(tools)} entries, at most {TOOLS_MAX}")
    offered = tuple(_read_tool(tool, f"tools[{place}]") for place, tool in enumerate(tools))
    names: set[str] = set()
    for place, tool in enumerate(offered):
        if tool.name in names:
            raise ToolsRefused(f"tools[{place}].function.name", f"{tool.name!r} is the name of another tool")
        names.add(tool.name)
    return offered


def _read_tool(tool: object, where: str) -> Tool:
    if not isinstance(tool, Mapping):
        raise ToolsRefused(where, "must be an object")
    if tool.get("type", "function") != "function":
        raise ToolsRefused(f"{where}.type", f"must be 'function', not {tool['type']!r}")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise ToolsRefused(f"{where}.function", "must be an object")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ToolsRefused(f"{where}.function.name", "must be 1 to 128 letters, digits or any of _ . : / -")
    description = function.get("description") or ""
    if not isinstance(description, str):
        raise ToolsRefused(f"{where}.function.description", "must be a string")
    parameters = function.get("parameters") or {}
    if not isinstance(parameters, Mapping):
        raise ToolsRefused(f"{where}.function.parameters", "must be a JSON schema, which is an object")
    if parameters.get("type", "object") != "object":
        raise ToolsRefused(f"{where}.function.parameters.type", "must be 'object'")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise ToolsRefused(f"{where}.function.strict", "must be true or false")
    return Tool(name, description, parameters, strict is True)


def _read_choice(choice: object, offered: tuple[Tool, ...]) -> tuple[Mode, str, frozenset[str] | None]:
    if choice is None:
        return (Mode.AUTO if offered else Mode.NONE), "", None
    if choice == "none":
        return Mode.NONE, "", None
    if not offered:
        raise ToolsRefused("tool_choice", "needs tools")
    if choice in ("auto", "required"):
        return Mode(choice), "", None
    if not isinstance(choice, Mapping):
        raise ToolsRefused("tool_choice", "must be 'auto', 'none', 'required' or name a function")
    if choice.get("type") == "allowed_tools":
        return _read_allowed(choice.get("allowed_tools"), offered)
    if choice.get("type") != "function":
        raise ToolsRefused("tool_choice.type", "must be 'function' or 'allowed_tools'")
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if name not in {tool.name for tool in offered}:
        raise ToolsRefused("tool_choice.function.name", f"{name!r} is not the name of a tool")
    return Mode.NAMED, str(name), None


def _read_allowed(given: object, offered: tuple[Tool, ...]) -> tuple[Mode, str, frozenset[str]]:
    """OpenAI's choice among some of the tools."""
    where = "tool_choice.allowed_tools"
    if not isinstance(given, Mapping) or given.get("mode") not in ("auto", "required"):
        raise ToolsRefused(f"{where}.mode", "must be 'auto' or 'required'")
    listed = given.get("tools")
    if not isinstance(listed, Sequence) or isinstance(listed, str) or not listed:
        raise ToolsRefused(f"{where}.tools", "must be an array of tools")
    known, allowed = {tool.name for tool in offered}, set()
    for place, tool in enumerate(listed):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if name not in known:
            raise ToolsRefused(f"{where}.tools[{place}]", "is not the name of a tool")
        allowed.add(str(name))
    return Mode(given["mode"]), "", frozenset(allowed)


def parameter_types(schema: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """The JSON types of each parameter, in the order in which the schema lists them."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return {}
    return {str(name): _types(each, schema, 0) for name, each in properties.items()}


def resolved(schema: object, root: Mapping[str, Any]) -> object:
    """The schema that a local reference leads to; the schema itself if it is none."""
    for _ in range(REFERENCES_MAX):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        target: object = root
        for part in reference[2:].split("/"):
            key = part.replace("~1", "/").replace("~0", "~")
            target = target.get(key) if isinstance(target, Mapping) else None
        schema = target
    return {}


def _types(schema: object, root: Mapping[str, Any], depth: int) -> tuple[str, ...]:
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or depth > REFERENCES_MAX:
        return ()
    declared = schema.get("type")
    if isinstance(declared, str):
        found = [declared]
    elif isinstance(declared, Sequence):
        found = [each for each in declared if isinstance(each, str)]
    else:
        values = [schema["const"]] if "const" in schema else schema.get("enum") or []
        found = [_type_of(value) for value in values]
        for choice in [*(schema.get("anyOf") or []), *(schema.get("oneOf") or [])]:
            found += _types(choice, root, depth + 1)
    if schema.get("nullable") is True:
        found.append("null")
    return tuple(dict.fromkeys(found))


def _type_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case Sequence():
            return "array"
    return "object"
