"""The common inputs of routes: the service, the caller, the body."""

from __future__ import annotations

from typing import TypeVar

from starlette.requests import HTTPConnection, Request

from holdfast.server.http.bodies import Reading, read_json
from holdfast.server.http.keys import Caller
from holdfast.server.service import Service

__all__ = ["body_of", "caller_of", "reading_of", "request_id_of", "service_of"]

T = TypeVar("T")


def service_of(connection: HTTPConnection) -> Service:
    """The service behind all routes."""
    service = connection.app.state.service
    assert isinstance(service, Service)
    return service


def caller_of(connection: HTTPConnection) -> Caller:
    """The caller that the middleware authenticated."""
    caller = connection.scope["state"]["caller"]
    assert isinstance(caller, Caller)
    return caller


def request_id_of(connection: HTTPConnection) -> str:
    """The id of the request: the client's if it sent one."""
    return str(connection.scope["state"]["request_id"])


async def body_of(request: Request, kind: type[T]) -> T:
    """The request's body as a value of `kind`."""
    return await read_json(request, kind, reading_of(request))


def reading_of(connection: HTTPConnection) -> Reading:
    """How the bodies of this caller are read."""
    return service_of(connection).reading(caller_of(connection))
