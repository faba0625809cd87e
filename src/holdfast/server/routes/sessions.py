"""`/v1/sessions`: conversations whose memory stays, with turns, interruptions, rewinds and forks.

Names and fields are those of the interface; unknown fields are refused. A turn's id is its idempotency key.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from holdfast.core.turn import KEEP_ALL
from holdfast.engine.sampling import BIASED_TOKENS_MAX, Sampling
from holdfast.server.http.answers import StreamAnswer, TurnAnswer, event, json_answer
from holdfast.server.http.bodies import brings_body
from holdfast.server.http.problems import Problem, bad_field
from holdfast.server.link import wire
from holdfast.server.link.engine_client import TurnFeed
from holdfast.server.prompts import SessionMessage, plain_messages
from holdfast.server.routes.access import body_of, caller_of, service_of
from holdfast.server.routes.schema import documented
from holdfast.server.service import Input, TurnAsked, fingerprint_of, make_sampling
from holdfast.server.sessions import engine_name, new_name, require_name

__all__ = [
    "SamplingBody",
    "TurnBody",
    "ask_turn",
    "biases",
    "failed",
    "kept_tokens",
    "router",
    "shown_delta",
    "shown_turn",
    "turn_failure",
]

router = APIRouter(tags=["sessions"])

PAGE = 100
PAGE_MAX = 1000
"""How many sessions a page lists: as many as are asked for, at most so many."""

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]


class OpenBody(msgspec.Struct, forbid_unknown_fields=True):
    """What a session is opened with; `ttl` in seconds."""

    id: str | None = None
    ttl: float | None = None
    metadata: dict[str, Any] | None = None
    system: str | None = None


class SamplingBody(msgspec.Struct, forbid_unknown_fields=True):
    """How a turn is generated; what is left out is as the model's makers suggest."""

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[str, float] = {}
    seed: int | None = None
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def made(self) -> Sampling:
        """The engine's sampling."""
        fields = msgspec.structs.asdict(self)
        fields["logit_bias"] = biases(self.logit_bias, FIELDS["logit_bias"])
        return make_sampling(FIELDS, **fields)


FIELDS = {**{name: f"sampling.{name}" for name in SamplingBody.__struct_fields__}, "messages": "input"}
"""What the fields of a turn are called here."""


def biases(given: dict[str, float], field: str = "logit_bias") -> dict[int, float]:
    """Biases by token id, which JSON writes as text."""
    if len(given) > BIASED_TOKENS_MAX:
        raise bad_field(field, f"may name at most {BIASED_TOKENS_MAX} tokens")
    if not all(name.isascii() and name.isdigit() and len(name) < 12 for name in given):
        raise bad_field(field, "must be keyed by token ids")
    return {int(name): bias for name, bias in given.items()}


class TurnBody(msgspec.Struct, forbid_unknown_fields=True):
    """One turn: text, messages or token ids."""

    input: str | list[int | SessionMessage]
    turn_id: str | None = None
    sampling: SamplingBody = msgspec.field(default_factory=SamplingBody)
    stream: bool = False
    on_abort: Literal["rollback", "keep"] = "rollback"
    timeout: float | None = None
    append_history: bool = False


class InterruptBody(msgspec.Struct, forbid_unknown_fields=True):
    """Cut in: how many tokens of the turn stay, or all, or none."""

    turn_id: str | None = None
    keep_tokens: Count | None = None
    keep: Literal["all", "none"] | None = None


class RewindBody(msgspec.Struct, forbid_unknown_fields=True):
    """Go back so that `to_turn` turns remain."""

    to_turn: Count
    request_id: str | None = None


class SpillBody(msgspec.Struct, forbid_unknown_fields=True):
    """Where to: the nearest tier with room if left out."""

    tier: Literal["host", "disk"] | None = None


class RestoreBody(msgspec.Struct, forbid_unknown_fields=True):
    """Nothing needs to be said; it may be left out."""


class ForkBody(msgspec.Struct, forbid_unknown_fields=True):
    """A second session, from the last turn or an older one."""

    id: str | None = None
    at_turn: Count | None = None
    request_id: str | None = None


@router.post("/v1/sessions", **documented(OpenBody, "Open a session.", status=201))
async def open_session(request: Request) -> Response:
    service, caller = service_of(request), caller_of(request)
    body = await body_of(request, OpenBody)
    record = await service.open_session(caller, body.id, body.ttl, body.system, body.metadata)
    return json_answer(await service.describe(record), 201)


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
            shown.append(service.shown(answer, record))
    return json_answer({"sessions": shown, "next": None if more is None else str(more)})


def _number(request: Request, name: str, default: int, least: int, most: int) -> int:
    """A whole number of the address's query."""
    given = request.query_params.get(name)
    if given is None:
        return default
    if not (given.isascii() and given.isdigit() and len(given) < 20 and least <= int(given) <= most):
        raise bad_field(name, f"must be a whole number from {least} to {most}")
    return int(given)


@router.get("/v1/sessions/{session_id}", **documented(None, "One session."))
async def get_session(request: Request, session_id: str) -> Response:
    service = service_of(request)
    return json_answer(await service.describe(service.table.find(caller_of(request).tenant, session_id)))


@router.delete("/v1/sessions/{session_id}", **documented(None, "Close a session."))
async def close_session(request: Request, session_id: str) -> Response:
    await service_of(request).close_session(caller_of(request), session_id)
    return json_answer({"id": session_id, "state": "CLOSED"})


@router.post("/v1/sessions/{session_id}/interrupt", **documented(InterruptBody, "Cut into a turn."))
async def interrupt(request: Request, session_id: str) -> Response:
    service = service_of(request)
    body = await body_of(request, InterruptBody)
    record = service.table.find(caller_of(request).tenant, session_id)
    turn = _given_name(body.turn_id, "turn_id")
    await service.interrupt(record, turn, kept_tokens(body.keep_tokens, body.keep))
    return json_answer(await service.describe(record))


def _given_name(name: str | None, field: str) -> str | None:
    """A name that the client may give or leave out; one that cannot be is refused."""
    return None if name is None else require_name(name, field)


def kept_tokens(count: int | None, keep: str | None) -> int | None:
    """How much of a turn stays: a number, -1 for all, None for nothing."""
    if (count is None) == (keep is None):
        raise bad_field("keep_tokens", "give either keep_tokens or keep")
    if count is not None:
        return count
    return KEEP_ALL if keep == "all" else None


@router.post("/v1/sessions/{session_id}/spill", **documented(SpillBody, "Move a session off the device."))
async def spill(request: Request, session_id: str) -> Response:
    service = service_of(request)
    body = await body_of(request, SpillBody)
    record = service.table.find(caller_of(request).tenant, session_id)
    if not await service.move(record, body.tier):
        raise Problem(409, "cannot_spill", "no such tier has room, or there is nothing to move", "tier")
    return json_answer(await service.describe(record))


@router.post(
    "/v1/sessions/{session_id}/restore",
    **documented(RestoreBody, "Bring a session back to the device.", required=False),
)
async def restore(request: Request, session_id: str) -> Response:
    service = service_of(request)
    if brings_body(request):
        await body_of(request, RestoreBody)
    record = service.table.find(caller_of(request).tenant, session_id)
    if not await service.move(record, "device"):
        raise Problem(409, "cannot_restore", "the session is on the device, or there is no room for it")
    return json_answer(await service.describe(record))


@router.post("/v1/sessions/{session_id}/rewind", **documented(RewindBody, "Go back to an earlier turn."))
async def rewind(request: Request, session_id: str) -> Response:
    service = service_of(request)
    body = await body_of(request, RewindBody)
    record = service.table.find(caller_of(request).tenant, session_id)
    await service.rewind(record, body.to_turn, _given_name(body.request_id, "request_id"))
    return json_answer(await service.describe(record))


@router.post(
    "/v1/sessions/{session_id}/fork", **documented(ForkBody, "A second session from here.", status=201)
)
async def fork(request: Request, session_id: str) -> Response:
    service = service_of(request)
    body = await body_of(request, ForkBody)
    record = service.table.find(caller_of(request).tenant, session_id)
    request_id = _given_name(body.request_id, "request_id")
    forked = await service.fork(record, body.id, body.at_turn, request_id)
    return json_answer(await service.describe(forked), 201)


@router.post("/v1/sessions/{session_id}/turns", **documented(TurnBody, "Say something."))
async def take_turn(request: Request, session_id: str) -> Response:
    service = service_of(request)
    body = await body_of(request, TurnBody)
    record = service.table.find(caller_of(request).tenant, session_id)
    asked = ask_turn(body)
    feed = await service.start_turn(record, asked)

    def leave() -> None:
        service.leave(feed, asked.keeps)

    if body.stream:
        return StreamAnswer(_events(asked.name, feed), leave, lambda problem: failed(asked.name, problem))
    return TurnAnswer(_whole(asked.name, feed), leave)


def ask_turn(body: TurnBody) -> TurnAsked:
    """A turn as the service takes it."""
    return TurnAsked(
        _input(body.input),
        body.sampling.made(),
        _given_name(body.turn_id, "turn_id") or new_name("t"),
        keeps=body.on_abort == "keep",
        timeout=body.timeout,
        fingerprint=None if body.turn_id is None else fingerprint_of((body.input, body.sampling)),
        appends=body.append_history,
        fields=FIELDS,
    )


def _input(given: str | list[int | SessionMessage]) -> Input:
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
    return Input(messages=plain_messages(messages, "input"))


async def _events(name: str, feed: TurnFeed) -> AsyncIterator[bytes]:
    """A turn as server-sent events: deltas, then `done` or `error`."""
    async for delta in feed.deltas():
        yield event(shown_delta(name, delta), "delta")
    assert feed.end is not None
    if feed.end.outcome == "failed":
        yield failed(name, turn_failure(feed.end))
    else:
        yield event(shown_turn(name, feed), "done")


async def _whole(name: str, feed: TurnFeed) -> Response:
    end = await feed.result()
    if end.outcome == "failed":
        raise turn_failure(end)
    return json_answer(shown_turn(name, feed))


def failed(name: str, problem: Problem) -> bytes:
    """The event that says what became of a turn that has no result."""
    return event({"turn_id": name, **problem.body()}, "error")


def turn_failure(end: wire.End) -> Problem:
    """A turn that could not be carried out; its session is as it was before."""
    numeric = end.reason == "numeric_error"
    code = "numeric_error" if numeric else "turn_failed"
    said = "the model's output was not a number" if numeric else "the turn could not be carried out"
    return Problem(500, code, f"{said}; the session is as it was before the turn")


def shown_delta(name: str, delta: wire.Delta) -> dict[str, Any]:
    """A piece of a turn, as clients see it."""
    shown: dict[str, Any] = {
        "turn_id": name,
        "index": delta.index,
        "text": delta.text,
        "token_ids": delta.tokens,
    }
    if delta.logprobs is not None:
        shown["logprobs"] = shown_logprobs(delta.logprobs)
    return shown


def shown_logprobs(logprobs: list[wire.Logprob]) -> list[dict[str, Any]]:
    """Log-probabilities by token id."""
    return [
        {
            "token_id": entry.token,
            "logprob": entry.logprob,
            "top": [{"token_id": top.token, "logprob": top.logprob} for top in entry.top],
        }
        for entry in logprobs
    ]


def standing(feed: TurnFeed) -> wire.End:
    """A turn's end with the words that stand: none of one whose input, or session, is not there any more.

    What is told again stood when it ended, and is told as it was.
    """
    end = feed.end
    assert end is not None, "the turn is over"
    gone = end.view is None or end.view.known < end.prompt_tokens
    if end.outcome == "aborted" and gone and not feed.replayed:
        return msgspec.structs.replace(end, text="", tokens=[], logprobs=None)
    return end


def shown_turn(name: str, feed: TurnFeed) -> dict[str, Any]:
    """A whole turn, as clients see it: what of it stands, whatever was sent on the way."""
    end = standing(feed)
    shown: dict[str, Any] = {
        "turn_id": name,
        "text": end.text,
        "token_ids": end.tokens,
        "finish_reason": end.reason if end.outcome == "finished" else "abort",
        "usage": {
            "prompt_tokens": end.prompt_tokens,
            "cached_tokens": end.cached_tokens,
            "computed_tokens": min(end.computed_tokens, end.prompt_tokens - end.cached_tokens),
            "completion_tokens": len(end.tokens),
        },
        "timing": {
            "queue_ms": round(end.queue_seconds * 1000, 2),
            "ttft_ms": None if end.first_seconds is None else round(end.first_seconds * 1000, 2),
            "total_ms": round(end.total_seconds * 1000, 2),
        },
    }
    if end.outcome == "aborted":
        shown["abort_reason"] = end.reason
    if end.logprobs is not None:
        shown["logprobs"] = shown_logprobs(end.logprobs)
    return shown
