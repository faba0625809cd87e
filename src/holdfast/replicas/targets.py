"""`/metrics/targets`: where Prometheus finds the API processes, each of which counts its own requests.

Scraping `/metrics` through HAProxy would read another process each time. The answer is in the form of
Prometheus' HTTP service discovery, for the admin alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from starlette.types import Receive, Scope, Send

from holdfast.server.http.answers import json_answer
from holdfast.server.http.keys import Keys
from holdfast.server.http.problems import Problem

__all__ = ["TARGETS_PATH", "MetricsTargets"]

TARGETS_PATH = "/metrics/targets"


class MetricsTargets:
    """An ASGI application of one answer."""

    def __init__(self, keys: Keys, addresses: Callable[[], Iterable[str]]) -> None:
        """`addresses` are those of all API processes now."""
        self._keys = keys
        self._addresses = addresses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
        scheme, _, key = given.partition(" ")
        caller = self._keys.caller(key if scheme.lower() == "bearer" else None)
        if caller is None or not caller.admin:
            problem = Problem(403, "admin_required", "this call needs the admin key")
            await json_answer(problem.body(), problem.status)(scope, receive, send)
            return
        found = [{"targets": [each], "labels": {"api": each}} for each in sorted(self._addresses())]
        await json_answer(found, 200)(scope, receive, send)
