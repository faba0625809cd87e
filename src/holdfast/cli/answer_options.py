"""What `holdfast chat` asks of answers: tools, a format, reasoning. Files are checked first."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.engine.options import OptionError
from holdfast.engine.tools.request import ToolsRefused, read_tools

__all__ = ["CHOICES", "AnswerAsked", "AnswerOptions"]

FORMATS = ("text", "json_object", "json_schema", "structural_tag")
CHOICES = ("auto", "none", "required")


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """The options as they are given; `tools` and `response_format` name files."""

    tools: str | None = None
    tool_choice: str | None = None
    response_format: str | None = None
    thinking: bool | None = None
    thinking_tokens: int | None = None
    show_thinking: bool = False


@dataclass(frozen=True, slots=True)
class AnswerAsked:
    """The parsed options: the tools of every conversation, and fields of turns.

    `said` are the fields of turns with user input, `results` those of turns with tool results, in which the
    model may always choose whether to call again.
    """

    tools: list[dict[str, Any]] = field(default_factory=list)
    said: dict[str, Any] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    shows_thinking: bool = False

    @classmethod
    def read(cls, options: AnswerOptions) -> AnswerAsked:
        """Read the files; raises `OptionError`."""
        tools = _read_tools(options)
        fields: dict[str, Any] = {}
        if options.response_format is not None:
            fields["response_format"] = _read_format(options.response_format)
        if options.thinking is not None:
            fields["thinking"] = options.thinking
        if options.thinking_tokens is not None:
            if options.thinking_tokens < 0:
                raise OptionError("thinking_tokens", f"must be at least 0, not {options.thinking_tokens}")
            fields["thinking_tokens"] = options.thinking_tokens
        said = dict(fields)
        if options.tool_choice is not None:
            said["tool_choice"] = _choice(options.tool_choice)
        return cls(tools, said, fields, options.show_thinking)


def _read_tools(options: AnswerOptions) -> list[dict[str, Any]]:
    if options.tools is None:
        if options.tool_choice is not None:
            raise OptionError("tool_choice", "needs --tools")
        return []
    tools = _read_json("tools", options.tools)
    choice = None if options.tool_choice is None else _choice(options.tool_choice)
    try:
        read_tools(tools, choice)
    except ToolsRefused as error:
        if error.param.startswith("tool_choice"):
            raise OptionError("tool_choice", error.problem) from error
        raise OptionError("tools", f"{options.tools}: {error}") from error
    return list(tools)


def _choice(word: str) -> str | dict[str, Any]:
    """OpenAI's form of a choice: a word of its own, or a function by name."""
    return word if word in CHOICES else {"type": "function", "function": {"name": word}}


def _read_format(path: str) -> dict[str, Any]:
    """OpenAI's `response_format`; a file that is a JSON schema alone is wrapped as one."""
    given = _read_json("response_format", path)
    if not isinstance(given, dict):
        raise OptionError("response_format", f"{path}: must be an object")
    if given.get("type") in FORMATS:
        return given
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": given}}


def _read_json(option: str, path: str) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(option, f"{path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise OptionError(option, f"{path} is not JSON: {error}") from error
