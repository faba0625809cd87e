"""The engines behind this server, for its operator: their state, drains and moves. Admin only."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from holdfast.server.http.answers import json_answer
from holdfast.server.http.problems import Problem
from holdfast.server.link.cluster_control import ClusterControl
from holdfast.server.routes.access import body_of, caller_of, service_of
from holdfast.server.routes.schema import documented
from holdfast.server.sessions import engine_name, require_name

__all__ = ["router"]

router = APIRouter(tags=["cluster"])


class DrainBody(msgspec.Struct, forbid_unknown_fields=True):
    """The engine that is to hand its sessions over and end."""

    engine: str


class MoveBody(msgspec.Struct, forbid_unknown_fields=True):
    """A session, the engine that is to have it, and its tenant, if that is not the caller."""

    session: str
    engine: str
    tenant: str | None = None


def _control(request: Request) -> ClusterControl:
    engines = service_of(request).engines
    if engines is None:
        raise Problem(409, "no_engines_apart", "this server has an engine of its own: start it with --engine")
    return ClusterControl(engines)


@router.get("/v1/cluster", **documented(None, "The engines: sessions, free memory, turns, lives."))
async def status(request: Request) -> Response:
    return json_answer(await _control(request).status())


@router.get("/v1/cluster/events", **documented(None, "Recent events of engines and sessions."))
async def events(request: Request) -> Response:
    _control(request)
    engines = service_of(request).engines
    assert engines is not None
    return json_answer({"events": engines.places.events.all()})


@router.post("/v1/cluster/drain", **documented(DrainBody, "Drain an engine.", status=202))
async def drain(request: Request) -> Response:
    body = await body_of(request, DrainBody)
    await _control(request).drain(body.engine)
    return json_answer({"engine": body.engine, "state": "draining"}, 202)


@router.post("/v1/cluster/move", **documented(MoveBody, "Move an idle session to another engine."))
async def move(request: Request) -> Response:
    body = await body_of(request, MoveBody)
    tenant = caller_of(request).tenant if body.tenant is None else body.tenant
    name = engine_name(tenant, require_name(body.session, "session"))
    return json_answer(await _control(request).move(name, body.engine))


@router.post("/v1/cluster/rebalance", **documented(None, "Move sessions away from engines under pressure."))
async def rebalance(request: Request) -> Response:
    return json_answer({"moved": await _control(request).rebalance()})
