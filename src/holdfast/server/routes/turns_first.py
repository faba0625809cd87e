"""The routes that start turns, matched before all others.

A request otherwise passes the matchers of some sixty routes and FastAPI's machinery for parameters, which
these handlers do not use. Their exceptions are answered as by the application.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from holdfast.server.http.problems import Problem
from holdfast.server.routes import messages, openai, sessions, sglang

__all__ = ["TurnsFirst"]

Handler = Callable[[Request], Awaitable[Response]]
Refusal = Callable[[Request, Exception], Awaitable[Response]]

WHOLE: dict[str, Handler] = {
    "/v1/chat/completions": openai.chat,
    "/v1/completions": openai.completions,
    "/v1/messages": messages.create,
    "/generate": sglang.generate,
}
"""Paths without a parameter."""

BEFORE, AFTER = "/v1/sessions/", "/turns"
"""What surrounds the session's name in the path of its turns."""


class TurnsFirst:
    """Passes other requests on to the application."""

    def __init__(self, app: FastAPI, refusal: Refusal) -> None:
        """`refusal` is the answer to a problem."""
        self._app = app
        self._refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        handler, session = WHOLE.get(path), ""
        if handler is None and path.startswith(BEFORE) and path.endswith(AFTER):
            session = path[len(BEFORE) : -len(AFTER)]
        if handler is None and (not session or "/" in session):
            await self._app(scope, receive, send)
            return
        scope["app"] = self._app
        request = Request(scope, receive, send)
        begun = False

        async def sending(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            taken = sessions.take_turn(request, session) if handler is None else handler(request)
            await (await taken)(scope, receive, sending)
        except Problem as problem:
            if begun:
                raise
            await (await self._refusal(request, problem))(scope, receive, send)
