"""Requests that start turns pass no other route's matcher; all others reach the application as ever."""

import asyncio
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from holdfast.server.app import all_routes
from holdfast.server.http.answers import json_answer
from holdfast.server.http.problems import Problem
from holdfast.server.routes import sessions, turns_first
from holdfast.server.routes.turns_first import AFTER, BEFORE, WHOLE, TurnsFirst


def ask(path: str, method: str = "POST", kind: str = "http") -> tuple[list[str], list[Any]]:
    """What the application was asked for, and what was sent."""
    passed: list[str] = []
    sent: list[Any] = []

    class Application(FastAPI):
        async def __call__(self, scope: Any, _receive: Any, _send: Any) -> None:
            passed.append(scope["path"])

    async def refuse(_request: Request, problem: Exception) -> Response:
        assert isinstance(problem, Problem)
        return json_answer({"code": problem.code}, problem.status)

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing is read")

    scope = {"type": kind, "method": method, "path": path, "headers": [], "query_string": b""}
    asyncio.run(TurnsFirst(Application(), refuse)(scope, receive, send))
    return passed, sent


def test_every_path_has_the_handler_of_its_route() -> None:
    routes = all_routes()
    assert all("POST" in routes[path] for path in (*WHOLE, f"{BEFORE}{{session_id}}{AFTER}"))
    handlers = {
        route.path: route.endpoint
        for module in (turns_first.openai, turns_first.messages, turns_first.sglang)
        for route in module.router.routes
        if isinstance(route, Route)
    }
    assert {path: handlers[path] for path in WHOLE} == WHOLE


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("/v1/sessions", "POST"),
        ("/v1/sessions/a/rewind", "POST"),
        ("/v1/sessions//turns", "POST"),
        ("/v1/sessions/turns", "POST"),
        ("/v1/sessions/a/b/turns", "POST"),
        ("/v1/sessions/a/turns", "GET"),
        ("/v1/chat/completions/", "POST"),
        ("/generate", "OPTIONS"),
    ],
)
def test_other_requests_reach_the_application(path: str, method: str) -> None:
    assert ask(path, method) == ([path], [])


def test_a_websocket_reaches_the_application() -> None:
    assert ask("/generate", kind="websocket") == (["/generate"], [])


def test_a_turn_reaches_its_handler_with_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def take(request: Request, session_id: str) -> Response:
        asked.append(f"{request.app.title} {session_id}")
        if session_id == "refused":
            raise Problem(409, "session_busy", "busy")
        return json_answer({"ok": session_id})

    monkeypatch.setattr(sessions, "take_turn", take)
    passed, sent = ask("/v1/sessions/one/turns")
    assert not passed and asked == ["FastAPI one"] and sent[0]["status"] == 200
    passed, sent = ask("/v1/sessions/refused/turns")
    assert not passed and sent[0]["status"] == 409 and sent[1]["body"] == b'{"code":"session_busy"}'


def test_a_problem_after_the_headers_is_not_answered_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    class Half(Response):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            raise Problem(503, "engine_lost", "lost")

    async def take(_request: Request, _session_id: str) -> Response:
        return Half()

    monkeypatch.setattr(sessions, "take_turn", take)
    with pytest.raises(Problem):
        ask("/v1/sessions/one/turns")
