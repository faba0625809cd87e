"""The dialects: for each, tables over the declared sampling fields, turn options and answer options.

A new dialect is one entry here and a route. A new field is one declaration (`engine.sampling.Sampling`,
`TurnOptions` or `AnswerOptions`) and one row, or one reason, in each of these tables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec

from holdfast.engine.constraints.grammar import CHOICES_MAX, TEXT_BYTES_MAX, Kind
from holdfast.engine.fields import Bound
from holdfast.engine.sampling import Sampling
from holdfast.server.dialects.answer_options import GRAMMAR, AnswerOptions
from holdfast.server.dialects.constraints import (
    Constraint,
    in_field,
    json_object,
    native_grammar,
    response_format,
    structured_outputs,
)
from holdfast.server.dialects.refused import FIELDS, MESSAGE_FIELDS, NOT_BUILT
from holdfast.server.dialects.table import Absent, Elsewhere, Entry, FieldTable, Row, same
from holdfast.server.dialects.turn_options import TurnOptions

__all__ = [
    "CHAT",
    "COMPLETIONS",
    "COMPLETION_TOKENS",
    "DIALECTS",
    "GENERATE",
    "MESSAGES",
    "REALTIME",
    "RESPONSES",
    "SESSIONS",
    "TOP_LOGPROBS_MAX",
    "Dialect",
    "Unknown",
    "why_unknown",
]

TOP_LOGPROBS_MAX = 20
COMPLETION_TOKENS = 16
"""`max_tokens` of a completion without a session."""
GREEDY_BELOW = 1e-6
"""SGLang: a temperature below this is greedy."""


class Unknown(Enum):
    """The treatment of unknown fields in a dialect."""

    IGNORED = "ignored"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Dialect:
    """One way of writing requests."""

    name: str
    sampling: FieldTable[Sampling]
    turn: FieldTable[TurnOptions]
    answer: FieldTable[AnswerOptions]
    unknown: Unknown

    @property
    def tables(self) -> tuple[FieldTable[Any], ...]:
        """All tables of the dialect."""
        return self.sampling, self.turn, self.answer

    def names(self, sampling: msgspec.Struct, body: msgspec.Struct) -> dict[str, str]:
        """The client's name of each declared field; `sampling` is the object with the sampling fields."""
        return {**self.turn.names(body), **self.answer.names(body), **self.sampling.names(sampling)}


_FEW_LOGPROBS = Bound(0, TOP_LOGPROBS_MAX)
_NO_MESSAGES = "is not supported here: the input is not messages"
_CHAT_ONLY = "is not supported here: use /v1/chat/completions"
_NO_CHAT = "is not supported here: use /v1/chat/completions or /v1/sessions"


# --- constraints ----------------------------------------------------------------------------------

_TEXT = Bound(characters=TEXT_BYTES_MAX)
_SCHEMA: Any = str | dict[str, Any]

Convert = Callable[[Any], Constraint | None]


def _constraint(name: str, kind: Any, value: Convert, bound: Bound = GRAMMAR) -> Row:
    """A field that constrains the answer; a request has one of them."""
    return Row("constraint", name, kind=kind, value=value, bound=bound, alone=True)


def _response_format() -> Row:
    return _constraint("response_format", dict[str, Any], response_format)


def _vllm() -> tuple[Row, ...]:
    """vLLM's names for constraints, present and former."""
    return (
        _constraint("structured_outputs", dict[str, Any], structured_outputs),
        _constraint("guided_json", _SCHEMA, in_field(Kind.JSON_SCHEMA, "guided_json")),
        _constraint("guided_json_object", bool, json_object("guided_json_object")),
        _constraint("guided_regex", str, in_field(Kind.REGEX, "guided_regex"), _TEXT),
        _constraint(
            "guided_choice",
            list[str],
            in_field(Kind.CHOICE, "guided_choice"),
            Bound(characters=TEXT_BYTES_MAX, entries=CHOICES_MAX),
        ),
        _constraint("guided_grammar", str, in_field(Kind.GBNF, "guided_grammar"), _TEXT),
    )


def _sglang(prefix: str = "") -> tuple[Row, ...]:
    """SGLang's names for constraints."""
    return (
        _constraint("json_schema", _SCHEMA, in_field(Kind.JSON_SCHEMA, f"{prefix}json_schema")),
        _constraint("regex", str, in_field(Kind.REGEX, f"{prefix}regex"), _TEXT),
        _constraint("ebnf", str, in_field(Kind.GBNF, f"{prefix}ebnf"), _TEXT),
        _constraint("structural_tag", _SCHEMA, in_field(Kind.STRUCTURAL_TAG, f"{prefix}structural_tag")),
    )


_ABSENT_FROM_TEXT = tuple(
    Absent(field, _NO_CHAT)
    for field in (
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "thinking",
        "thinking_tokens",
        "reasoning_effort",
        "chat_template_kwargs",
        "separate_reasoning",
        "stream_reasoning",
        "keep_reasoning",
    )
)
"""Fields of answers that follow a chat template; a prompt that is text has none."""
_ABSENT_MESSAGE_OPTIONS = tuple(
    Absent(field, _NO_MESSAGES)
    for field in ("append_history", "continue_final_message", "add_generation_prompt")
)


# --- OpenAI ---------------------------------------------------------------------------------------

_OPENAI_SAMPLING: tuple[Entry, ...] = (
    *same("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *same("frequency_penalty", "presence_penalty", "logit_bias", "seed", "stop", "stop_token_ids"),
    *same("ignore_eos", "n", "prompt_logprobs", "skip_special_tokens"),
    Absent("keep_stop", NOT_BUILT, ("include_stop_str_in_output", "no_stop_trim")),
)

CHAT = Dialect(
    "OpenAI chat",
    FieldTable(
        Sampling,
        "ChatBody",
        (
            *_OPENAI_SAMPLING,
            Row("max_tokens", "max_completion_tokens"),
            Row("logprobs", "top_logprobs", bound=_FEW_LOGPROBS, switch="logprobs"),
        ),
        nullable=True,
        other_names={"input": "messages"},
    ),
    FieldTable(
        TurnOptions,
        "ChatBody",
        same("on_abort", "timeout", "append_history", "continue_final_message", "add_generation_prompt"),
        nullable=True,
    ),
    FieldTable(
        AnswerOptions,
        "ChatBody",
        (
            _response_format(),
            *_vllm(),
            *_sglang(),
            *same("tools", "tool_choice", "parallel_tool_calls", "thinking"),
            Row("thinking", "enable_thinking"),
            *same("thinking_tokens"),
            Row("thinking_tokens", "thinking_budget"),
            Row("thinking_tokens", "thinking_token_budget"),
            Row("thinking_tokens", "max_thinking_tokens"),
            *same("reasoning_effort", "chat_template_kwargs", "separate_reasoning", "stream_reasoning"),
            *same("keep_reasoning", "expect_return_seconds"),
        ),
        nullable=True,
    ),
    Unknown.IGNORED,
)

COMPLETIONS = Dialect(
    "OpenAI completions",
    FieldTable(
        Sampling,
        "CompletionBody",
        (*_OPENAI_SAMPLING, Row("logprobs", bound=_FEW_LOGPROBS)),
        nullable=True,
        other_names={"input": "prompt", "messages": "prompt"},
    ),
    FieldTable(
        TurnOptions,
        "CompletionBody",
        (*same("on_abort", "timeout"), *_ABSENT_MESSAGE_OPTIONS),
        nullable=True,
    ),
    FieldTable(
        AnswerOptions,
        "CompletionBody",
        (_response_format(), *_vllm(), *_ABSENT_FROM_TEXT, *same("expect_return_seconds")),
        nullable=True,
    ),
    Unknown.IGNORED,
)


RESPONSES = Dialect(
    "OpenAI responses",
    FieldTable(
        Sampling,
        "ResponseBody",
        (
            Row("max_tokens", "max_output_tokens"),
            *same("min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
            *same("frequency_penalty", "presence_penalty", "logit_bias", "seed", "stop", "stop_token_ids"),
            *same("ignore_eos", "skip_special_tokens"),
            Absent("n", "is not supported here: a response is one answer; fork it with previous_response_id"),
            Elsewhere("logprobs", "top_logprobs"),
            Absent("prompt_logprobs", NOT_BUILT),
            Absent("keep_stop", NOT_BUILT, ("include_stop_str_in_output", "no_stop_trim")),
        ),
        nullable=True,
        other_names={"messages": "input"},
    ),
    FieldTable(
        TurnOptions,
        "ResponseBody",
        (
            *same("on_abort", "timeout"),
            Absent("append_history", "is not supported here: items are always appended"),
            *(Absent(field, _CHAT_ONLY) for field in ("continue_final_message", "add_generation_prompt")),
        ),
        nullable=True,
    ),
    FieldTable(
        AnswerOptions,
        "ResponseBody",
        (
            Elsewhere("constraint", "text.format"),
            Elsewhere("tools", "tools"),
            Elsewhere("tool_choice", "tool_choice"),
            *same("parallel_tool_calls", "thinking", "thinking_tokens"),
            Elsewhere("reasoning_effort", "reasoning.effort"),
            *same("chat_template_kwargs"),
            Absent("separate_reasoning", "is not supported here: reasoning is always separate"),
            Absent("stream_reasoning", "is not supported here: reasoning is always streamed"),
            *same("keep_reasoning", "expect_return_seconds"),
        ),
        nullable=True,
    ),
    Unknown.IGNORED,
)


# --- Anthropic ------------------------------------------------------------------------------------

MESSAGES = Dialect(
    "Anthropic messages",
    FieldTable(
        Sampling,
        "MessagesBody",
        (
            *same("max_tokens", "temperature", "top_p", "top_k"),
            Row("stop", "stop_sequences", kind=list[str]),
            *(
                Absent(field, _CHAT_ONLY)
                for field in (
                    *("min_tokens", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
                    *("logit_bias", "seed", "stop_token_ids", "ignore_eos", "n", "logprobs"),
                    *("prompt_logprobs", "skip_special_tokens", "keep_stop"),
                )
            ),
        ),
        nullable=True,
        other_names={"input": "messages"},
    ),
    FieldTable(
        TurnOptions,
        "MessagesBody",
        (
            *(Absent(field, _CHAT_ONLY) for field in ("on_abort", "timeout", "append_history")),
            # A last message of the assistant is always continued.
            *(Absent(field, _CHAT_ONLY) for field in ("continue_final_message", "add_generation_prompt")),
        ),
        nullable=True,
    ),
    FieldTable(
        AnswerOptions,
        "MessagesBody",
        (
            # One field of Anthropic's stands for two of ours: `routes/messages_body.py` reads them.
            Elsewhere("constraint", "output_config"),
            Elsewhere("reasoning_effort", "output_config"),
            Elsewhere("tools", "tools"),
            Elsewhere("tool_choice", "tool_choice"),
            Elsewhere("parallel_tool_calls", "tool_choice"),
            Elsewhere("thinking", "thinking"),
            Elsewhere("thinking_tokens", "thinking"),
            *(
                Absent(field, _CHAT_ONLY)
                for field in ("chat_template_kwargs", "separate_reasoning", "stream_reasoning")
            ),
            Absent("keep_reasoning", _CHAT_ONLY),
            Absent("expect_return_seconds", _CHAT_ONLY),
        ),
        nullable=True,
    ),
    Unknown.IGNORED,
)


# --- SGLang ---------------------------------------------------------------------------------------

GENERATE = Dialect(
    "SGLang generate",
    FieldTable(
        Sampling,
        "GenerateSampling",
        (
            Row("max_tokens", "max_new_tokens", default=128, null=None),
            Row("min_tokens", "min_new_tokens"),
            Row("temperature", default=1.0, value=lambda given: given if given >= GREEDY_BELOW else 0.0),
            Row("top_p", default=1.0),
            Row("top_k", default=-1),
            Row("min_p", default=0.0),
            *same("frequency_penalty", "presence_penalty"),
            Row("repetition_penalty", default=1.0),
            *same("stop", "stop_token_ids", "ignore_eos", "skip_special_tokens"),
            Row("keep_stop", "no_stop_trim"),
            *same("logit_bias"),
            Row("seed", "sampling_seed"),
            *same("n"),
            Elsewhere("logprobs", "top_logprobs_num"),
            Elsewhere("prompt_logprobs", "top_logprobs_num"),
        ),
        prefix="sampling_params.",
        nullable=True,
    ),
    FieldTable(
        TurnOptions,
        "GenerateBody",
        (
            *same("timeout"),
            Absent("on_abort", "is not supported here: a request is rolled back when its client disconnects"),
            *_ABSENT_MESSAGE_OPTIONS,
        ),
        nullable=True,
    ),
    FieldTable(
        AnswerOptions,
        "GenerateSampling",
        (*_sglang("sampling_params."), *_ABSENT_FROM_TEXT, Absent("expect_return_seconds", _NO_CHAT)),
        prefix="sampling_params.",
        nullable=True,
    ),
    Unknown.IGNORED,
)


# --- sessions and realtime ------------------------------------------------------------------------

_SESSION_SAMPLING = FieldTable(
    Sampling,
    "SamplingBody",
    (
        *same("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
        *same("frequency_penalty", "presence_penalty", "logit_bias", "seed", "stop", "stop_token_ids"),
        *same("ignore_eos", "logprobs", "skip_special_tokens"),
        Absent("n", "is not supported here: a session has one history; fork it for more choices"),
        Absent("prompt_logprobs", NOT_BUILT),
        Absent("keep_stop", NOT_BUILT),
    ),
    prefix="sampling.",
    nullable=False,
    other_names={"messages": "input"},
)

_SESSION_ANSWER: tuple[Entry, ...] = (
    _response_format(),
    _constraint("grammar", dict[str, Any], native_grammar),
    *same("tools", "tool_choice", "parallel_tool_calls", "thinking", "thinking_tokens", "reasoning_effort"),
    Absent("chat_template_kwargs", "is not supported here: use thinking and reasoning_effort"),
    Absent("separate_reasoning", "is not supported here: reasoning is always separate"),
    Absent("stream_reasoning", "is not supported here: reasoning is always streamed"),
    *same("keep_reasoning", "expect_return_seconds"),
)

_SESSION_TURN: tuple[Entry, ...] = (
    *same("on_abort", "timeout", "append_history"),
    Absent("continue_final_message", NOT_BUILT),
    Absent("add_generation_prompt", NOT_BUILT),
)

SESSIONS = Dialect(
    "sessions",
    _SESSION_SAMPLING,
    FieldTable(TurnOptions, "TurnBody", _SESSION_TURN, nullable=False),
    FieldTable(AnswerOptions, "TurnBody", _SESSION_ANSWER, nullable=False),
    Unknown.REFUSED,
)

REALTIME = Dialect(
    "realtime",
    _SESSION_SAMPLING,
    FieldTable(TurnOptions, "CommitMessage", _SESSION_TURN, nullable=False),
    FieldTable(AnswerOptions, "CommitMessage", _SESSION_ANSWER, nullable=False),
    Unknown.REFUSED,
)

DIALECTS = (SESSIONS, REALTIME, CHAT, COMPLETIONS, RESPONSES, MESSAGES, GENERATE)


def why_unknown(path: str) -> str:
    """Why a dialect that refuses unknown fields refuses this one."""
    for dialect in DIALECTS:
        for table in dialect.tables if dialect.unknown is Unknown.REFUSED else ():
            for entry in table.absent:
                if table.prefix + entry.field == path:
                    return entry.reason
            if table.prefix and path in (row.written for row in table.rows):
                return f"there is no such field here: turns take it as {table.prefix}{path}"
    name = path.rpartition(".")[2]
    return NOT_BUILT if name in FIELDS or name in MESSAGE_FIELDS else "there is no such field"
