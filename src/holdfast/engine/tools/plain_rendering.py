"""Tools for checkpoints whose template knows none, such as SmolLM2: everything is text of ordinary messages.

Tools are described in the system message, calls are part of the assistant's text in the Hermes format, and
results are a user's message. The model has not been trained for it, so a constraint matters more here (see
`constraint`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.engine.tools.request import Tool

PLAIN_FORMAT = "hermes"
"""The call format of such checkpoints."""

_INTRODUCTION = (
    "# Tools\n\nYou may call one or more functions. Their signatures, as JSON, one a line:\n"
    "<tools>\n{tools}\n</tools>"
    "\n\nTo call a function, answer with its name and arguments as JSON, inside of these tags:\n"
    '<tool_call>\n{{"name": <name>, "arguments": <arguments>}}\n</tool_call>'
)


def plain_messages(messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Messages in the form of a template (see `template_messages`), with tools, calls and results as text."""
    made: list[dict[str, Any]] = []
    for message in messages:
        if message.get("role") == "tool":
            _add_result(made, str(message.get("content", "")))
            continue
        plain = {key: value for key, value in message.items() if key != "tool_calls"}
        calls = [_written(call["function"]) for call in message.get("tool_calls", ())]
        if calls:
            plain["content"] = "\n".join([each for each in (plain.get("content"), *calls) if each])
        made.append(plain)
    return _with_tools(made, tools) if tools else made


def _written(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def _add_result(made: list[dict[str, Any]], content: str) -> None:
    """A result joins the one before it: many templates want users and the assistant to take turns."""
    result = f"<tool_response>\n{content}\n</tool_response>"
    if made and made[-1].get("content", "").endswith("</tool_response>") and made[-1]["role"] == "user":
        made[-1]["content"] += f"\n{result}"
    else:
        made.append({"role": "user", "content": result})


def _with_tools(messages: list[dict[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The description of the tools, at the end of the system message."""
    lines = [json.dumps(tool.in_openai_form()["function"], ensure_ascii=False) for tool in tools]
    described = _INTRODUCTION.format(tools="\n".join(lines))
    if messages and messages[0].get("role") in ("system", "developer"):
        system = messages[0]
        return [{**system, "content": f"{system['content']}\n\n{described}"}, *messages[1:]]
    return [{"role": "system", "content": described}, *messages]
