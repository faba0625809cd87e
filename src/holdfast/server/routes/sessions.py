"""`/v1/sessions`: sessions with turns, interrupts, rewinds, forks and moves between tiers.

Unknown fields are refused. A turn's id is its idempotency key.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal, Protocol

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from holdfast.core.retention import PRIORITY_MAX
from holdfast.core.turn import KEEP_ALL
from holdfast.engine.portions import Portions, in_turns
from holdfast.server.dialects.requests import make_body
from holdfast.server.dialects.tables import SESSIONS, Dialect
from holdfast.server.http.answers import FeedAnswer, TurnAnswer, json_answer
from holdfast.server.http.bodies import brings_body
from holdfast.server.http.clients import client_of
from holdfast.server.http.problems import Problem, bad_field, turn_failed
from holdfast.server.limits import too_long
from holdfast.server.link.engine_client import TurnFeed
from holdfast.server.prompts import SessionMessage, plain_messages
from holdfast.server.routes.access import body_of, caller_of, service_of
from holdfast.server.routes.schema import documented
from holdfast.server.routes.session_format import TurnStreamForm, failed, shown_turn
from holdfast.server.sessions import engine_name, new_name, require_name
from holdfast.server.turn_request import PLAIN_ANSWER, Input, SessionGiven, TurnAsked, fingerprint_of

__all__ = [
    "SAMPLING",
    "ChangeBody",
    "Count",
    "Priority",
    "SamplingBody",
    "ask_turn",
    "changed_settings",
    "given_settings",
    "kept_tokens",
    "read_input",
    "router",
]

router = APIRouter(tags=["sessions"])

PAGE = 100
PAGE_MAX = 1000
"""Sessions on a page: the default and the maximum."""

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]


Priority = Annotated[int, msgspec.Meta(ge=-PRIORITY_MAX, le=PRIORITY_MAX)]


class OpenBody(msgspec.Struct, forbid_unknown_fields=True):
    """A session to open; `ttl` in seconds."""

    id: str | None = None
    ttl: float | None = None
    metadata: dict[str, Any] | None = None
    system: str | None = None
    tools: list[dict[str, Any]] | None = None
    pin: bool | None = None
    priority: Priority | None = None
    keep_reasoning: bool | None = None


class ChangeBody(msgspec.Struct, forbid_unknown_fields=True):
    """Changed settings of a session; omitted ones stay. A `ttl` of null is the server's default."""

    ttl: float | msgspec.UnsetType | None = msgspec.UNSET
    metadata: dict[str, Any] | None = None
    pin: bool | None = None
    priority: Priority | None = None
    keep_reasoning: bool | None = None


class SamplingBody(msgspec.Struct, forbid_unknown_fields=True):
    """How a turn is generated; fields left out are the checkpoint's defaults."""


class TurnBody(msgspec.Struct, forbid_unknown_fields=True):
    """One turn: text, messages or token ids; without input, the text sent to `/input` before."""

    input: str | list[int | SessionMessage] | None = None
    turn_id: str | None = None
    sampling: SamplingBody = msgspec.field(default_factory=SamplingBody)
    stream: bool = False
    mode: Literal["steer"] | None = None
    keep_tokens: Count | None = None


SAMPLING = make_body(SamplingBody, SESSIONS.sampling)
TURN = make_body(TurnBody, SESSIONS.turn, SESSIONS.answer, nested={"sampling": SAMPLING})


class InputBody(msgspec.Struct, forbid_unknown_fields=True):
    """More text of the next turn's input, or other text from one of its characters on."""

    text: str
    start: Count | None = None


class InterruptBody(msgspec.Struct, forbid_unknown_fields=True):
    """Interrupt the turn; keep some of its tokens, all, or none."""

    turn_id: str | None = None
    keep_tokens: Count | None = None
    keep: Literal["all", "none"] | None = None


class RewindBody(msgspec.Struct, forbid_unknown_fields=True):
    """Rewind so that `to_turn` turns remain."""

    to_turn: Count
    request_id: str | None = None


class CompactBody(msgspec.Struct, forbid_unknown_fields=True):
    """Replace turns `from_turn` to `to_turn`, counted from 1, by a user message or messages."""

    from_turn: Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
    to_turn: Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
    text: str | None = None
    messages: list[SessionMessage] | None = None
    request_id: str | None = None


class SpillBody(msgspec.Struct, forbid_unknown_fields=True):
    """The tier to move to; the nearest with room if left out."""

    tier: Literal["host", "disk"] | None = None


class RestoreBody(msgspec.Struct, forbid_unknown_fields=True):
    """Empty; may be left out."""


class ForkBody(msgspec.Struct, forbid_unknown_fields=True):
    """A second session, from the last turn or an older one."""

    id: str | None = None
    at_turn: Count | None = None
    request_id: str | None = None


@router.post("/v1/sessions", **documented(OpenBody, "Open a session.", status=201))
async def open_session(request: Request) -> Response:
    service, caller = service_of(request), caller_of(request)
    body = await body_of(request, OpenBody)
    given = SessionGiven(body.ttl, body.system, body.metadata or {}, body.tools or [], given_settings(body))
    record = await service.sessions.open(caller, body.id, given)
    return json_answer(await service.sessions.describe(record), 201)


class HasSettings(Protocol):
    """A request that says how a session is kept."""

    pin: bool | None
    priority: int | None
    keep_reasoning: bool | None


def given_settings(body: HasSettings) -> dict[str, Any]:
    """The settings that a request gives, besides the time to live."""
    given = {"pin": body.pin, "priority": body.priority, "keep_reasoning": body.keep_reasoning}
    return {name: value for name, value in given.items() if value is not None}


class ChangesSettings(HasSettings, Protocol):
    """A request that changes how a session is kept."""

    ttl: float | msgspec.UnsetType | None


def changed_settings(body: ChangesSettings) -> dict[str, Any]:
    """The settings that a request changes."""
    ttl = {} if body.ttl is msgspec.UNSET else {"ttl": body.ttl}
    return {**ttl, **given_settings(body)}


@router.get("/v1/sessions", **documented(None, "The caller's sessions, a page at a time."))
async def list_sessions(request: Request) -> Response:
    service, tenant = service_of(request), caller_of(request).tenant
    limit = _number(request, "limit", PAGE, 1, PAGE_MAX)
    records, more = service.table.page(tenant, _number(request, "after", 0, 0, 1 << 62), limit)
    answers = await service.ask("sessions", names=[engine_name(tenant, record.name) for record in records])
    shown = []
    for answer in answers:
        record = service.table.get(tenant, answer["id"].partition("/")[2])
        if record is not None:
            shown.append(service.sessions.shown(answer, record))
    return json_answer({"sessions": shown, "next": None if more is None else str(more)})


def _number(request: Request, name: str, default: int, least: int, most: int) -> int:
    """An integer of the query string."""
    given = request.query_params.get(name)
    if given is None:
        return default
    if not (given.isascii() and given.isdigit() and len(given) < 20 and least <= int(given) <= most):
        raise bad_field(name, f"must be an integer from {least} to {most}")
    return int(given)


@router.get("/v1/sessions/{session_id}", **documented(None, "One session."))
async def get_session(request: Request, session_id: str) -> Response:
    service = service_of(request)
    record = await service.sessions.find(caller_of(request).tenant, session_id)
    return json_answer(await service.sessions.describe(record))


@router.patch("/v1/sessions/{session_id}", **documented(ChangeBody, "Change settings of a session."))
async def change_session(request: Request, session_id: str) -> Response:
    service = service_of(request)
    body = await body_of(request, ChangeBody)
    record = await service.sessions.find(caller_of(request).tenant, session_id)
    await service.sessions.change(record, changed_settings(body), body.metadata)
    return json_answer(await service.sessions.describe(record))


@router.delete("/v1/sessions/{session_id}", **documented(None, "Close a session."))
async def close_session(request: Request, session_id: str) -> Response:
    await service_of(request).sessions.close(caller_of(request), session_id)
    return json_answer({"id": session_id, "state": "CLOSED"})


@router.post("/v1/sessions/{session_id}/interrupt", **documented(InterruptBody, "Interrupt a turn."))
async def interrupt(request: Request, session_id: str) -> Response:
    service = service_of(request)
    body = await body_of(request, InterruptBody)
    record = await service.sessions.find(caller_of(request).tenant, session_id)
    turn = _given_name(body.turn_id, "turn_id")
    await service.sessions.interrupt(record, turn, kept_tokens(body.keep_tokens, body.keep))
    return json_answer(await service.sessions.describe(record))


def _given_name(name: str | None, field: str) -> str | None:
    """An optional name; raises if it is invalid."""
    return None if name is None else require_name(name, field)


def kept_tokens(count: int | None, keep: str | None) -> int | None:
    """How much of a turn stays: a number, -1 for all, None for nothing."""
    if (count is None) == (keep is None):
        raise bad_field("keep_tokens", "give either keep_tokens or keep")
    if count is not None:
        return count
    return KEEP_ALL if keep == "all" else None


def _steered_tokens(mode: str | None, count: int | None) -> int | None:
    """How much of the turn before stays: a number, or -1 for all; None for a turn that does not steer."""
    if mode == "steer":
        return KEEP_ALL if count is None else count
    if count is not None:
        raise bad_field("keep_tokens", "needs the mode steer")
    return None


@router.post("/v1/sessions/{session_id}/spill", **documented(SpillBody, "Move a session off the device."))
async def spill(request: Request, session_id: str) -> Response:
    service = service_of(request)
    body = await body_of(request, SpillBody)
    record = await service.sessions.find(caller_of(request).tenant, session_id)
    if not await service.sessions.move(record, body.tier):
        raise Problem(409, "cannot_spill", "the tier has no room, or the session has nothing to move", "tier")
    return json_answer(await service.sessions.describe(record))


@router.post(
    "/v1/sessions/{session_id}/restore",
    **documented(RestoreBody, "Restore a session to the device.", required=False),
)
async def restore(request: Request, session_id: str) -> Response:
    service = service_of(request)
    if brings_body(request):
        await body_of(request, RestoreBody)
    record = await service.sessions.find(caller_of(request).tenant, session_id)
    if not await service.sessions.move(record, "device"):
        raise Problem(
            409, "cannot_restore", "the session is already on the device, or the device has no room for it"
        )
    return json_answer(await service.sessions.describe(record))


@router.post("/v1/sessions/{session_id}/rewind", **documented(RewindBody, "Rewind to an earlier turn."))
async def rewind(request: Request, session_id: str) -> Response:
    service = service_of(request)
    body = await body_of(request, RewindBody)
    record = await service.sessions.find(caller_of(request).tenant, session_id)
    await service.sessions.rewind(record, body.to_turn, _given_name(body.request_id, "request_id"))
    return json_answer(await service.sessions.describe(record))


@router.post(
    "/v1/sessions/{session_id}/compact", **documented(CompactBody, "Replace a range of turns by given text.")
)
async def compact(request: Request, session_id: str) -> Response:
    service = service_of(request)
    body = await body_of(request, CompactBody)
    record = await service.sessions.find(caller_of(request).tenant, session_id)
    if body.from_turn > body.to_turn:
        raise bad_field("to_turn", "must not be less than from_turn")
    if (body.text is None) == (body.messages is None):
        raise bad_field("text", "give either text or messages")
    if body.text == "":
        raise bad_field("text", "must not be empty", "empty_turn")
    messages = None if body.messages is None else await in_turns(plain_messages(body.messages))
    said = Input(text=body.text) if messages is None else Input(messages=messages)
    request_id = _given_name(body.request_id, "request_id")
    left = await service.sessions.compact(record, (body.from_turn, body.to_turn), said, request_id)
    return json_answer({**await service.sessions.describe(record), "recomputed_tokens": left})


@router.post("/v1/sessions/{session_id}/fork", **documented(ForkBody, "Fork a session.", status=201))
async def fork(request: Request, session_id: str) -> Response:
    service = service_of(request)
    body = await body_of(request, ForkBody)
    record = await service.sessions.find(caller_of(request).tenant, session_id)
    request_id = _given_name(body.request_id, "request_id")
    forked = await service.sessions.fork(record, body.id, body.at_turn, request_id)
    return json_answer(await service.sessions.describe(forked), 201)


@router.post(
    "/v1/sessions/{session_id}/input",
    **documented(InputBody, "Append to the next turn's input; it is prefilled at once."),
)
async def say(request: Request, session_id: str) -> Response:
    service = service_of(request)
    body = await body_of(request, InputBody)
    record = await service.sessions.find(caller_of(request).tenant, session_id)
    said = service.listening.said(record)
    start = len(said.text) if body.start is None else body.start
    if start > len(said.text):
        raise bad_field("start", f"the input has {len(said.text)} characters", "unknown_position")
    text = said.text[:start] + body.text
    if len(text) > service.prompts.room.text_bytes:
        raise too_long(service.prompts.room, "text")
    said.text = text
    service.listening.hear(record, Input(text=text) if text else None)
    return json_answer({"id": record.name, "characters": len(text)})


@router.post("/v1/sessions/{session_id}/turns", **documented(TURN.described, "Run a turn."))
async def take_turn(request: Request, session_id: str) -> Response:
    service = service_of(request)
    body = await body_of(request, TURN.read)
    record = await service.sessions.find(caller_of(request).tenant, session_id)
    name = _given_name(body.turn_id, "turn_id") or new_name("t")
    given = body.input
    if given is None and not (given := service.listening.take(record, name)):
        raise bad_field("input", "give the input of the turn, or send it to /input before", "empty_turn")
    steers = _steered_tokens(body.mode, body.keep_tokens)
    asked = replace(await in_turns(ask_turn(SESSIONS, body, given)), name=name, steers=steers)
    feed = await service.start_turn(record, asked, client_of(request.scope))

    def leave() -> None:
        service.leave(feed, asked.options.keeps)

    if body.stream:
        return FeedAnswer([feed], TurnStreamForm(feed), leave, lambda problem: failed(asked.name, problem))
    return TurnAnswer(_whole(asked.name, feed), leave)


class AsksTurn(Protocol):
    """A request for a turn of a session, in either dialect."""

    turn_id: str | None
    sampling: SamplingBody


def ask_turn(
    dialect: Dialect, body: AsksTurn, given: str | list[int | SessionMessage]
) -> Portions[TurnAsked]:
    """A turn as the service takes it; `given` is its input. In portions."""
    assert isinstance(body, msgspec.Struct), "requests are structs"
    answer = dialect.answer.read(body)
    content = (given, body.sampling) if answer == PLAIN_ANSWER else (given, body.sampling, answer)
    return TurnAsked(
        (yield from read_input(given)),
        dialect.sampling.read(body.sampling),
        _given_name(body.turn_id, "turn_id") or new_name("t"),
        dialect.turn.read(body),
        answer,
        fingerprint=None if body.turn_id is None else fingerprint_of(content),
        fields=dialect.names(body.sampling, body),
    )


def read_input(given: str | list[int | SessionMessage]) -> Portions[Input]:
    """The input of a turn; raises the problem with it. In portions."""
    if isinstance(given, str):
        if not given:
            raise bad_field("input", "must not be empty", "empty_turn")
        return Input(text=given)
    tokens = [entry for entry in given if isinstance(entry, int)]
    messages = [entry for entry in given if isinstance(entry, SessionMessage)]
    if tokens and messages:
        raise bad_field("input", "must be all token ids or all messages")
    if tokens:
        return Input(tokens=tokens)
    return Input(messages=(yield from plain_messages(messages, "input")))


async def _whole(name: str, feed: TurnFeed) -> Response:
    end = await feed.result()
    if end.outcome == "failed":
        raise turn_failed(end.reason)
    return json_answer(shown_turn(name, feed))
