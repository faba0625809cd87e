"""The ASGI application: all routes behind one middleware."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route, WebSocketRoute
from starlette.types import ASGIApp
from starlette.websockets import WebSocket

from holdfast import __version__
from holdfast.server.http.answers import json_answer
from holdfast.server.http.error_forms import error_body
from holdfast.server.http.keys import Keys
from holdfast.server.http.middleware import RequestMiddleware
from holdfast.server.http.problems import Problem, internal_error
from holdfast.server.responses.conversations import Conversations
from holdfast.server.responses.store import ResponseStore
from holdfast.server.routes import (
    cluster,
    conversations,
    live,
    messages,
    openai,
    realtime,
    responses,
    responses_socket,
    sessions,
    sglang,
    status,
    tokenize,
    web,
)
from holdfast.server.routes.access import request_id_of
from holdfast.server.routes.realtime_channels import Channels
from holdfast.server.routes.schema import components
from holdfast.server.routes.sglang_sessions import Native
from holdfast.server.routes.turns_first import TurnsFirst
from holdfast.server.service import Service
from holdfast.server.storm import Storm
from holdfast.server.telemetry.live import LiveMemory

__all__ = ["all_routes", "build_app", "nowhere"]

log = logging.getLogger("holdfast.server")

ROUTE_MODULES = (
    openai,
    responses,
    responses_socket,
    conversations,
    messages,
    tokenize,
    sessions,
    realtime,
    sglang,
    status,
    cluster,
    live,
    web,
)
WEBSOCKET = "WS"
PATH_CHARACTERS_MAX = 128
MATCH_CHARACTERS_MAX = 64
CODES = {404: "not_found", 405: "method_not_allowed", 415: "unsupported_media_type"}


def build_app(service: Service, keys: Keys, draining: Callable[[], bool]) -> ASGIApp:
    """All routes, and the middleware in front of them."""
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
    stored = ResponseStore(service)
    app.state.responses = (stored, Conversations(service, stored))
    for module in ROUTE_MODULES:
        app.include_router(module.router)
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
    guarded: ASGIApp = RequestMiddleware(TurnsFirst(app, _problem), keys, service.options, draining)
    if service.options.cors_origin:
        # Any header is allowed: OpenAI's and Anthropic's clients send a dozen of their own.
        guarded = CORSMiddleware(
            guarded,
            allow_origins=list(service.options.cors_origin),
            allow_methods=sorted({method for methods in all_routes().values() for method in methods}),
            allow_headers=["*"],
            expose_headers=["x-request-id", "request-id", "retry-after"],
        )
    return guarded


def all_routes() -> dict[str, set[str]]:
    """The methods of every path; WS for a WebSocket."""
    found: dict[str, set[str]] = {}
    for module in ROUTE_MODULES:
        for route in module.router.routes:
            if isinstance(route, Route):
                found.setdefault(route.path, set()).update(route.methods or ())
            elif isinstance(route, WebSocketRoute):
                found.setdefault(route.path, set()).add(WEBSOCKET)
    return found


async def _problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    return _refusal(request, error, headers)


def _refusal(request: Request, problem: Problem, headers: dict[str, str]) -> Response:
    body = error_body(problem, request.scope["path"], request_id_of(request))
    return json_answer(body, problem.status, headers)


async def _no_socket(websocket: WebSocket) -> None:
    """A WebSocket to a path without one: 404, as for any unknown path."""
    problem = Problem(404, CODES[404], nowhere(websocket.scope["path"], WEBSOCKET))
    await websocket.send_denial_response(json_answer(problem.body(), problem.status))


async def _mistake(request: Request, _error: Exception) -> Response:
    """An unexpected exception: the middleware logs it, the client gets no details."""
    return _refusal(request, internal_error(), {})


async def _http_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = CODES.get(error.status_code, "http_error")
    message = str(error.detail).lower()
    headers = dict(error.headers or {})
    if error.status_code == 404:
        message = nowhere(request.scope["path"], request.method)
    elif error.status_code == 405:
        headers["Allow"] = allowed = ", ".join(sorted(_methods(request)))
        message = f"{_shown(request.scope['path'])} takes {allowed}, not this method"
    return _refusal(request, Problem(error.status_code, code, message), headers)


def nowhere(path: str, method: str) -> str:
    """The message for an unknown path: the path, and similar ones."""
    routes = all_routes()
    if routes.get(path) == {WEBSOCKET}:
        return f"{_shown(path)} is a WebSocket: connect with ws:// or wss://"
    asked = path[:MATCH_CHARACTERS_MAX].lower()
    meant_by = {_filled(route, asked): route for route in routes}
    near = [meant_by[found] for found in difflib.get_close_matches(asked, meant_by, n=3, cutoff=0.75)]
    ways = [f"{' or '.join(sorted(routes[route]))} {route}" for route in near]
    meant = f" (did you mean {', '.join(ways)}?)" if ways else ""
    kind = "WebSocket" if method == WEBSOCKET else "path"
    return f"there is no {kind} {_shown(path)}{meant}; GET /openapi.json lists all paths"


def _filled(route: str, path: str) -> str:
    """A route with its parameters taken from a path, to compare the two."""
    parts, given = route.split("/"), path.split("/")
    if len(parts) != len(given):
        return route
    return "/".join(
        theirs if ours.startswith("{") else ours for ours, theirs in zip(parts, given, strict=True)
    )


def _shown(path: str) -> str:
    """A client's path, escaped and truncated."""
    shown = path[:PATH_CHARACTERS_MAX].encode("unicode_escape").decode("ascii")
    return f"{shown}…" if len(path) > PATH_CHARACTERS_MAX else shown


def _methods(request: Request) -> set[str]:
    """The methods of a path; each has a route of its own."""
    return {
        method
        for module in ROUTE_MODULES
        for route in module.router.routes
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE
        for method in route.methods or ()
    }
