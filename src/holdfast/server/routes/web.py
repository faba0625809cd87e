"""The web page's files, and the calls that start and stop a storm.

The files are read once at the start; client input never becomes a path. The content security policy lets the
page load from and connect to this server only, forbids framing, and runs only these scripts. Browsers
revalidate each file by its ETag.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from holdfast.server.http.answers import json_answer
from holdfast.server.http.problems import Problem
from holdfast.server.routes.access import body_of
from holdfast.server.routes.schema import documented
from holdfast.server.storm import Storm

__all__ = ["router"]

router = APIRouter(tags=["page"])

FILES = Path(__file__).resolve().parent.parent / "web"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class Asset:
    """One file of the page."""

    def __init__(self, path: Path) -> None:
        self.content = path.read_bytes()
        self.type = TYPES[path.suffix]
        self.tag = f'"{hashlib.sha256(self.content).hexdigest()[:32]}"'

    def answer(self, request: Request) -> Response:
        """The file, or 304."""
        headers = {**HEADERS, "etag": self.tag}
        if request.headers.get("if-none-match") == self.tag:
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.type)


ASSETS = {path.name: Asset(path) for path in sorted(FILES.iterdir()) if path.suffix in TYPES}


@router.get("/", include_in_schema=False)
async def page(request: Request) -> Response:
    return ASSETS["index.html"].answer(request)


@router.get("/favicon.ico", include_in_schema=False)
async def icon(request: Request) -> Response:
    return ASSETS["icon.svg"].answer(request)


@router.get("/web/{name}", include_in_schema=False)
async def asset(request: Request, name: str) -> Response:
    if name not in ASSETS:
        raise Problem(404, "not_found", "there is no such file")
    return ASSETS[name].answer(request)


class StormBody(msgspec.Struct, forbid_unknown_fields=True):
    """How many sessions, and for how long."""

    sessions: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 200
    seconds: Annotated[float, msgspec.Meta(gt=0, le=600)] = 60.0
    seed: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)] = 0


def _storm(request: Request) -> Storm:
    storm = request.app.state.storm
    assert isinstance(storm, Storm)
    return storm


@router.post(
    "/v1/storm", **documented(StormBody, "Start a load of random sessions and interruptions.", status=202)
)
async def start_storm(request: Request) -> Response:
    body = await body_of(request, StormBody)
    storm = _storm(request)
    storm.start(body.sessions, body.seconds, body.seed)
    return json_answer(storm.shown(), 202)


@router.get("/v1/storm", **documented(None, "The state of the storm."))
async def get_storm(request: Request) -> Response:
    return json_answer(_storm(request).shown())


@router.delete("/v1/storm", **documented(None, "End the storm."))
async def stop_storm(request: Request) -> Response:
    storm = _storm(request)
    storm.stop()
    return json_answer(storm.shown())
