"""Every field that a client can send has a row in the table of limits, and the decoder applies it."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from msgspec import inspect

from holdfast.core import deadlines
from holdfast.engine.durable import session_log
from holdfast.engine.options import EngineOptions
from holdfast.engine.start.tuning import CPU_RUNNING, GPU_RUNNING
from holdfast.server import app, closed_sessions, limits, ordinary_sessions, prompts
from holdfast.server.http import bodies, connections, keys, middleware, websockets
from holdfast.server.http.bodies import Reading, decode_json, decode_large
from holdfast.server.http.problems import Problem
from holdfast.server.limits import LIMITS, Bound, Room, find_limit
from holdfast.server.link import missed_messages, peers, remote_engine, rounds
from holdfast.server.options import ServerOptions
from holdfast.server.responses import conversations, running, store
from holdfast.server.routes import (
    live,
    realtime_channel,
    realtime_channels,
    realtime_messages,
    realtime_outbox,
    responses,
    responses_body,
    responses_socket,
    schema,
    sessions,
    sglang_sessions,
)
from holdfast.server.routes.realtime_openai import client_events
from holdfast.server.text import lanes
from tests.server.serving import Server

ROOM = Room(tokens=64, text_bytes=512)
KINDS: list[type[msgspec.Struct]] = [
    *schema._described,
    *get_args(realtime_messages.DECODED),
    *get_args(client_events.DECODED),
    live.LookMessage,
    responses_socket.Envelope,
    responses_socket.SteerMessage,
]
SCALARS = (inspect.StrType, inspect.IntType, inspect.FloatType, inspect.ListType, inspect.DictType)


def alternatives(kind: inspect.Type) -> Iterator[inspect.Type]:
    if isinstance(kind, inspect.UnionType):
        for inner in kind.types:
            yield from alternatives(inner)
    elif isinstance(kind, inspect.Metadata):
        yield from alternatives(kind.type)
    else:
        yield kind


def structs_of(kind: inspect.Type) -> Iterator[inspect.StructType]:
    """The structs inside of a type."""
    for each in alternatives(kind):
        if isinstance(each, inspect.StructType):
            yield each
        elif isinstance(each, inspect.ListType):
            yield from structs_of(each.item_type)


def walk(kind: inspect.StructType, path: tuple[str, ...] = ()) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    """Every field of a struct and of those inside: its struct's name, its path, its type."""
    for field in kind.fields:
        place = (*path, field.encode_name)
        yield kind.cls.__name__, place, field.type
        for inner in structs_of(field.type):
            yield from walk(inner, place)


def described(kind: type[msgspec.Struct]) -> inspect.StructType:
    found = inspect.type_info(kind)
    assert isinstance(found, inspect.StructType)
    return found


FIELDS = [
    (kind, struct, path, types)
    for kind in dict.fromkeys(KINDS)
    for struct, path, types in walk(described(kind))
    if any(isinstance(each, SCALARS) for each in alternatives(types))
]


def is_bounded(kind: inspect.Type, bound: Bound) -> bool:
    """Whether a bound covers values of a type, and those inside."""
    match kind:
        case inspect.StrType():
            return bound.characters is not None or bound.context
        case inspect.IntType() | inspect.FloatType():
            return bound.low is not None or bound.context
        case inspect.ListType():
            counted = bound.entries is not None or bound.context
            inner = [each for each in alternatives(kind.item_type) if isinstance(each, SCALARS)]
            return counted and all(is_bounded(each, bound) for each in inner)
        case inspect.DictType():
            if bound.size is not None:
                return True
            inner = [kind.key_type, *alternatives(kind.value_type)]
            return bound.entries is not None and all(is_bounded(each, bound) for each in inner)
    return True


def unbounded(kind: type[msgspec.Struct]) -> list[str]:
    """Fields of a request without a bound in the table."""
    found = []
    for struct, path, types in walk(described(kind)):
        scalars = [each for each in alternatives(types) if isinstance(each, SCALARS)]
        limit = find_limit(struct, path[-1])
        if scalars and (limit is None or not all(is_bounded(each, limit.bound) for each in scalars)):
            found.append(f"{struct}.{path[-1]}")
    return found


def test_every_request_type_is_walked() -> None:
    assert app.ROUTE_MODULES and len(KINDS) >= 20 and len(FIELDS) >= 100


@pytest.mark.parametrize("kind", dict.fromkeys(KINDS), ids=lambda kind: kind.__name__)
def test_every_field_has_a_row(kind: type[msgspec.Struct]) -> None:
    assert unbounded(kind) == []


def test_a_field_without_a_row_is_found() -> None:
    class Inner(msgspec.Struct):
        fresh: list[str] = []

    class NewBody(msgspec.Struct):
        anything: dict[str, int] | None = None
        inner: list[Inner] = []
        n: str | None = None
        top_p: float = 0.0

    assert unbounded(NewBody) == ["NewBody.anything", "NewBody.inner", "Inner.fresh", "NewBody.n"]


def test_every_row_is_for_a_field() -> None:
    """No row is left over from a field that is gone, and each says what it is."""
    named = {(struct, path[-1]) for _, struct, path, _ in FIELDS}
    for limit in LIMITS:
        struct, _, field = limit.field.partition(".")
        assert any(field == name and struct in ("*", owner) for owner, name in named), limit.field
        assert limit.words


def over(kind: inspect.Type, bound: Bound) -> Iterator[Any]:
    """Values just over a bound, of a type."""
    match kind:
        case inspect.StrType():
            most = ROOM.text_bytes if bound.context else bound.characters
            assert most is not None
            yield "x" * (most + 1)
        case inspect.IntType() | inspect.FloatType():
            if bound.low is not None and bound.high is not None:
                yield int(bound.high) + 1
                yield int(bound.low) - (0 if bound.above else 1)
        case inspect.ListType():
            items = list(alternatives(kind.item_type))
            if any(isinstance(each, inspect.IntType) for each in items) and bound.context:
                yield [1] * (ROOM.tokens + 1)
            elif bound.entries is not None and any(isinstance(each, SCALARS) for each in items):
                filler = "x" if isinstance(items[0], inspect.StrType) else [1] if bound.context else 1
                yield [filler] * (bound.entries + 1)
        case inspect.DictType():
            if bound.size is not None:
                yield {"x": "y" * bound.size}
                yield nested(bound.depth or 0)
            else:
                assert bound.entries is not None
                yield {str(number): 1 for number in range(bound.entries + 1)}


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth + 1):
        value = {"x": value}
    return value


def filled(kind: inspect.StructType, path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """A body with the fields that it needs, and a value at a path."""
    body: dict[str, Any] = {}
    if kind.tag_field is not None:
        body[kind.tag_field] = kind.tag
    for field in kind.fields:
        if field.encode_name == path[0]:
            if len(path) == 1:
                body[path[0]] = value
                continue
            inner = next(
                each for each in structs_of(field.type) if path[1] in {f.encode_name for f in each.fields}
            )
            made = filled(inner, path[1:], value)
            plain = any(isinstance(each, inspect.StructType) for each in alternatives(field.type))
            body[path[0]] = made if plain else [made]
        elif field.required:
            body[field.encode_name] = sample(field.type)
    return body


def sample(kind: inspect.Type) -> Any:
    first = next(alternatives(kind))
    match first:
        case inspect.StrType():
            return "x"
        case inspect.IntType():
            return 1
        case inspect.ListType():
            return []
        case inspect.StructType():
            return {field.encode_name: sample(field.type) for field in first.fields if field.required}
    raise AssertionError(first)


CASES = [
    (kind, path, value)
    for kind, struct, path, types in FIELDS
    if (limit := find_limit(struct, path[-1])) is not None
    for each in alternatives(types)
    for value in over(each, limit.bound)
]


def test_there_are_cases() -> None:
    assert len(CASES) > 150


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    CASES,
    ids=[f"{kind.__name__}.{'.'.join(path)}-{number}" for number, (kind, path, _) in enumerate(CASES)],
)
def test_a_value_just_over_its_bound_is_refused_by_name(
    kind: type[msgspec.Struct], path: tuple[str, ...], value: Any
) -> None:
    body = json.dumps(filled(described(kind), path, value)).encode()
    with pytest.raises(Problem) as caught:
        decode_json(body, kind, ROOM)
    assert caught.value.status == 400
    named = (caught.value.param or "").replace("[0]", "").replace("[...]", "")
    assert named == ".".join(path), caught.value.message


# --- large bodies ---------------------------------------------------------------------------------


async def never(_: memoryview) -> memoryview:
    raise AssertionError("a small body is read at once")


async def packed(content: memoryview) -> memoryview:
    return memoryview(msgspec.msgpack.encode(msgspec.json.decode(content)))


def test_bodies_over_a_size_are_read_elsewhere_and_checked_here() -> None:
    kind = next(each for each in KINDS if each.__name__ == "TokenizeBody")

    def problem_with(body: dict[str, Any], read: Callable[[memoryview], Awaitable[memoryview]]) -> Problem:
        with pytest.raises(Problem) as caught:
            asyncio.run(decode_large(json.dumps(body).encode(), kind, Reading(1 << 20, ROOM, read)))
        return caught.value

    long = "x" * (bodies.LARGE_BYTES + 1)
    assert problem_with({"prompt": "x" * 600}, never).param == "prompt"
    with pytest.raises(AssertionError, match="read at once"):
        problem_with({"prompt": long}, never)
    assert problem_with({"prompt": long}, packed).code == "context_length_exceeded"
    wrong = problem_with({"prompt": 1, "text": long}, packed)
    assert (wrong.code, wrong.param) == ("invalid_value", "prompt")


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("/v1/completions", {"prompt": [1] * 600_000}, "prompt", "too_many_values"),
        ("/v1/completions", {"prompt": [1] * 9000}, "prompt", "context_length_exceeded"),
        ("/generate", {"input_ids": [1] * 9000}, "input_ids", "context_length_exceeded"),
        ("/generate", {"text": "x" * 9000}, "text", "context_length_exceeded"),
        ("/generate", {"text": "x" * 200_000}, "text", "context_length_exceeded"),
        ("/detokenize", {"tokens": [1] * 9000}, "tokens", "context_length_exceeded"),
        ("/tokenize", {"text": "x" * 9000}, "text", "context_length_exceeded"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 9000}]}, "messages", None),
        ("/v1/sessions", {"system": "x" * 200_000}, "system", "context_length_exceeded"),
        ("/v1/sessions", {"system": "x" * 8000}, "system", "context_length_exceeded"),
        ("/v1/sessions", {"metadata": {"x": list(range(400_000))}}, "metadata", "too_many_values"),
        ("/v1/completions", {"prompt": "x", "stop_token_ids": [1] * 5000}, "stop_token_ids", None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_server_refuses_what_is_too_long(
    echo: Server, path: str, body: dict[str, Any], param: str, code: str | None
) -> None:
    answer = echo.post(path, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and len(answer.text) < 1000
    assert code is None or error["code"] == code


def test_a_large_body_that_fits_is_served(echo: Server) -> None:
    """Prompts of more than a body that is read at once, each of which fits."""
    prompts = ["abc " * 1000] * 20
    answer = echo.post("/v1/completions", {"prompt": prompts, "max_tokens": 1})
    assert answer.status_code == 200 and len(answer.json()["choices"]) == len(prompts)
    tokens = echo.post("/tokenize", {"prompt": "é" * 4000}).json()
    assert tokens["count"] == 8000
    assert echo.post("/detokenize", {"tokens": tokens["tokens"]}).json()["text"] == "é" * 4000


def test_values_have_room_for_a_whole_context() -> None:
    assert limits.values_max(Room(1 << 20, 1 << 24)) >= 1 << 20


# --- the documentation --------------------------------------------------------------------------------

DOCUMENT = Path(__file__).parents[2] / "docs" / "operations.md"
BEGIN, END = "<!-- limits:begin -->", "<!-- limits:end -->"
CALLS = {
    "OpenSessionBody": "/open_session",
    "CompletionBody": "/v1/completions",
    "ResponseBody": "/v1/responses",
    "Message": "messages",
    "MessageBlock": "/v1/messages",
    "SteerMessage": "response.steer",
    "StormBody": "/v1/storm",
    "SessionFields": "session.update",
    "ResponseFields": "response.create",
}


def drawn() -> str:
    """The table of limits as the documentation shows it: fields of the same limit in one row."""
    rows: dict[str, list[str]] = {}
    for limit in LIMITS:
        struct, _, name = limit.field.partition(".")
        rows.setdefault(limit.words, []).append(
            f"`{name}`" if struct == "*" else f"`{name}` of `{CALLS[struct]}`"
        )
    lines = ["| field | limit |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {', '.join(names)} | {words} |" for words, names in rows.items())])


def test_the_documentation_shows_the_table() -> None:
    shown = DOCUMENT.read_text().partition(BEGIN)[2].partition(END)[0].strip()
    assert shown == drawn(), "paste this between the marks:\n" + drawn()


def count(number: int) -> str:
    return f"{number:,}"


def mebibytes(number: int) -> str:
    return f"{number >> 20} Mi"


SERVER, ENGINE = ServerOptions(), EngineOptions()
SHOWN: dict[str, tuple[str, ...]] = {
    "body of a request": (mebibytes(SERVER.body_limit) + "B",),
    "all unfinished bodies": (mebibytes(SERVER.bodies_limit) + "B",),
    "values in one JSON body": (count(limits.VALUES_MAX), "twice the context length"),
    "headers": (f"{middleware.HEADER_BYTES_MAX >> 10} KiB",),
    "time until the headers have arrived": (f"{SERVER.header_seconds:.0f} s",),
    "time until the body has arrived": (f"{SERVER.body_seconds:.0f} s",),
    "WebSocket message": (mebibytes(SERVER.message_limit) + "B",),
    "WebSocket pings, pongs and fragments under 1 KiB": (
        f"{count(websockets.FRAMES_SAVED_MAX)} at once",
        f"{websockets.FRAMES_A_SECOND} a second",
    ),
    "connections without a valid key": (count(connections.UNAUTHENTICATED_MAX), "a quarter"),
    "all connections": (f"less {connections.DESCRIPTORS_RESERVED}",),
    "connections to an engine that have not greeted yet": (
        count(peers.STRANGERS_MAX),
        f"{peers.HANDSHAKES_AT_ONCE} handshakes",
    ),
    "keys": (count(keys.KEYS_MAX),),
    "sessions of the server": (count(ENGINE.max_sessions),),
    "sessions of a tenant": ("half of `--max-sessions`",),
    "hidden sessions of chats without a session": (count(SERVER.found_sessions),),
    "time that stored responses and conversations are kept after their last use": (
        f"{SERVER.response_ttl / 86_400:.0f} days",
    ),
    "sessions of responses of a tenant": (count(store.HIDDEN_MAX), mebibytes(closed_sessions.KEPT_MAX)),
    "items kept for the responses of a tenant": (mebibytes(store.NOTES_MAX),),
    "items of a conversation besides its responses": (mebibytes(conversations.BYTES_MAX) + "B",),
    "events kept of responses that have ended": (count(running.EVENTS_MAX),),
    "tokens of SGLang's ordinary sessions": (
        f"{count(ordinary_sessions.SESSION_TOKENS_MAX)} of a session",
        f"{count(sglang_sessions.TENANT_TOKENS_MAX)} of a tenant",
    ),
    "pairs in `metadata` of a response or conversation": (
        f"{responses_body.METADATA_PAIRS_MAX},",
        f"{responses_body.METADATA_KEY_MAX} and",
        f"{responses_body.METADATA_VALUE_MAX} characters",
    ),
    "requests of a WebSocket that wait": (
        f"{responses_socket.WAITING_MAX};",
        f"{responses_socket.STEERS_MAX} of `response.steer`",
    ),
    "messages that a realtime client does not read": (
        mebibytes(realtime_outbox.BYTES_MAX) + "B",
        f"{realtime_outbox.STALL_SECONDS:.0f} s",
    ),
    "messages kept for a realtime client that comes back": (
        f"{realtime_channel.REPLAY_BYTES_MAX >> 10} KiB",
        mebibytes(realtime_channel.REPLAY_LAST_BYTES_MAX) + "B",
        f"{realtime_channels.REPLAY_SECONDS:.0f} s",
        count(realtime_channels.DETACHED_MAX),
    ),
    "messages that API processes leave at an engine when they end": (
        mebibytes(missed_messages.KEPT_BYTES_MAX) + "B",
        f"{missed_messages.KEPT_TICKS * peers.TICK_SECONDS:.0f} s",
    ),
    "messages of a realtime client that wait for a turn": (f"{realtime_channel.WAITING_MAX} (",),
    "unsent data of a link between an API process and an engine": (
        mebibytes(peers.UNSENT_MAX) + "B",
        mebibytes(remote_engine.UNSENT_MAX) + "B",
    ),
    "sessions in one page of `GET /v1/sessions`": (f"{sessions.PAGE},", count(sessions.PAGE_MAX)),
    "items in one page of a response or conversation": (f"{responses.PAGE},", count(responses.PAGE_MAX)),
    "memory of a tenant": ("all of it",),
    "pinned memory of a tenant": ({0.25: "a quarter"}[ENGINE.tenant_pinned],),
    "queued turns": (count(ENGINE.max_queue),),
    "running turns": (f"{CPU_RUNNING} on a CPU, at most {GPU_RUNNING} on a GPU",),
    "records waiting for the journal": (count(session_log.UNWRITTEN_MAX),),
    "input of a tenant waiting to be tokenised": (mebibytes(lanes.WAITING_BYTES_MAX) + "B",),
    "time to render a chat template; to process one input": (
        f"{prompts.RENDER_SECONDS:.0f} s; {lanes.JOB_SECONDS:.0f} s",
    ),
    "memory growth of a text process": (
        mebibytes(prompts.MEMORY_BYTES) + "B",
        f"{prompts.TOKEN_BYTES >> 10} KiB per token",
    ),
    "commands, waiting requests and reports between two steps": (f"{rounds.BUDGET_SECONDS * 1000:.0f} ms",),
    "sessions that expire and turns past their deadline": (f"{deadlines.DUE_MAX} at a time",),
}
"""What a row of the table of sizes and times says, from the code that applies it."""


def size_rows() -> dict[str, list[str]]:
    """The rows of the first table under *Limits*: what is limited, the limit, the option."""
    section = DOCUMENT.read_text().partition("\n## Limits\n")[2].partition("Request fields, in all")[0]
    cells = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return {name: rest for name, *rest in cells if name not in ("what", "---")}


def test_the_table_of_sizes_has_the_rows_that_are_compared() -> None:
    assert sorted(size_rows()) == sorted(SHOWN)


@pytest.mark.parametrize("name", SHOWN)
def test_a_row_of_sizes_shows_what_the_code_applies(name: str) -> None:
    limit = size_rows()[name][0]
    for words in SHOWN[name]:
        assert re.search(rf"(?<![0-9,.]){re.escape(words)}", limit), (words, limit)


OPTIONS = {
    "body_limit": SERVER,
    "bodies_limit": SERVER,
    "message_limit": SERVER,
    "header_seconds": SERVER,
    "body_seconds": SERVER,
    "found_sessions": SERVER,
    "response_ttl": SERVER,
    "tenant_sessions": SERVER,
    "max_sessions": ENGINE,
    "max_queue": ENGINE,
    "max_running": ENGINE,
    "tenant_pinned": ENGINE,
}


@pytest.mark.parametrize("option", OPTIONS)
def test_a_limit_that_is_an_option_names_it(option: str) -> None:
    assert option in OPTIONS[option].__dataclass_fields__
    flag = "`--" + option.replace("_", "-") + "`"
    assert [row for row in size_rows().values() if flag in row[-1]], flag
