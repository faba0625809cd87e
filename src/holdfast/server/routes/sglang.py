"""SGLang's interface: `/generate`, sessions, and information about the server.

Field names and meanings are SGLang's; unknown fields are ignored. A streaming session is an append-only
session of the engine; an ordinary one is a tree of requests. `max_new_tokens` is cut to what fits; an input
that leaves no room is rejected.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from holdfast import __version__
from holdfast.engine.durable.places import without_credentials
from holdfast.engine.sampling import Sampling
from holdfast.server.http.answers import FeedAnswer, TurnAnswer, event, json_answer
from holdfast.server.http.clients import client_of
from holdfast.server.http.problems import Problem
from holdfast.server.routes.access import body_of, caller_of, service_of
from holdfast.server.routes.schema import documented
from holdfast.server.routes.sglang_body import GENERATE_BODY
from holdfast.server.routes.sglang_call import DONE, Call
from holdfast.server.routes.sglang_sessions import Native, check_timeout
from holdfast.server.sessions import new_name, require_name
from holdfast.server.turn_request import Input, SessionGiven, TurnAsked

__all__ = ["router"]

router = APIRouter(tags=["native"])

HEALTH_SECONDS = 20.0

Capacity = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class OpenSessionBody(msgspec.Struct):
    """A session to open. `capacity_of_str_len` is accepted and ignored: the context length is the limit."""

    capacity_of_str_len: Capacity | None = None
    session_id: str | None = None
    streaming: bool | None = None
    timeout: float | None = None


class CloseSessionBody(msgspec.Struct):
    """A session to close."""

    session_id: str


class AbortBody(msgspec.Struct):
    """A request to abort, or all of them."""

    rid: str | None = None
    abort_all: bool = False


def native_of(request: Request) -> Native:
    """The state of these routes."""
    native = request.app.state.native
    assert isinstance(native, Native)
    return native


# --- generate -------------------------------------------------------------------------------------


@router.post("/generate", **documented(GENERATE_BODY.described, "Continue a text.", stream=True))
async def generate(request: Request) -> Response:
    body = await body_of(request, GENERATE_BODY.read)
    call = Call(native_of(request), caller_of(request), body, client_of(request.scope))
    await call.start()
    if body.stream:
        return FeedAnswer(call.feeds, call, call.leave, lambda problem: event(problem.body()) + DONE)
    return TurnAnswer(call.whole(), call.leave)


@router.post("/abort_request", **documented(AbortBody, "Abort a request, or all."))
async def abort_request(request: Request) -> Response:
    native, caller = native_of(request), caller_of(request)
    body = await body_of(request, AbortBody)
    if body.abort_all:
        if not caller.admin:
            raise Problem(403, "admin_required", "abort_all needs the admin key", "abort_all")
        native.service.link.end_all("all requests were aborted")
    elif body.rid:
        native.stop(caller.tenant, body.rid, "the request was aborted")
    return json_answer({"success": True})


# --- sessions -------------------------------------------------------------------------------------


@router.post("/open_session", **documented(OpenSessionBody, "Open a session; the answer is its id."))
async def open_session(request: Request) -> Response:
    native, caller = native_of(request), caller_of(request)
    body = await body_of(request, OpenSessionBody)
    if body.session_id is not None:
        require_name(body.session_id, "session_id")
        await native.service.sessions.known(caller.tenant, body.session_id)  # At any engine.
        if native.exists(caller.tenant, body.session_id):
            raise _session_exists()
    if not body.streaming:
        return json_answer(native.open(caller, body.session_id, body.timeout))
    if body.timeout is not None:
        check_timeout(body.timeout)
    try:
        record = await native.service.sessions.open(caller, body.session_id, SessionGiven(ttl=body.timeout))
    except Problem as problem:
        raise _session_exists() if problem.code == "session_exists" else problem from problem
    return json_answer(record.name)


def _session_exists() -> Problem:
    return Problem(400, "session_exists", "a session with this id is already open", "session_id")


@router.post("/close_session", **documented(CloseSessionBody, "Close a session."))
async def close_session(request: Request) -> Response:
    native, caller = native_of(request), caller_of(request)
    body = await body_of(request, CloseSessionBody)
    name = require_name(body.session_id, "session_id")
    sessions, branches = native.service.sessions, native.ordinary.find(caller.tenant, name)
    if branches is not None:
        native.close(branches)
    elif await sessions.known(caller.tenant, name) or native.ordinary.gone(caller.tenant, name) is None:
        await sessions.close(caller, name)
    return json_answer({"success": True})


# --- the server -----------------------------------------------------------------------------------


@router.get("/flush_cache", **documented(None, "Evict unused prefixes from the cache."))
@router.post("/flush_cache", **documented(None, "Evict unused prefixes from the cache."))
@router.post("/reset_prefix_cache", **documented(None, "The same under vLLM's name."))
async def flush_cache(request: Request) -> Response:
    await service_of(request).flush()
    return json_answer(
        {"success": True, "message": "unused prefixes were evicted; sessions keep their memory"}
    )


@router.get("/health_generate", **documented(None, "Whether the engine generates."))
async def health_generate(request: Request) -> Response:
    service = service_of(request)
    turn = TurnAsked(
        Input(tokens=[0]), Sampling(max_tokens=1, temperature=0.0), new_name("health"), reads=False
    )
    (feed,) = await service.start_request(caller_of(request), turn)

    async def generated() -> Response:
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                end = await feed.result()
        except TimeoutError:
            service.leave(feed, keeps=False)
            raise Problem(
                503, "engine_slow", "the engine did not generate a token in time; see the server log"
            ) from None
        if end.outcome != "finished":
            raise Problem(503, "engine_failed", "the engine did not generate a token")
        return json_answer({"status": "ok"})

    return TurnAnswer(generated(), lambda: service.leave(feed, keeps=False))


@router.get("/get_model_info", **documented(None, "The model."))
@router.get("/model_info", **documented(None, "The model."))
async def model_info(request: Request) -> Response:
    service = service_of(request)
    facts = service.facts
    path = facts.path if caller_of(request).admin else service.model_name
    return json_answer(
        {
            "model_path": path,
            "tokenizer_path": path,
            "served_model_name": service.model_name,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": "default",
            "architectures": [facts.architecture],
            "context_length": facts.context_length,
            "has_image_understanding": False,
            "has_audio_understanding": False,
        }
    )


@router.get("/get_server_info", **documented(None, "The server, for its admin."))
@router.get("/server_info", **documented(None, "The server, for its admin."))
async def server_info(request: Request) -> Response:
    service = service_of(request)
    facts, pulse = service.facts, service.link.pulse
    state = {} if pulse is None else {"running": pulse.running, "queued": pulse.queued, "step": pulse.step}
    return json_answer(
        {
            **without_credentials(service.supervisor.engine_options),
            "model_path": facts.path,
            "tokenizer_path": facts.path,
            "served_model_name": service.model_name,
            "device": facts.device,
            "dtype": facts.dtype,
            "context_length": facts.context_length,
            "max_total_num_tokens": facts.tokens_max,
            "max_req_input_len": min(facts.context_length, facts.tokens_max) - 1,
            "memory_plan": facts.plan,
            "version": __version__,
            "internal_states": [state],
        }
    )
