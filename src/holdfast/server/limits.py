"""The limits of every request field, in one table.

`LIMITS` has a row for each field that can be long, large or many: the field (`Struct.field`, or `*.field` for
the structs that have no row of their own), its bound, and the words of the documentation. Rows of sampling
fields and turn options come from the dialects' tables. `check` applies them to a decoded value of any
dialect, `checking` in portions to one that may be large; a test walks over every field of every request type
and finds none without a row. Bounds that follow from the model (its context) come with a `Room`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any

import msgspec

from holdfast.core.retention import PRIORITY_MAX
from holdfast.core.tokens import TOKEN_MAX
from holdfast.engine.fields import INTEGER_MAX, Bound
from holdfast.engine.portions import Portions, finish
from holdfast.engine.sampling import CHOICES_MAX, LOGPROBS_MAX
from holdfast.engine.tools.request import TOOLS_MAX
from holdfast.server.dialects.answer_options import GRAMMAR, TOOLS
from holdfast.server.dialects.tables import DIALECTS
from holdfast.server.http.problems import Problem, bad_field
from holdfast.server.options import TTL_MAX

__all__ = ["LIMITS", "Bound", "Limit", "Room", "check", "checking", "find_limit", "too_long", "values_max"]

PORTION = 64
"""Structs in one portion of a check."""

MESSAGES_MAX = 8192
PARTS_MAX = 1024
PROMPTS_MAX = 1024
METADATA_BYTES_MAX = 64 << 10
METADATA_DEPTH_MAX = 64
SYSTEM_BYTES_MAX = 1 << 20
CALLS_BYTES_MAX = 1 << 20
ITEMS_BYTES_MAX = 8 << 20
NAME_CHARACTERS_MAX = 128
WORD_CHARACTERS_MAX = 1024
EVENT_ID_CHARACTERS_MAX = 512
STEER_BYTES_MAX = 1 << 18
REALTIME_SHOWN_AGAIN = (
    "*.audio",
    "SessionFields.include",
    "*.tracing",
    "*.truncation",
    "*.voice",
    "*.speed",
    "*.turn_detection",
    "*.input_audio_format",
    "*.output_audio_format",
    "*.input_audio_transcription",
    "*.input_audio_noise_reduction",
)
"""Settings of OpenAI's realtime sessions that are shown again as they came."""
VALUES_MAX = 1 << 18
"""Values in one body, where the context is not longer: numbers, texts, keys, lists and objects."""


@dataclass(frozen=True, slots=True)
class Room:
    """The model's context: its tokens, and the bytes of the longest text that could fit."""

    tokens: int
    text_bytes: int


@dataclass(frozen=True, slots=True)
class Limit:
    """One row: the field, its bound, and the words of the documentation."""

    field: str
    bound: Bound
    words: str


def _numbers(field: str, low: float, high: float, words: str = "") -> Limit:
    bound = Bound(low=low, high=high)
    return Limit(field, bound, words or _words(bound))


def _words(bound: Bound) -> str:
    """A bound as the documentation shows it."""
    parts = []
    if bound.size is not None:
        parts.append(f"{_bytes(bound.size)}, nested {bound.depth} deep")
        if bound.entries is not None:
            parts.append(f"{bound.entries:,} entries")
    elif bound.entries is not None and bound.characters is not None and bound.low is None:
        parts.append(f"{bound.entries} of {bound.characters:,} characters")
    elif bound.entries is not None:
        parts.append(f"{bound.entries:,} tokens")
    elif bound.characters is not None:
        parts.append(f"{bound.characters:,} characters")
    if bound.low is not None and bound.high is not None and bound.high != TOKEN_MAX:
        if bound.high >= 1 << 62:
            parts.append("64 bits")
        else:
            low, high = _number(bound.low), _number(bound.high)
            parts.append(f"more than {low}, at most {high}" if bound.above else f"{low} to {high}")
    return ", ".join(parts)


def _bytes(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def _number(value: float) -> str:
    if value == INTEGER_MAX:
        return "2^31"
    return f"{int(value):,}" if value == int(value) else f"{value:g}"


def _name(field: str) -> Limit:
    bound = Bound(characters=NAME_CHARACTERS_MAX, entries=PROMPTS_MAX, code="bad_name")
    return Limit(field, bound, f"{NAME_CHARACTERS_MAX} of A-Z a-z 0-9 _ . -")


def _declared_limits() -> Iterator[Limit]:
    """Rows for the fields of the dialects' tables: one for each name, one more where a struct differs."""
    seen: dict[str, Bound] = {}
    own: set[str] = set()
    for dialect in DIALECTS:
        for table in dialect.tables:
            for row in table.rows:
                bound, name = table.bound_of(row), row.written
                if bound is None or row.kind is bool:
                    continue
                place = f"*.{name}"
                if seen.setdefault(name, bound) != bound:
                    place = f"{table.struct}.{name}"
                if place not in own:
                    own.add(place)
                    yield Limit(place, bound, _words(bound))


_TEXT = Bound(context=True)
_SHOWN_AGAIN = Bound(-1e6, 1e6, characters=16 << 10, entries=1024, size=16 << 10, depth=16)
_FITS = "the context length; far longer texts are refused before they are tokenised"

_ITEMS = Bound(entries=MESSAGES_MAX, size=ITEMS_BYTES_MAX, depth=16, context=True)
_SMALL = Bound(characters=NAME_CHARACTERS_MAX, size=4096, depth=8)

LIMITS: tuple[Limit, ...] = (
    # Names.
    *map(_name, ("*.id", "*.turn_id", "*.request_id", "*.session_id", "*.rid")),
    Limit("*.session", Bound(characters=4 * NAME_CHARACTERS_MAX), "a session's name"),
    Limit("*.engine", Bound(characters=NAME_CHARACTERS_MAX), "an engine's name"),
    Limit("*.tenant", Bound(characters=NAME_CHARACTERS_MAX), "a tenant's name"),
    Limit("*.model", Bound(characters=4 * WORD_CHARACTERS_MAX), "4,096 characters"),
    # Input.
    Limit("*.input", Bound(entries=MESSAGES_MAX, context=True), _FITS),
    Limit("*.prompt", Bound(entries=PROMPTS_MAX, context=True), _FITS),
    Limit("*.text", Bound(entries=PROMPTS_MAX, context=True), _FITS),
    Limit("*.input_ids", Bound(entries=PROMPTS_MAX, low=0, high=TOKEN_MAX, context=True), _FITS),
    Limit("*.token_ids", Bound(low=0, high=TOKEN_MAX, context=True), _FITS),
    Limit("*.tokens", Bound(low=0, high=TOKEN_MAX, context=True), _FITS),
    Limit("*.system", Bound(characters=SYSTEM_BYTES_MAX, context=True), "1 MiB, and 7/8 of the context"),
    Limit("*.messages", Bound(entries=MESSAGES_MAX), "8,192 messages"),
    Limit("*.content", Bound(entries=PARTS_MAX, context=True), f"{_FITS}; 1,024 parts"),
    Limit("*.reasoning_content", _TEXT, _FITS),
    Limit("*.reasoning", _TEXT, _FITS),
    Limit(
        "*.tool_calls", Bound(entries=TOOLS_MAX, size=CALLS_BYTES_MAX, depth=METADATA_DEPTH_MAX), "512, 1 MiB"
    ),
    Limit("*.tool_call_id", Bound(characters=WORD_CHARACTERS_MAX), "1,024 characters"),
    Limit("*.tool_use_id", Bound(characters=WORD_CHARACTERS_MAX), "1,024 characters"),
    Limit(
        "MessageBlock.input", Bound(size=CALLS_BYTES_MAX, depth=METADATA_DEPTH_MAX), "1 MiB, nested 64 deep"
    ),
    Limit("*.input_schema", Bound(size=TOOLS.size, depth=TOOLS.depth), "1 MiB, nested 72 deep"),
    Limit(
        "*.input_examples",
        Bound(entries=PARTS_MAX, size=TOOLS.size, depth=TOOLS.depth),
        "1,024, 1 MiB, nested 72 deep",
    ),
    Limit("Message.output_config", _SMALL, "4 KiB, nested 8 deep"),
    Limit("*.schema", GRAMMAR, _words(GRAMMAR)),
    Limit("*.description", Bound(characters=CALLS_BYTES_MAX), "1,048,576 characters"),
    Limit("*.thinking", _TEXT, _FITS),
    Limit("*.signature", _TEXT, _FITS),
    Limit("*.data", _TEXT, _FITS),
    Limit(
        "*.context_management",
        Bound(size=METADATA_BYTES_MAX, depth=METADATA_DEPTH_MAX),
        "64 KiB, nested 64 deep",
    ),
    _numbers("*.budget_tokens", 1, INTEGER_MAX),
    Limit("*.role", Bound(characters=NAME_CHARACTERS_MAX), "128 characters"),
    Limit("*.name", Bound(characters=WORD_CHARACTERS_MAX), "1,024 characters"),
    Limit("*.type", Bound(characters=NAME_CHARACTERS_MAX), "128 characters"),
    # Responses and conversations.
    Limit("ResponseBody.input", _ITEMS, f"8,192 items, 8 MiB, nested 16 deep; {_FITS}"),
    Limit(
        "SteerMessage.input",
        Bound(entries=64, size=STEER_BYTES_MAX, depth=16, context=True),
        f"64 items, 256 KiB, nested 16 deep; {_FITS}",
    ),
    Limit("*.stream_id", Bound(characters=NAME_CHARACTERS_MAX), "128 characters"),
    Limit("*.items", _ITEMS, "8,192 items, 8 MiB, nested 16 deep"),
    Limit("*.instructions", Bound(characters=SYSTEM_BYTES_MAX, context=True), "as `system`"),
    Limit("*.previous_response_id", Bound(characters=NAME_CHARACTERS_MAX), "128 characters"),
    Limit("*.conversation", _SMALL, "128 characters, or 4 KiB"),
    Limit("*.include", Bound(characters=NAME_CHARACTERS_MAX, entries=64), "64 of 128 characters"),
    Limit("ResponseBody.text", GRAMMAR, _words(GRAMMAR)),
    Limit("ResponseBody.reasoning", _SMALL, "4 KiB, nested 8 deep"),
    Limit("ResponseBody.stream_options", _SMALL, "4 KiB, nested 8 deep"),
    _numbers("*.max_tool_calls", 0, INTEGER_MAX),
    Limit("*.user", Bound(characters=WORD_CHARACTERS_MAX), "1,024 characters"),
    Limit("*.safety_identifier", Bound(characters=WORD_CHARACTERS_MAX), "1,024 characters"),
    Limit("*.prompt_cache_options", _SMALL, "4 KiB, nested 8 deep"),
    Limit("*.prompt_cache_key", Bound(characters=WORD_CHARACTERS_MAX), "1,024 characters"),
    Limit("*.service_tier", Bound(characters=NAME_CHARACTERS_MAX), "128 characters"),
    # Realtime events of OpenAI's clients.
    *(
        Limit(f"*.{field}", Bound(characters=EVENT_ID_CHARACTERS_MAX), "512 characters")
        for field in ("event_id", "item_id", "previous_item_id", "response_id", "call_id")
    ),
    Limit("*.output_modalities", Bound(entries=8, characters=NAME_CHARACTERS_MAX), "8"),
    Limit("*.modalities", Bound(entries=8, characters=NAME_CHARACTERS_MAX), "8"),
    *(
        Limit(field, Bound(1, INTEGER_MAX, characters=NAME_CHARACTERS_MAX), '1 to 2^31, or "inf"')
        for field in (
            "SessionFields.max_output_tokens",
            "ResponseFields.max_output_tokens",
            "*.max_response_output_tokens",
        )
    ),
    Limit("*.effort", Bound(characters=NAME_CHARACTERS_MAX), "128 characters"),
    *(Limit(f"*.{field}", _TEXT, _FITS) for field in ("transcript", "arguments", "output")),
    *(_numbers(f"*.{field}", 0, INTEGER_MAX) for field in ("content_index", "audio_end_ms", "text_end")),
    *(Limit(field, _SHOWN_AGAIN, "16 KiB, nested 16 deep") for field in REALTIME_SHOWN_AGAIN),
    # Session data.
    Limit("*.metadata", Bound(size=METADATA_BYTES_MAX, depth=METADATA_DEPTH_MAX), "64 KiB, nested 64 deep"),
    _numbers("*.ttl", 0, TTL_MAX, "30 days"),
    _numbers("*.priority", -PRIORITY_MAX, PRIORITY_MAX),
    _numbers("OpenSessionBody.timeout", 0, TTL_MAX, "30 days"),
    # Sampling and turn options.
    *_declared_limits(),
    _numbers("*.best_of", 1, CHOICES_MAX),
    Limit("*.top_logprobs_num", Bound(entries=PROMPTS_MAX, low=0, high=LOGPROBS_MAX), "0 to 100"),
    Limit("*.logprob_start_len", Bound(entries=PROMPTS_MAX, low=-1, high=INTEGER_MAX), "-1 to 2^31"),
    Limit("*.return_logprob", Bound(entries=PROMPTS_MAX), "one for each prompt"),
    Limit("*.sampling_params", Bound(entries=PROMPTS_MAX), "one for each prompt"),
    # Places in a session.
    _numbers("*.keep_tokens", 0, INTEGER_MAX),
    _numbers("*.start", 0, INTEGER_MAX),
    _numbers("*.from_turn", 1, INTEGER_MAX),
    _numbers("*.to_turn", 0, INTEGER_MAX),
    _numbers("*.at_turn", 0, INTEGER_MAX),
    _numbers("*.offset", -INTEGER_MAX, INTEGER_MAX, "-2^31 to 2^31"),
    _numbers("*.resume_after_seq", 0, 1 << 53, "0 to 2^53"),
    _numbers("*.capacity_of_str_len", 0, 1 << 53, "0 to 2^53"),
    _numbers("StormBody.sessions", 1, 1000),
    _numbers("StormBody.seconds", 0, 600),
    _numbers("StormBody.seed", 0, INTEGER_MAX),
)

_ROWS = {limit.field: limit for limit in LIMITS}
assert len(_ROWS) == len(LIMITS), "one row for each field"


def find_limit(struct: str, field: str) -> Limit | None:
    """The row of a field: its struct's own, or that of all structs."""
    return _ROWS.get(f"{struct}.{field}") or _ROWS.get(f"*.{field}")


def values_max(room: Room) -> int:
    """The maximum number of values in a body."""
    return max(VALUES_MAX, 2 * room.tokens)


def check(value: msgspec.Struct, room: Room | None) -> None:
    """Raise for the first field out of bounds; without a `room`, the context is not checked."""
    finish(checking(value, room))


def checking(value: msgspec.Struct, room: Room | None) -> Portions[None]:
    """As `check`, in portions."""
    return _check_struct(value, "", room, count())


@cache
def _fields_of(kind: type[msgspec.Struct]) -> tuple[tuple[str, str, Bound | None], ...]:
    """The fields of a struct: as an attribute, as clients write it, and its bound. Fields of any type are
    left out: they are there to be refused."""
    found = []
    for field in msgspec.structs.fields(kind):
        if field.type is not Any:
            limit = find_limit(kind.__name__, field.name)
            found.append((field.name, field.encode_name, None if limit is None else limit.bound))
    return tuple(found)


def _check_struct(value: msgspec.Struct, path: str, room: Room | None, done: Iterator[int]) -> Portions[None]:
    if next(done) % PORTION == PORTION - 1:
        yield
    for name, written, bound in _fields_of(type(value)):
        inner = getattr(value, name)
        if inner is None or inner is True or inner is False:
            continue
        place = f"{path}.{written}" if path else written
        if bound is not None:
            _check(inner, bound, place, room)
        if isinstance(inner, msgspec.Struct):
            yield from _check_struct(inner, place, room, done)
        elif isinstance(inner, list) and inner and isinstance(inner[0], msgspec.Struct):
            for number, entry in enumerate(inner):
                if isinstance(entry, msgspec.Struct):  # A mixture is rejected by its route.
                    yield from _check_struct(entry, f"{place}[{number}]", room, done)


def _check(value: Any, bound: Bound, place: str, room: Room | None) -> None:
    if isinstance(value, str):
        _check_text(value, bound, place, room)
    elif isinstance(value, int | float):
        if not bound.allows(value):
            raise Problem(400, bound.code, f"{place} {bound.range}", place)
    elif isinstance(value, dict) and bound.size is not None:
        _check_size(value, bound, place)
    elif isinstance(value, dict):
        _check_count(len(value), bound.entries, bound, place)
        for key, inner in value.items():
            _check_text(key, bound, place, room)
            _check(inner, bound, place, room)
    elif isinstance(value, list):
        _check_list(value, bound, place, room)


def _check_list(values: list[Any], bound: Bound, place: str, room: Room | None) -> None:
    """A list of token ids is bounded by the context, any other by its number of entries."""
    if bound.context and values and isinstance(values[0], int):
        if room is not None and len(values) > room.tokens:
            raise too_long(room, place, len(values))
    else:
        _check_count(len(values), bound.entries, bound, place)
    if not values or isinstance(values[0], msgspec.Struct):
        return
    if bound.size is not None:
        _check_size(values, bound, place)
        return
    if isinstance(values[0], int):
        numbers = [value for value in values if isinstance(value, int)]
        if bound.low is not None and bound.high is not None:
            for edge in (min(numbers), max(numbers)):
                _check(edge, bound, place, room)
        return
    for value in values:
        _check(value, bound, place, room)


def _check_count(count: int, most: int | None, bound: Bound, place: str) -> None:
    if most is not None and count > most:
        raise bad_field(place, f"may hold at most {most} entries", bound.code)


def _check_text(text: str, bound: Bound, place: str, room: Room | None) -> None:
    if bound.characters is not None and len(text) > bound.characters:
        raise bad_field(place, f"may have at most {bound.characters} characters", bound.code)
    if bound.context and room is not None and len(text) > room.text_bytes:
        raise too_long(room, place)


def too_long(room: Room, place: str, tokens: int | None = None) -> Problem:
    """An input that exceeds the context; `tokens` is its length where it is known."""
    counted = "more than that" if tokens is None else f"{tokens} tokens"
    said = f"This model's maximum context length is {room.tokens} tokens. However, {place} has {counted}."
    return Problem(400, "context_length_exceeded", f"{said} Please shorten it.", place)


def _check_size(value: dict[str, Any] | list[Any], bound: Bound, place: str) -> None:
    """Raise for a value that is too large or too deeply nested."""
    try:
        size = len(msgspec.msgpack.encode(value))
    except OverflowError:
        raise bad_field(place, "holds a number of more than 64 bits") from None
    except RecursionError:
        size = 0  # The depth says it.
    if bound.size is not None and size > bound.size:
        raise bad_field(place, f"may take at most {bound.size} bytes")
    if bound.depth is None:
        return
    level: list[Any] = [value]
    for _ in range(bound.depth + 1):
        level = [inner for outer in level for inner in _within(outer)]
    if level:
        raise bad_field(place, f"may be nested at most {bound.depth} deep")


def _within(value: Any) -> Iterable[Any]:
    """The values that a value holds."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
