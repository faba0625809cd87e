"""Health, version, memory and metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from holdfast import __version__
from holdfast.server.http.answers import json_answer
from holdfast.server.http.keys import Caller
from holdfast.server.link.wire import Pulse
from holdfast.server.routes.access import caller_of, service_of
from holdfast.server.routes.schema import documented
from holdfast.server.service import Service

__all__ = ["memory_of", "router", "tenant_memory"]

router = APIRouter(tags=["house"])


@router.get("/health", **documented(None, "Whether the server process is alive (liveness)."))
async def health(request: Request) -> Response:
    service = service_of(request)
    return json_answer({"status": "ok", **_graphs(service.link.pulse), **_engines(service)})


@router.get("/health/ready", **documented(None, "Whether the server accepts turns (readiness)."))
async def ready(request: Request) -> Response:
    service = service_of(request)
    if not service.supervisor.up:
        return json_answer({"status": "starting", **_engines(service)}, 503, {"Retry-After": "2"})
    if request.app.state.draining():
        return json_answer({"status": "draining"}, 503, {"Retry-After": "5"})
    return json_answer({"status": "ready", **_graphs(service.link.pulse), **_engines(service)})


def _graphs(pulse: Pulse | None) -> dict[str, Any]:
    """On a GPU: the CUDA graphs that are captured, and that there are to be."""
    if pulse is None or pulse.graphs is None:
        return {}
    captured, total = pulse.graphs
    return {"graphs": {"captured": captured, "total": total}}


def _engines(service: Service) -> dict[str, Any]:
    """Where the engines are apart: each with its state."""
    if service.engines is None:
        return {}
    states = {
        each.name: "down" if not each.up else "draining" if each.draining else "up"
        for each in service.engines.remotes.engines.values()
    }
    return {"engines": states}


@router.get("/ping", **documented(None, "Liveness, under the name of vLLM and of SageMaker."))
@router.post("/ping", **documented(None, "Liveness, under the name of vLLM and of SageMaker."))
async def ping() -> Response:
    return Response()


@router.get("/version", **documented(None, "The version of the server."))
async def version() -> Response:
    return json_answer({"version": __version__})


@router.get("/metrics", **documented(None, "Prometheus metrics."))
async def metrics(request: Request) -> Response:
    page = service_of(request).metrics.page()
    return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/v1/memory", **documented(None, "The ledger: memory by holder."))
async def memory(request: Request) -> Response:
    caller = caller_of(request)
    report = await service_of(request).ask("memory", memory_of(caller))
    return json_answer(tenant_memory(report, caller))


def memory_of(caller: Caller) -> str | None:
    """The tenant whose memory a caller may see exactly; None for all."""
    return None if caller.admin else caller.tenant


def tenant_memory(report: dict[str, Any], caller: Caller) -> dict[str, Any]:
    """The ledger as a caller may see it: only the admin sees other tenants."""
    top = []
    for entry in report["top"]:
        kind, _, name = entry["holder"].partition(" ")
        own = _own_name(name, caller.tenant)
        if own is not None:
            top.append({**entry, "holder": f"{kind} {own}"})
        elif caller.admin:
            top.append(entry)
    listening = []
    for entry in report["listening"]:
        own = _own_name(entry["session"], caller.tenant)
        if own is not None or caller.admin:
            listening.append({**entry, "session": own or entry["session"]})
    shown = {**report, "top": top, "listening": listening}
    if not caller.admin:
        shown["tenants"] = [each for each in report["tenants"] if each["tenant"] == caller.tenant]
        hidden = {"holder": "", "detail": "", "trail": []}
        shown["findings"] = [{**finding, **hidden} for finding in report["findings"]]
    return shown


def _own_name(name: str, tenant: str) -> str | None:
    """A holder's name without the tenant's prefix; None if the holder is another tenant's.

    Holders are named after a session, a turn `of` one, or the tenant whose prefix tree they are.
    """
    turn, of, session = name.rpartition(" of ")
    if name == tenant:
        return name
    if not session.startswith((f"{tenant}/", f"{tenant}#")):
        return None
    return f"{turn.removeprefix(f'{tenant}#')}{of}{session[len(tenant) + 1 :]}"
