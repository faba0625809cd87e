"""The bodies of Anthropic's Messages, and what their fields ask of the answer.

One field of Anthropic's often stands for two of ours: `thinking` switches reasoning and limits it,
`tool_choice` also says whether calls may be parallel, `output_config` has the effort and the schema of the
answer. `answer_fields` reads them. `cache_control` is checked and changes nothing: every prompt is cached.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from holdfast.engine.constraints.grammar import Kind
from holdfast.server.dialects.constraints import Constraint
from holdfast.server.dialects.refused import ANTHROPIC_FIELDS, FIELDS, NOT_BUILT
from holdfast.server.dialects.requests import make_body, refuse_unbuilt
from holdfast.server.dialects.tables import MESSAGES
from holdfast.server.http.problems import Problem, bad_field
from holdfast.server.routes.messages_input import CacheControl, Message, SystemBlock

__all__ = ["COUNT_BODY", "MESSAGES_BODY", "CountBody", "MessagesBody", "answer_fields", "eager_tools"]

KEEPS_ALL: tuple[Any, ...] = ("all", {"type": "all"})
"""Values of `keep` with which an edit of the context clears nothing."""


class MessageTool(msgspec.Struct):
    """A tool that the client runs: a name, a description and the schema of its input."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: Any = None
    cache_control: CacheControl | None = None
    input_examples: list[dict[str, Any]] | None = None


class MessageToolChoice(msgspec.Struct):
    """Whether the model calls tools: `auto`, `any`, `none`, or the `tool` of a name."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessageThinking(msgspec.Struct):
    """Whether the model reasons: `enabled` with a budget, `adaptive`, or `disabled`."""

    type: str
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class MessageFormat(msgspec.Struct):
    """The JSON schema that the text of the answer must match."""

    type: str
    schema: dict[str, Any] | None = None


class MessageOutput(msgspec.Struct):
    """The effort of the answer, and its format."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: MessageFormat | None = None
    task_budget: Any = None


class CountBody(msgspec.Struct, kw_only=True):
    """A conversation whose tokens are counted; null is the same as left out."""

    messages: list[Message]
    model: str | None = None
    system: str | list[SystemBlock] | None = None
    tools: list[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: MessageThinking | None = None
    output_config: MessageOutput | None = None
    output_format: MessageFormat | None = None
    cache_control: CacheControl | None = None
    context_management: dict[str, Any] | None = None
    thread: Any = None

    def check(self) -> None:
        """Refuse fields that are not built."""
        refuse_unbuilt(self)
        _require_no_edits(self.context_management)
        if self.thread is not None:
            # The code makes Anthropic's tool runner go on without a thread.
            said = "thread: is not supported yet; send the whole conversation"
            raise Problem(400, "thread_unsupported_request", said, "thread")


class MessagesBody(CountBody, kw_only=True):
    """A conversation to continue."""

    stream: bool | None = None


_REFUSED = {**FIELDS, **ANTHROPIC_FIELDS}

MESSAGES_BODY = make_body(MessagesBody, MESSAGES.sampling, MESSAGES.turn, MESSAGES.answer, refused=_REFUSED)
COUNT_BODY = make_body(CountBody, MESSAGES.turn, MESSAGES.answer, refused=_REFUSED)


def answer_fields(body: CountBody) -> dict[str, Any]:
    """The answer options that a body asks for, by their declared names."""
    fields: dict[str, Any] = {}
    if body.tools:
        fields["tools"] = [_function(tool, f"tools[{place}]") for place, tool in enumerate(body.tools)]
    fields |= _choice_fields(body.tool_choice)
    fields |= _thinking_fields(body.thinking)
    fields |= _output_fields(body)
    return fields


def eager_tools(body: CountBody) -> frozenset[str]:
    """The tools whose input is streamed as it is generated, valid or not."""
    return frozenset(tool.name for tool in body.tools or () if tool.eager_input_streaming)


def _function(tool: MessageTool, place: str) -> dict[str, Any]:
    """A tool in OpenAI's form."""
    if tool.input_schema is None:
        if tool.type not in (None, "custom"):
            reason = "tools that the server runs are not supported; give an input_schema, and run it yourself"
            raise bad_field(f"{place}.type", reason, "unsupported")
        raise bad_field(f"{place}.input_schema", "this field is required")
    if tool.defer_loading:
        raise bad_field(f"{place}.defer_loading", NOT_BUILT, "unsupported")
    if tool.allowed_callers not in (None, [], ["direct"]):
        raise bad_field(f"{place}.allowed_callers", NOT_BUILT, "unsupported")
    parameters = tool.input_schema
    if tool.input_examples:
        parameters = {**parameters, "examples": tool.input_examples}
    function: dict[str, Any] = {"name": tool.name, "parameters": parameters}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def _choice_fields(choice: MessageToolChoice | None) -> dict[str, Any]:
    if choice is None:
        return {}
    fields: dict[str, Any] = {}
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    if choice.type == "tool":
        if not choice.name:
            raise bad_field("tool_choice.name", "this field is required")
        return {**fields, "tool_choice": {"type": "function", "function": {"name": choice.name}}}
    if choice.type not in _CHOICES:
        raise bad_field("tool_choice.type", f"must be one of {', '.join(_CHOICES)}, tool")
    return {**fields, "tool_choice": _CHOICES[choice.type]}


def _thinking_fields(thinking: MessageThinking | None) -> dict[str, Any]:
    if thinking is None:
        return {}
    if thinking.type == "enabled":
        if thinking.budget_tokens is None:
            raise bad_field("thinking.budget_tokens", "this field is required")
        return {"thinking": True, "thinking_tokens": thinking.budget_tokens}
    if thinking.type == "between_tools":
        raise bad_field("thinking.type", "between_tools is not supported yet", "unsupported")
    if thinking.type not in ("adaptive", "disabled"):
        raise bad_field("thinking.type", "must be one of enabled, adaptive, disabled")
    return {"thinking": thinking.type == "adaptive"}


def _output_fields(body: CountBody) -> dict[str, Any]:
    """The effort and the constraint."""
    fields: dict[str, Any] = {}
    output = body.output_config
    if output is not None:
        if output.task_budget is not None:
            raise bad_field("output_config.task_budget", NOT_BUILT, "unsupported")
        if output.effort is not None:
            fields["reasoning_effort"] = output.effort
        if output.format is not None:
            fields["constraint"] = _constraint(output.format, "output_config.format")
    if body.output_format is not None:
        if "constraint" in fields:
            raise bad_field("output_format", "cannot be combined with output_config.format; give one of both")
        fields["constraint"] = _constraint(body.output_format, "output_format")
    return fields


def _constraint(given: MessageFormat, place: str) -> Constraint:
    if given.type != "json_schema":
        raise bad_field(f"{place}.type", "must be json_schema")
    if given.schema is None:
        raise bad_field(f"{place}.schema", "this field is required")
    return Constraint(Kind.JSON_SCHEMA, given.schema, f"{place}.schema")


def _require_no_edits(given: dict[str, Any] | None) -> None:
    """Raise for edits of the context that would clear something."""
    edits = (given or {}).get("edits") or []
    for edit in edits if isinstance(edits, list) else [edits]:
        if not (
            isinstance(edit, dict)
            and edit.get("type") == "clear_thinking_20251015"
            and edit.get("keep") in KEEPS_ALL
        ):
            raise bad_field(
                "context_management", "edits that clear something are not supported", "unsupported"
            )
