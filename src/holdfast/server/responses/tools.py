"""Tools, `tool_choice` and `text.format` as responses write them, as chat completions do.

A model calls functions. So every tool that the client runs is shown to it as one: a custom tool takes a text
`input`, `local_shell` takes a `command`, and the functions of a namespace have its name before theirs. A
`ToolKind` says how a call of it is shown to the client. Tools that OpenAI runs itself are refused by name.
Only a web search that is one of several tools is left out instead, because Codex sends it with every request:
the model is not told of it, and the response does not list it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from holdfast.engine.constraints.grammar import Kind
from holdfast.server.dialects.constraints import Constraint
from holdfast.server.dialects.refused import NOT_BUILT
from holdfast.server.http.problems import Problem, bad_field

__all__ = ["FUNCTION", "ToolKind", "ToolSet", "read_format", "read_tools", "shown_tools", "told_flat"]

HOSTED = (
    "web_search",
    "web_search_preview",
    "file_search",
    "mcp",
    "computer",
    "computer_use_preview",
    "code_interpreter",
    "image_generation",
    "shell",
    "apply_patch",
    "tool_search",
    "programmatic_tool_calling",
)
"""Tools that run on OpenAI's servers, or that its models were trained for."""

_SHELL = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}},
        "working_directory": {"type": "string"},
        "timeout_ms": {"type": "integer"},
    },
    "required": ["command"],
}
_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


class ToolKind(NamedTuple):
    """How a call is shown: `function`, `custom` or `local_shell`, its name, and its namespace."""

    type: str
    name: str
    namespace: str | None = None


FUNCTION = "function"


class ToolSet(NamedTuple):
    """The tools of a request in the form of chat completions, and those that are not plain functions."""

    offered: list[dict[str, Any]]
    choice: str | dict[str, Any] | None
    kinds: dict[str, ToolKind]


def read_tools(tools: Sequence[Mapping[str, Any]] | None, choice: Any) -> ToolSet:
    """The values of `tools` and `tool_choice`; what is inside of functions is checked later."""
    offered: list[dict[str, Any]] = []
    kinds: dict[str, ToolKind] = {}
    for place, tool in enumerate(tools or ()):
        if tool in _left_out(tools or (), choice):
            continue
        _add(tool, f"tools[{place}]", None, offered, kinds)
    return ToolSet(offered, _read_choice(choice, kinds), kinds)


def _left_out(tools: Sequence[Mapping[str, Any]], choice: Any) -> list[Mapping[str, Any]]:
    """Web searches that the model may do without: it has other tools, and need not call any."""
    searches = [tool for tool in tools if tool.get("type") == "web_search"]
    return searches if choice in (None, "auto", "none") and len(searches) < len(tools) else []


def shown_tools(tools: Sequence[Mapping[str, Any]] | None, choice: Any) -> list[Mapping[str, Any]]:
    """The tools of a request as its response lists them."""
    left_out = _left_out(tools or (), choice)
    return [tool for tool in tools or () if tool not in left_out]


def _add(
    tool: Mapping[str, Any],
    where: str,
    namespace: str | None,
    offered: list[dict[str, Any]],
    kinds: dict[str, ToolKind],
) -> None:
    kind = tool.get("type")
    if kind == "namespace" and namespace is None:
        inner = tool.get("tools")
        if not isinstance(inner, list) or not isinstance(tool.get("name"), str):
            raise bad_field(where, "must have a name and an array of tools")
        for place, each in enumerate(inner):
            if not isinstance(each, Mapping):
                raise bad_field(f"{where}.tools[{place}]", "must be an object")
            _add(each, f"{where}.tools[{place}]", tool["name"], offered, kinds)
        return
    if kind not in ("function", "custom", "local_shell"):
        raise bad_field(f"{where}.type", _refusal(kind), "unsupported")
    name = "local_shell" if kind == "local_shell" else tool.get("name")
    if not isinstance(name, str):
        raise bad_field(f"{where}.name", "must be text")
    _refuse_options(tool, where)
    called = name if namespace is None else f"{namespace}.{name}"
    if kind != "function" or namespace is not None:
        kinds[called] = ToolKind(kind, name, namespace)
    function: dict[str, Any] = {"name": called}
    if kind == "function":
        function |= {each: tool[each] for each in ("description", "parameters", "strict") if each in tool}
    elif kind == "custom":
        function |= {"description": _described(tool, where), "parameters": _INPUT}
    else:
        function |= {"description": "Runs a command in a shell on the user's machine.", "parameters": _SHELL}
    offered.append({"type": "function", "function": function})


def _refuse_options(tool: Mapping[str, Any], where: str) -> None:
    """Refuse options that would let the model call the tool in a way that is not built."""
    for field in ("async", "defer_loading"):
        if tool.get(field) not in (None, False):
            raise bad_field(f"{where}.{field}", NOT_BUILT, "unsupported")
    callers = tool.get("allowed_callers")
    if callers is not None and (not isinstance(callers, list) or "direct" not in callers):
        raise bad_field(f"{where}.allowed_callers", "must include direct: the model is the only caller")


def _refusal(kind: object) -> str:
    named = kind.partition("_20")[0] if isinstance(kind, str) else ""
    if named in HOSTED:
        return f"{named} is not supported: this server runs no tools itself; use function tools"
    return "must be function, custom, local_shell or namespace"


def _described(tool: Mapping[str, Any], where: str) -> str:
    """The description of a custom tool, with the grammar of its input: the model is told, not forced."""
    description, given = tool.get("description") or "", tool.get("format")
    if not isinstance(description, str):
        raise bad_field(f"{where}.description", "must be text")
    if not isinstance(given, Mapping) or given.get("type") != "grammar":
        return description
    syntax, definition = given.get("syntax"), given.get("definition")
    if not isinstance(definition, str):
        raise bad_field(f"{where}.format.definition", "must be text")
    return f"{description}\n\nThe input must match this {syntax} grammar:\n{definition}"


def _read_choice(choice: Any, kinds: Mapping[str, ToolKind]) -> str | dict[str, Any] | None:
    if choice is None or isinstance(choice, str):
        return choice
    kind = choice.get("type")
    if kind == "allowed_tools":
        tools = choice.get("tools")
        if not isinstance(tools, list) or not all(isinstance(each, Mapping) for each in tools):
            raise bad_field("tool_choice.tools", "must be an array of objects")
        listed = [_named(each, f"tool_choice.tools[{place}]", kinds) for place, each in enumerate(tools)]
        allowed = {"mode": choice.get("mode"), "tools": listed}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return _named(choice, "tool_choice", kinds)


def _named(given: Mapping[str, Any], where: str, kinds: Mapping[str, ToolKind]) -> dict[str, Any]:
    """One tool of a choice, in the form of chat completions."""
    kind = given.get("type")
    if kind not in ("function", "custom", "local_shell"):
        raise bad_field(f"{where}.type", _refusal(kind).replace(" or namespace", ""), "unsupported")
    name = "local_shell" if kind == "local_shell" else given.get("name")
    called = [each for each, tool in kinds.items() if tool.namespace is not None and tool.name == name]
    return {"type": "function", "function": {"name": called[0] if called else name}}


@contextmanager
def told_flat() -> Iterator[None]:
    """Name the fields of tools in problems as responses write them, not as chat completions do."""
    try:
        yield
    except Problem as problem:
        raise _flat(problem) from problem


def _flat(problem: Problem) -> Problem:
    if problem.param is None or (".function" not in problem.param and ".allowed_tools" not in problem.param):
        return problem
    name = problem.param.replace(".function", "").replace(".allowed_tools", "")
    message = problem.message.replace(problem.param, name)
    return Problem(problem.status, problem.code, message, name, problem.retry_after)


def read_format(text: Mapping[str, Any] | None) -> Constraint | None:
    """What `text.format` asks of the answer."""
    given = None if text is None else text.get("format")
    if given is None:
        return None
    field = "text.format"
    if not isinstance(given, Mapping):
        raise bad_field(field, "must be an object")
    match given.get("type"):
        case "text":
            return None
        case "json_object":
            return Constraint(Kind.JSON_OBJECT, None, field)
        case "json_schema":
            schema = given.get("schema")
            if not isinstance(schema, Mapping):
                raise bad_field(f"{field}.schema", "must be a JSON schema, which is an object")
            return Constraint(Kind.JSON_SCHEMA, dict(schema), f"{field}.schema")
    raise bad_field(f"{field}.type", "must be one of text, json_object, json_schema")
