"""The body of `POST /v1/responses`, and the `Creation` that it asks for."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

import msgspec

from holdfast.engine.portions import Portions
from holdfast.server.dialects.answer_options import Effort
from holdfast.server.dialects.refused import NOT_BUILT
from holdfast.server.dialects.requests import make_body, refuse_unbuilt
from holdfast.server.dialects.tables import RESPONSES
from holdfast.server.http.problems import Problem, bad_field
from holdfast.server.responses.creation import Creation
from holdfast.server.responses.ids import Place, conversation_key, conversation_of, response_of
from holdfast.server.responses.items import read_items
from holdfast.server.responses.store import previous_missing
from holdfast.server.responses.tools import read_format, read_tools, shown_tools
from holdfast.server.routes.openai import require_model
from holdfast.server.service import Service

__all__ = ["RESPONSE_BODY", "ResponseBody", "checked_metadata", "creation_of"]

INCLUDES = (
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
)
"""Values of `include`. All but the last two are about tools that this server does not run."""

METADATA_PAIRS_MAX = 16
METADATA_KEY_MAX = 64
METADATA_VALUE_MAX = 512


class ResponseBody(msgspec.Struct, kw_only=True):
    """A response to create; null is the same as left out."""

    model: str | None = None
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    max_tool_calls: int | None = None
    top_logprobs: int | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    service_tier: str | None = None


RESPONSE_BODY = make_body(
    ResponseBody,
    RESPONSES.sampling,
    RESPONSES.turn,
    RESPONSES.answer,
    prompt=(),
    context_management=([],),
    moderation=(),
    generate=(True,),
    access_programs=(),
    image=(),
)


def creation_of(service: Service, body: ResponseBody) -> Portions[Creation]:
    """The request of a body, in portions; raises the problem with it."""
    require_model(service, body.model)
    refuse_unbuilt(body)
    if not service.prompts.chats:
        raise bad_field("input", "this model has no chat template; use /v1/completions")
    stored = body.store is not False
    if body.background and not stored:
        raise bad_field("background", "needs store to be true")
    tools = read_tools(body.tools, body.tool_choice)
    include = _included(body.include)
    reasoning = body.reasoning or {}
    _refuse_options(body)
    answer = RESPONSES.answer.read(
        body,
        constraint=read_format(body.text),
        tools=tools.offered or None,
        tool_choice=tools.choice,
        reasoning_effort=_effort(reasoning),
    )
    logprobs = _logprobs(service, body, include, bool(tools.offered))
    sampling = RESPONSES.sampling.read(body, logprobs=logprobs)
    prewarms = _prewarms(body)
    given = body.input if body.input is not None else []
    return Creation(
        (yield from read_items(given)),
        body.instructions,
        tools,
        replace(sampling, max_tokens=0) if prewarms else sampling,
        RESPONSES.turn.read(body),
        answer,
        _shown(service, body),
        {"instructions": body.instructions, "tools": shown_tools(body.tools, body.tool_choice)},
        RESPONSES.names(body, body),
        float(int(time.time())),
        previous=_previous(body),
        conversation=_conversation(body),
        stored=stored and not prewarms,
        prewarms=prewarms,
        background=bool(body.background),
        streams=bool(body.stream),
        truncates=body.truncation == "auto",
        sealed="reasoning.encrypted_content" in include,
    )


def _refuse_options(body: ResponseBody) -> None:
    """Refuse options inside of objects that would change the answer and are not built."""
    for field, given, allowed in (
        ("reasoning.mode", (body.reasoning or {}).get("mode"), (None, "standard")),
        ("reasoning.context", (body.reasoning or {}).get("context"), (None, "auto", "all_turns")),
        (
            "prompt_cache_options.comparison_response_id",
            (body.prompt_cache_options or {}).get("comparison_response_id"),
            (None,),
        ),
    ):
        if given not in allowed:
            raise bad_field(field, NOT_BUILT, "unsupported")


def _prewarms(body: ResponseBody) -> bool:
    """Whether the prompt is computed and cached without an answer."""
    prewarm = (body.prompt_cache_options or {}).get("prewarm", False)
    if not isinstance(prewarm, bool):
        raise bad_field("prompt_cache_options.prewarm", "must be true or false")
    for field in ("previous_response_id", "conversation", "background"):
        if prewarm and getattr(body, field):
            said = "cannot be combined with prewarm, which computes a whole prompt and stores no response"
            raise bad_field(field, said)
    return prewarm


def _included(include: list[str] | None) -> list[str]:
    for place, name in enumerate(include or ()):
        if name not in INCLUDES:
            raise bad_field(f"include[{place}]", f"must be one of {', '.join(INCLUDES)}")
    return include or []


def _effort(reasoning: Mapping[str, Any]) -> Any:
    effort = reasoning.get("effort")
    if effort is not None and effort not in get_args(Effort):
        raise bad_field("reasoning.effort", f"must be one of {', '.join(get_args(Effort))}")
    return effort


def _logprobs(service: Service, body: ResponseBody, include: list[str], has_tools: bool) -> int | None:
    """How many log-probabilities to report: only of answers that are text alone."""
    if "message.output_text.logprobs" not in include:
        if body.top_logprobs:
            raise bad_field("top_logprobs", "needs message.output_text.logprobs in include")
        return None
    if has_tools or service.facts.reasoning is not None:
        said = "log-probabilities are not supported with tools, or where the model reasons"
        raise bad_field("include", said, "unsupported")
    return body.top_logprobs or 0


def _previous(body: ResponseBody) -> Place | None:
    if body.previous_response_id is None:
        return None
    if body.conversation is not None:
        raise bad_field("previous_response_id", "cannot be combined with conversation; give one of both")
    place = response_of(body.previous_response_id)
    if place is None:
        raise previous_missing()
    return place


def _conversation(body: ResponseBody) -> str | None:
    given = body.conversation
    if given is None:
        return None
    name = given if isinstance(given, str) else given.get("id")
    key = conversation_of(name) if isinstance(name, str) else None
    if key is None:
        said = "conversation: there is no such conversation, or it was deleted"
        raise Problem(404, "conversation_not_found", said, "conversation")
    return key


def checked_metadata(given: Mapping[str, Any] | None) -> dict[str, str]:
    """Metadata within OpenAI's bounds."""
    for key, value in (given or {}).items():
        if not isinstance(value, str) or len(key) > METADATA_KEY_MAX or len(value) > METADATA_VALUE_MAX:
            said = f"must have keys of at most {METADATA_KEY_MAX} characters and texts of at most"
            raise bad_field("metadata", f"{said} {METADATA_VALUE_MAX}")
    if len(given or {}) > METADATA_PAIRS_MAX:
        raise bad_field("metadata", f"may have at most {METADATA_PAIRS_MAX} pairs")
    return dict(given or {})


def _shown(service: Service, body: ResponseBody) -> dict[str, Any]:
    """The fields of the response object that repeat the request."""
    sampling = RESPONSES.sampling.read(body)
    answer = RESPONSES.answer.read(body)
    key = _conversation(body)
    text, reasoning = body.text or {}, body.reasoning or {}
    defaults = service.facts.defaults
    return {
        "model": service.model_name,
        "metadata": checked_metadata(body.metadata),
        "previous_response_id": body.previous_response_id,
        "conversation": None if key is None else {"id": conversation_key(key)},
        "background": bool(body.background),
        "store": body.store is not False and not _prewarms(body),
        "tool_choice": body.tool_choice or "auto",
        "parallel_tool_calls": answer.parallel_tool_calls is not False,
        "temperature": _first(sampling.temperature, defaults.get("temperature"), 1.0),
        "top_p": _first(sampling.top_p, defaults.get("top_p"), 1.0),
        "max_output_tokens": sampling.max_tokens,
        "max_tool_calls": body.max_tool_calls,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "text": {"format": text.get("format") or {"type": "text"}, "verbosity": text.get("verbosity")},
        "truncation": body.truncation or "disabled",
        "top_logprobs": body.top_logprobs or 0,
        "user": body.user,
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
        "service_tier": "default",
    }


def _first(*values: Any) -> Any:
    """The first value that is given."""
    return next(value for value in values if value is not None)
