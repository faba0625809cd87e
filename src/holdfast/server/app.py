"""The application: every door behind one gate."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp
from starlette.websockets import WebSocket

from holdfast import __version__
from holdfast.server.answers import json_answer
from holdfast.server.doors import house, live, native, openai, realtime, sessions, web
from holdfast.server.doors.native_sessions import Native
from holdfast.server.doors.realtime_channel import Channels
from holdfast.server.doors.schema import components
from holdfast.server.gate import Gate
from holdfast.server.keys import Keys
from holdfast.server.live import LiveMemory
from holdfast.server.problems import Problem
from holdfast.server.service import Service
from holdfast.server.storm import Storm

__all__ = ["build_app"]

log = logging.getLogger("holdfast.server")

DOORS = (openai, sessions, realtime, native, house, live, web)
CODES = {404: "not_found", 405: "method_not_allowed", 415: "unsupported_media_type"}


def build_app(service: Service, keys: Keys, draining: Callable[[], bool]) -> ASGIApp:
    """All routes, and the gate in front of them."""
    app = FastAPI(
        title="Holdfast",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
        separate_input_output_schemas=False,
        redirect_slashes=False,
    )
    app.state.service = service
    app.state.draining = draining
    app.state.channels = Channels(service)
    app.state.live = LiveMemory(service)
    app.state.storm = Storm(service, draining)
    app.state.native = Native(service)
    for door in DOORS:
        app.include_router(door.router)
    app.add_api_websocket_route("/{path:path}", _no_socket)
    app.add_exception_handler(Problem, _problem)
    app.add_exception_handler(HTTPException, _http_problem)
    app.add_exception_handler(Exception, _mistake)
    plain = app.openapi

    def described() -> dict[str, Any]:
        schema = plain()
        schema.setdefault("components", {}).setdefault("schemas", {}).update(components())
        return schema

    app.openapi = described  # type: ignore[method-assign]
    gate: ASGIApp = Gate(app, keys, service.options.body_limit, draining)
    if service.options.cors_origin:
        gate = CORSMiddleware(
            gate,
            allow_origins=list(service.options.cors_origin),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["authorization", "content-type", "x-request-id"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return gate


async def _problem(_request: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    return json_answer(error.body(), error.status, headers)


async def _no_socket(websocket: WebSocket) -> None:
    """A WebSocket to a path that has none: answered as any other path that is not there."""
    problem = Problem(404, CODES[404], "not found")
    await websocket.send_denial_response(json_answer(problem.body(), problem.status))


async def _mistake(_request: Request, _error: Exception) -> Response:
    """An exception that nobody expected: the gate logs it, the client learns only that it happened."""
    problem = Problem(500, "internal_error", "the server made a mistake; it is in its log")
    return json_answer(problem.body(), 500)


async def _http_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = CODES.get(error.status_code, "http_error")
    problem = Problem(error.status_code, code, str(error.detail).lower())
    headers = dict(error.headers or {})
    if error.status_code == 405:
        headers["Allow"] = ", ".join(sorted(_methods(request)))
    return json_answer(problem.body(), error.status_code, headers)


def _methods(request: Request) -> set[str]:
    """What can be asked of a path: each of its methods has a route of its own."""
    return {
        method
        for door in DOORS
        for route in door.router.routes
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE
        for method in route.methods or ()
    }
