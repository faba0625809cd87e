"""The dialects: for each, a table over the declared sampling fields and one over the declared turn options.

A new dialect is one entry here and a route. A new field is one declaration (`engine.sampling.Sampling` or
`TurnOptions`) and one row, or one reason, in each of these tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from holdfast.engine.fields import INTEGER_MAX, Bound
from holdfast.engine.sampling import Sampling
from holdfast.server.dialects.refused import FIELDS, MESSAGE_FIELDS, NOT_BUILT
from holdfast.server.dialects.table import Absent, Elsewhere, Entry, FieldTable, Row, same
from holdfast.server.dialects.turn_options import TurnOptions

__all__ = [
    "CHAT",
    "COMPLETIONS",
    "COMPLETION_TOKENS",
    "DIALECTS",
    "GENERATE",
    "REALTIME",
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
    """What a dialect does with fields that it does not know."""

    IGNORED = "ignored"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Dialect:
    """One way of writing requests."""

    name: str
    sampling: FieldTable[Sampling]
    turn: FieldTable[TurnOptions]
    unknown: Unknown


_FEW_LOGPROBS = Bound(0, TOP_LOGPROBS_MAX)
_NO_MESSAGES = "is not supported here: the input is not messages"


# --- OpenAI ---------------------------------------------------------------------------------------

_OPENAI_SAMPLING: tuple[Entry, ...] = (
    *same("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *same("frequency_penalty", "presence_penalty", "logit_bias", "seed", "stop", "stop_token_ids"),
    *same("ignore_eos", "n", "skip_special_tokens"),
    Absent("prompt_logprobs", NOT_BUILT),
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
    FieldTable(TurnOptions, "ChatBody", same("on_abort", "timeout", "append_history"), nullable=True),
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
        (*same("on_abort", "timeout"), Absent("append_history", _NO_MESSAGES)),
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
            Row(
                "max_tokens",
                "max_new_tokens",
                default=128,
                null=None,
                bound=Bound(0, INTEGER_MAX),
                value=lambda most: max(1, most),
            ),
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
            Absent("append_history", _NO_MESSAGES),
        ),
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

SESSIONS = Dialect(
    "sessions",
    _SESSION_SAMPLING,
    FieldTable(TurnOptions, "TurnBody", same("on_abort", "timeout", "append_history"), nullable=False),
    Unknown.REFUSED,
)

REALTIME = Dialect(
    "realtime",
    _SESSION_SAMPLING,
    FieldTable(
        TurnOptions,
        "CommitMessage",
        (*same("on_abort", "timeout"), Absent("append_history", _NO_MESSAGES)),
        nullable=False,
    ),
    Unknown.REFUSED,
)

DIALECTS = (SESSIONS, REALTIME, CHAT, COMPLETIONS, GENERATE)


def why_unknown(path: str) -> str:
    """Why a dialect that refuses unknown fields refuses this one."""
    for dialect in DIALECTS:
        for table in (dialect.sampling, dialect.turn):
            for entry in table.absent if dialect.unknown is Unknown.REFUSED else ():
                if table.prefix + entry.field == path:
                    return entry.reason
    name = path.rpartition(".")[2]
    return NOT_BUILT if name in FIELDS or name in MESSAGE_FIELDS else "there is no such field"
