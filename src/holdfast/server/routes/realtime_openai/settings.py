"""The settings of a realtime session, as set by clients and as shown to them.

Settings of audio are stored and shown without effect, for clients that always send them; input and
output are text. Audio output is refused. A response may have settings of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast, get_args

from msgspec import UNSET

from holdfast.engine.sampling import Sampling
from holdfast.server.dialects.answer_options import AnswerOptions, Effort
from holdfast.server.dialects.refused import NOT_BUILT
from holdfast.server.http.problems import Problem, bad_field
from holdfast.server.routes.realtime_openai.client_events import AnswerFields, SessionFields
from holdfast.server.turn_writer import checked_tools

__all__ = ["AnswerSettings", "Settings"]

ENDLESS = "inf"
EFFORTS = get_args(Effort)

AUDIO_SHOWN: dict[str, Any] = {
    "input": {
        "format": {"type": "audio/pcm", "rate": 24000},
        "transcription": None,
        "noise_reduction": None,
        "turn_detection": None,
    },
    "output": {"format": {"type": "audio/pcm", "rate": 24000}, "voice": "none", "speed": 1.0},
}
ECHOED = ("audio", "include", "tracing", "truncation")
ECHOED_BETA = (
    "voice",
    "speed",
    "turn_detection",
    "input_audio_format",
    "output_audio_format",
    "input_audio_transcription",
    "input_audio_noise_reduction",
    "tracing",
)
SHOWN_BETA: dict[str, Any] = {
    "voice": "none",
    "turn_detection": None,
    "input_audio_format": "pcm16",
    "output_audio_format": "pcm16",
    "input_audio_transcription": None,
}


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """How responses are made. `tools` are in the form of chat completions, None if they were never given."""

    instructions: str = ""
    tools: tuple[dict[str, Any], ...] | None = None
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool | None = None
    temperature: float | None = None
    tokens_max: int | None = None
    effort: str | None = None

    def changed(self, fields: AnswerFields, place: str) -> AnswerSettings:
        """These settings with the fields that are given; `place` is the field that has them."""
        _require_text(fields.output_modalities, f"{place}.output_modalities")
        _require_text(fields.modalities, f"{place}.modalities")
        if fields.prompt is not None:
            raise bad_field(f"{place}.prompt", NOT_BUILT, "unsupported")
        made = self
        if fields.instructions is not None:
            made = replace(made, instructions=fields.instructions)
        if fields.tools is not None:
            made = replace(made, tools=_read_tools(fields.tools, place))
        if fields.tool_choice is not None:
            made = replace(made, tool_choice=_read_choice(fields.tool_choice, place))
        if fields.parallel_tool_calls is not None:
            made = replace(made, parallel_tool_calls=fields.parallel_tool_calls)
        if fields.temperature is not None:
            made = replace(made, temperature=fields.temperature)
        for name in ("max_output_tokens", "max_response_output_tokens"):
            limit = getattr(fields, name)
            if limit is not None:
                made = replace(made, tokens_max=_read_limit(limit, f"{place}.{name}"))
        if fields.reasoning is not None and fields.reasoning.effort is not None:
            if fields.reasoning.effort not in EFFORTS:
                raise bad_field(f"{place}.reasoning.effort", f"must be one of {', '.join(EFFORTS)}")
            made = replace(made, effort=fields.reasoning.effort)
        return made

    @property
    def shown_limit(self) -> int | str:
        """The maximum of tokens as it is shown."""
        return ENDLESS if self.tokens_max is None else self.tokens_max

    def shown_tools(self) -> list[dict[str, Any]]:
        """The tools in the form of realtime events."""
        return [{"type": "function", **tool["function"]} for tool in self.tools or ()]

    def shown_choice(self) -> str | dict[str, Any]:
        """The choice of tools in the form of realtime events."""
        choice = self.tool_choice
        return choice if isinstance(choice, str) else {"type": "function", **choice["function"]}

    def sampling(self, context_length: int) -> Sampling:
        """How the answer is sampled; the limit never exceeds the context."""
        limit = None if self.tokens_max is None else min(self.tokens_max, context_length - 1)
        return Sampling(max_tokens=limit, temperature=self.temperature)

    def options(self, *, callable_tools: bool) -> AnswerOptions:
        """The requirements of the answer."""
        choice = self.tool_choice if callable_tools else "none"
        return AnswerOptions(
            tools=self.tools or None,
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls if self.tools else None,
            reasoning_effort=cast(Effort | None, self.effort),
        )


@dataclass(slots=True)
class Settings:
    """The settings of one connection, and how it is shown them."""

    name: str
    """The session's id."""
    model: str
    beta: bool
    answer: AnswerSettings = field(default_factory=AnswerSettings)
    echoed: dict[str, Any] = field(default_factory=dict)

    def update(self, fields: SessionFields) -> None:
        """Change settings: all that are given, or none."""
        if fields.type not in (None, "realtime"):
            raise bad_field("session.type", "must be realtime: this model does not transcribe", "unsupported")
        answer = self.answer.changed(fields, "session")
        names = dict.fromkeys((*ECHOED, *ECHOED_BETA))
        given = {name: getattr(fields, name) for name in names if getattr(fields, name) is not UNSET}
        if "audio" in given:
            given["audio"] = _merged_audio(self.echoed.get("audio", {}), given["audio"])
        self.answer, self.echoed = answer, {**self.echoed, **given}

    def shown(self) -> dict[str, Any]:
        """The session as its client sees it."""
        answer = self.answer
        shown: dict[str, Any] = {
            "id": self.name,
            "object": "realtime.session",
            "model": self.model,
            "instructions": answer.instructions,
            "tools": answer.shown_tools(),
            "tool_choice": answer.shown_choice(),
        }
        if self.beta:
            echoed = {name: self.echoed[name] for name in ECHOED_BETA if name in self.echoed}
            temperature = 1.0 if answer.temperature is None else answer.temperature
            limits = {"temperature": temperature, "max_response_output_tokens": answer.shown_limit}
            return {**shown, "modalities": ["text"], **limits, **SHOWN_BETA, **echoed}
        echoed = {name: self.echoed[name] for name in ECHOED if name in self.echoed}
        audio = _merged_audio(AUDIO_SHOWN, echoed.pop("audio", {}))
        shown |= {
            "type": "realtime",
            "output_modalities": ["text"],
            "max_output_tokens": answer.shown_limit,
            "tracing": None,
            "truncation": "auto",
            "prompt": None,
            "include": None,
            **echoed,
            "audio": audio,
        }
        if answer.temperature is not None:
            shown["temperature"] = answer.temperature
        if answer.parallel_tool_calls is not None:
            shown["parallel_tool_calls"] = answer.parallel_tool_calls
        if answer.effort is not None:
            shown["reasoning"] = {"effort": answer.effort}
        return shown


def _require_text(modalities: list[str] | None, field: str) -> None:
    if modalities is not None and modalities != ["text"]:
        said = f'{field}: this model answers in text: give ["text"]'
        raise Problem(400, "audio_not_supported" if "audio" in modalities else "invalid_value", said, field)


def _read_limit(limit: int | str, field: str) -> int | None:
    if limit == ENDLESS:
        return None
    if isinstance(limit, str) or limit < 1:
        raise bad_field(field, f'must be a number of at least 1, or "{ENDLESS}"')
    return limit


def _read_tools(tools: list[dict[str, Any]], place: str) -> tuple[dict[str, Any], ...]:
    """Tools in the form of chat completions. Realtime events have the function's fields in the tool."""
    made: list[dict[str, Any]] = []
    for number, tool in enumerate(tools):
        if tool.get("type", "function") != "function":
            raise bad_field(f"{place}.tools[{number}].type", "must be function", "unsupported")
        function = tool.get("function", {name: tool[name] for name in tool if name != "type"})
        made.append({"type": "function", "function": function})
    try:
        checked_tools(made)
    except Problem as problem:
        param = f"{place}.{problem.param}"
        message = f"{place}.{problem.message}".replace(".function.", ".")
        raise Problem(problem.status, problem.code, message, param.replace(".function.", ".")) from problem
    return tuple(made)


def _read_choice(choice: str | Mapping[str, Any], place: str) -> str | dict[str, Any]:
    """The choice in the form of chat completions, where a function is named inside of an object."""
    if isinstance(choice, str):
        if choice not in ("auto", "none", "required"):
            raise bad_field(f"{place}.tool_choice", "must be auto, none, required, or name a function")
        return choice
    if choice.get("type") != "function":
        raise bad_field(f"{place}.tool_choice.type", "must be function", "unsupported")
    function = choice.get("function", {"name": choice.get("name")})
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_field(f"{place}.tool_choice.name", "must be the name of a function")
    return {"type": "function", "function": {"name": function["name"]}}


def _merged_audio(before: Mapping[str, Any], given: Any) -> dict[str, Any]:
    """The settings of `audio` with others over them: each of those of its input and of its output alone."""
    merged = dict(before)
    for side, fields in given.items() if isinstance(given, dict) else ():
        held = merged.get(side)
        merged[side] = {**held, **fields} if isinstance(held, dict) and isinstance(fields, dict) else fields
    return merged
