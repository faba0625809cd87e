"""Messages with tool calls and results, as a checkpoint's template wants them.

Clients send OpenAI's form: arguments as a string of JSON, `content: null`, ids of any length. Templates
differ: most take arguments as an object, some as a string; Mistral's refuse ids that are not nine letters or
digits; Gemma's and Llama's want the tool's name with its result. `TemplateForm` says what one template wants,
found out by rendering a small conversation; `template_messages` brings messages into that form, and its
errors name the field.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from holdfast.engine.tools.events import Call
from holdfast.engine.tools.request import ToolsRefused
from holdfast.engine.tools.response_template import ResponseTemplate

Message = Mapping[str, Any]
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_PROBE = "probed"
_SHOWN = (f'"{_PROBE}"', f"{_PROBE}:", f"={_PROBE}>", f"({_PROBE}=")
"""How families write the name of an argument: as JSON, as Gemma does, as XML, as Python."""
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


_MARK = "\ue002last\ue002"
_CLOSINGS = {
    "hermes": r'"\}\}\s*</tool_call>',
    "qwen3-coder": r"\s*</parameter>\s*</function>\s*</tool_call>",
    "llama3-json": r'"\}\}',
    "pythonic": r"[\"']\)\](<\|python_end\|>)?",
    "lfm2": r"[\"']\)\]<\|tool_call_end\|>",
    "mistral": r'"\}',
    "mistral-json": r'"\}(, ?"id": ?"[^"]*")?\}\]',
    "nemotron": r'"\}\}\]\s*</TOOLCALL>',
    "gemma4": r'<\|"\|>\}<tool_call\|>',
    "functiongemma": r"<escape>\}<end_function_call>",
    "harmony": r'"\}',
}
"""What closes the last call of an answer, after the last argument's text."""


class ArgumentForm(Enum):
    """How a template wants the arguments of earlier calls."""

    OBJECT = "object"
    STRING = "string"


@dataclass(frozen=True, slots=True)
class TemplateForm:
    """The message form of a template.

    `shows_calls`: whether it renders calls and results at all. `several_calls`: whether a message may have
    more than one call; if not, `parallel_tool_calls` is not available either.
    """

    arguments: ArgumentForm = ArgumentForm.OBJECT
    short_ids: bool = False
    shows_calls: bool = True
    several_calls: bool = True


def probe(render: Callable[[Sequence[Message]], str], refused: type[Exception]) -> TemplateForm:
    """The form of a template; `render` renders messages and raises `refused` for those it does not take."""
    for short_ids in (False, True):
        for form in ArgumentForm:
            for count in (2, 1):
                try:
                    text = render(_probe_messages(form, count, short_ids=short_ids))
                except refused:
                    continue
                if any(text.count(shown) == count for shown in _SHOWN):
                    return TemplateForm(form, short_ids, several_calls=count > 1)
    return TemplateForm(shows_calls=False)


def _probe_messages(form: ArgumentForm, count: int, *, short_ids: bool) -> list[Message]:
    arguments: object = {_PROBE: "1"}
    if form is ArgumentForm.STRING:
        arguments = json.dumps(arguments)
    ids = [
        f"abcdefgh{number}" if short_ids else f"call_of_another_length_{number}" for number in range(count)
    ]
    function = {"name": "f", "arguments": arguments}
    calls = [{"id": each, "type": "function", "function": function} for each in ids]
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        *({"role": "tool", "content": "b", "tool_call_id": each, "name": "f"} for each in ids),
    ]


def tail_after_calls(
    render: Callable[[Sequence[Message]], str],
    format_name: str,
    calls: Sequence[Call],
    results: Sequence[Message],
    form: TemplateForm,
    own: ResponseTemplate | None = None,
) -> str:
    """What a template writes after an answer that ended in calls, when the conversation goes on.

    For append-only sessions: the calls themselves are in the history already and are not rendered again. The
    text begins after the last call; where the model has generated the end of its turn, the caller removes
    it. `own` is the checkpoint's description of its answers, if its format is that.
    """
    shown = calls if form.several_calls else calls[-1:]
    written = [_history_call(call, call is calls[-1], form) for call in shown]
    before: list[Message] = [
        {"role": "user", "content": "..."},
        {"role": "assistant", "content": "", "tool_calls": written},
    ]
    names = {call.id: call.name for call in calls}
    after = [
        _template_message(message, f"messages[{place}]", form, names) for place, message in enumerate(results)
    ]
    _, mark, tail = render([*before, *after]).partition(_MARK)
    end = _end_of_call(tail, format_name, own) if mark else None
    if end is None:
        raise ToolsRefused(
            "messages", "the model's chat template does not render calls in the model's format"
        )
    return tail[end:]


def _end_of_call(tail: str, format_name: str, own: ResponseTemplate | None) -> int | None:
    """Where the last call ends, in the text after its last argument."""
    if own is not None:
        return own.end_of_calls(tail)
    found = re.compile(_CLOSINGS[format_name]).match(tail)
    return None if found is None else found.end()


def _history_call(call: Call, is_last: bool, form: TemplateForm) -> dict[str, Any]:
    """A call of the history; the last one's arguments are a mark."""
    arguments: object = {"a": _MARK} if is_last else {}
    if form.arguments is ArgumentForm.STRING:
        arguments = json.dumps(arguments, ensure_ascii=False)
    function = {"name": call.name, "arguments": arguments}
    return {"id": _id(call.id, form), "type": "function", "function": function}


def template_messages(
    messages: Sequence[Message], form: TemplateForm, called: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Messages of a client in the form of a template; raises `ToolsRefused` with the field's name.

    `called` are the names of the tools called before the messages, by the ids of the calls.
    """
    names: dict[str, str] = dict(called or {})
    made = [
        _template_message(message, f"messages[{place}]", form, names)
        for place, message in enumerate(messages)
    ]
    return made if form.several_calls else _one_call_a_message(made)


def _one_call_a_message(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages in which each call has a message of its own, followed by its result."""
    made: list[dict[str, Any]] = []
    place = 0
    while place < len(messages):
        message = messages[place]
        place += 1
        calls = message.get("tool_calls", [])
        if len(calls) < 2:
            made.append(message)
            continue
        results: list[dict[str, Any]] = []
        while place < len(messages) and messages[place].get("role") == "tool":
            results.append(messages[place])
            place += 1
        for call in calls:
            made.append({**message, "tool_calls": [call]})
            made += [result for result in results if result["tool_call_id"] == call["id"]]
            message = {"role": "assistant", "content": ""}
        known = {call["id"] for call in calls}
        made += [result for result in results if result["tool_call_id"] not in known]
    return made


def _template_message(
    message: Message, where: str, form: TemplateForm, names: dict[str, str]
) -> dict[str, Any]:
    role = message.get("role")
    made = {key: value for key, value in message.items() if key not in ("tool_calls", *_REASONING_KEYS)}
    if role == "assistant":
        made["content"] = _text(message.get("content"), f"{where}.content") or ""
        calls = message.get("tool_calls")
        if calls:
            made["tool_calls"] = _calls(calls, f"{where}.tool_calls", form, names)
        _add_reasoning(made, message, where)
    elif role == "tool":
        made.update(_result(message, where, form, names))
    elif message.get("tool_calls"):
        raise ToolsRefused(f"{where}.tool_calls", "only assistant messages have tool calls")
    if not form.shows_calls and (role == "tool" or "tool_calls" in made):
        raise ToolsRefused(where, "the model's chat template does not render tool calls and results")
    return made


def _text(content: object, where: str) -> str | None:
    """The text of a message: a string, text parts, or nothing."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ToolsRefused(where, "must be a string or an array of text parts")
    texts: list[str] = []
    for place, part in enumerate(content):
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise ToolsRefused(f"{where}[{place}]", "must be a text part")
        texts.append(text)
    return "".join(texts)


def _calls(calls: object, where: str, form: TemplateForm, names: dict[str, str]) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise ToolsRefused(where, "must be an array")
    return [_call(call, f"{where}[{place}]", form, names) for place, call in enumerate(calls)]


def _call(call: object, where: str, form: TemplateForm, names: dict[str, str]) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise ToolsRefused(f"{where}.function", "must be an object")
    name, call_id = function.get("name"), call.get("id")
    if not isinstance(name, str) or not name:
        raise ToolsRefused(f"{where}.function.name", "must be a string")
    if not isinstance(call_id, str) or not call_id:
        raise ToolsRefused(f"{where}.id", "must be a string")
    names[call_id] = name
    arguments = _arguments(function.get("arguments"), f"{where}.function.arguments")
    written: object = arguments
    if form.arguments is ArgumentForm.STRING:
        written = json.dumps(arguments, ensure_ascii=False)
    made = {"name": name, "arguments": written}
    return {"id": _id(call_id, form), "type": "function", "function": made}


def _arguments(arguments: object, where: str) -> dict[str, Any]:
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise ToolsRefused(where, f"is not valid JSON: {error}") from None
    if not isinstance(arguments, Mapping):
        raise ToolsRefused(where, "must be a JSON object, written as a string")
    return dict(arguments)


def _result(message: Message, where: str, form: TemplateForm, names: dict[str, str]) -> dict[str, Any]:
    call_id = message.get("tool_call_id")
    if not isinstance(call_id, str) or not call_id:
        raise ToolsRefused(f"{where}.tool_call_id", "must be a string")
    name = names.get(call_id, message.get("name"))
    if name is None:
        raise ToolsRefused(f"{where}.tool_call_id", f"{call_id!r} is not the id of an earlier tool call")
    content = _text(message.get("content"), f"{where}.content")
    if content is None:
        raise ToolsRefused(f"{where}.content", "must be a string or an array of text parts")
    return {"content": content, "tool_call_id": _id(call_id, form), "name": name}


def _id(call_id: str, form: TemplateForm) -> str:
    """An id that the template takes; equal ids stay equal."""
    if not form.short_ids or _SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _add_reasoning(made: dict[str, Any], message: Message, where: str) -> None:
    """The reasoning under the names that templates use for it."""
    for key in _REASONING_KEYS:
        reasoning = message.get(key)
        if reasoning is None:
            continue
        if not isinstance(reasoning, str):
            raise ToolsRefused(f"{where}.{key}", "must be a string")
        made["reasoning_content"] = reasoning
        # Harmony's template takes one of both with a call.
        if not (made["content"] and "tool_calls" in made):
            made["thinking"] = reasoning
        return
