"""The ASGI middleware in front of all routes: hosts, sizes, keys, origins, ids, draining. Denies by default.

A path needs a key unless it is in PUBLIC; paths in ADMIN need the admin key. Where no key is needed, requests
with side effects and WebSockets must not come from a web page of another origin (`hosts`). Every answer
carries the request's id; an answer sent before a long body was read closes the connection. Problems become
JSON errors here; an unexpected exception is logged and answered without its text.
"""

from __future__ import annotations

import base64
import logging
import re
import secrets
import time
from collections.abc import Callable

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.server.http.bodies import too_large
from holdfast.server.http.body_memory import BodyMemory
from holdfast.server.http.error_forms import error_body, is_anthropic
from holdfast.server.http.hosts import Hosts, foreign_page
from holdfast.server.http.keys import Caller, Keys
from holdfast.server.http.problems import Problem, bad_field, internal_error
from holdfast.server.link.engine_client import traceparent
from holdfast.server.link.marks import Marks, marks
from holdfast.server.options import ServerOptions

__all__ = ["ADMIN", "PUBLIC", "SUBPROTOCOL", "RequestMiddleware"]

log = logging.getLogger("holdfast.server")

PUBLIC = ("/", "/health", "/health/ready", "/ping", "/favicon.ico")
PUBLIC_PREFIXES = ("/web/",)
ADMIN = (
    "/metrics",
    "/flush_cache",
    "/reset_prefix_cache",
    "/get_server_info",
    "/server_info",
    "/v1/storm",
    "/v1/cluster",
    "/v1/cluster/drain",
    "/v1/cluster/events",
    "/v1/cluster/move",
    "/v1/cluster/rebalance",
)
GET_WITH_EFFECTS = ("/flush_cache", "/health_generate")
"""Paths where GET has side effects."""
READING = ("GET", "HEAD", "OPTIONS")
DRAINS = ("/health", "/health/ready", "/ping", "/metrics", "/v1/memory")

VERSIONS = ("1.0", "1.1")
HEADER_BYTES_MAX = 32 << 10
SHORT_BODY_BYTES = 64 << 10
"""Bodies up to this size are read to the end even if the request is rejected: the connection stays open."""
SUBPROTOCOL = "holdfast.key."
"""Browsers cannot set headers on a WebSocket: they send the key as a subprotocol of this name."""
SUBPROTOCOL_ENCODED = "holdfast.key64."
"""The same for keys with characters that a subprotocol cannot have: URL-safe base64 without padding."""
SUBPROTOCOL_OPENAI = "openai-insecure-api-key."
"""The same from OpenAI's clients in browsers."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


class RequestMiddleware:
    """Passes a request on to the routes, or rejects it."""

    def __init__(
        self, app: ASGIApp, keys: Keys, options: ServerOptions, draining: Callable[[], bool]
    ) -> None:
        self.app = app
        self.keys = keys
        self.hosts = Hosts(options, keys.required)
        self.origins = options.cors_origin
        self.body_limit = options.body_limit
        bodies_limit = max(options.bodies_limit, options.body_limit)
        shared = len(keys.tenants) > 1
        self.bodies = BodyMemory(
            bodies_limit, max(bodies_limit // 2, options.body_limit) if shared else bodies_limit
        )
        self.draining = draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        began = time.monotonic()
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]
        }
        asked = headers.get("x-request-id", "")
        request_id = asked if _REQUEST_ID.fullmatch(asked) else f"req-{secrets.token_hex(8)}"
        status = 0
        unread = scope["type"] == "http" and _long_body(headers)
        caller, received = Caller("", admin=False), 0

        async def read() -> Message:
            nonlocal unread, received
            message = await receive()
            if message["type"] == "http.request":
                count = len(message.get("body", b""))
                self.bodies.take(caller.tenant, count)
                received += count
                if not message.get("more_body", False):
                    unread = False
                    self.bodies.give_back(caller.tenant, received)
                    received = 0
            return message

        async def labelled(message: Message) -> None:
            nonlocal status
            if message["type"] in ("http.response.start", "websocket.http.response.start"):
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
                if is_anthropic(scope["path"]):
                    message["headers"].append((b"request-id", request_id.encode()))
                if unread:
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        traceparent.set(headers.get("traceparent", "")[:128] or None)
        marks.set(Marks(began))
        try:
            caller = self._admit(scope, headers)
            scope.setdefault("state", {}).update(caller=caller, request_id=request_id, began=began)
            await self.app(scope, read, labelled)
        except Problem as problem:
            await refuse(scope, labelled, problem, request_id, started=status != 0)
        except Exception as error:
            log.error("request failed", exc_info=error, extra={"fields": {"request": request_id}})
            await refuse(scope, labelled, internal_error(), request_id, started=status != 0)
        finally:
            self.bodies.give_back(caller.tenant, received)
        log.debug(
            "request",
            extra={"fields": {"request": request_id, "status": status, "path": scope["path"][:128]}},
        )

    def _admit(self, scope: Scope, headers: dict[str, str]) -> Caller:
        """The caller; raises the problem with a request that is rejected."""
        path: str = scope["path"]
        if sum(len(name) + len(value) for name, value in scope["headers"]) > HEADER_BYTES_MAX:
            raise Problem(431, "headers_too_large", f"the headers are longer than {HEADER_BYTES_MAX} bytes")
        _require_framing(scope, headers)
        self.hosts.require(_only(scope, b"host"))
        if _length(headers) > self.body_limit:
            raise too_large(self.body_limit)
        public = path in PUBLIC or path.startswith(PUBLIC_PREFIXES)
        caller = self.keys.caller(_key(headers))
        if caller is None:
            if not public:
                raise Problem(
                    401,
                    "invalid_api_key",
                    "this call needs a valid key: Authorization: Bearer KEY, or x-api-key: KEY",
                )
            caller = Caller("", admin=False)
        if self._crosses_sites(scope, headers):
            raise Problem(
                403,
                "origin_not_allowed",
                "origin: pages of this origin may not call the server; to allow them, start it with "
                "--cors-origin ORIGIN",
                "origin",
            )
        if path in ADMIN and not caller.admin:
            raise Problem(403, "admin_required", "this call needs the admin key")
        if self.draining() and not public and path not in DRAINS:
            raise Problem(503, "draining", "the server is shutting down", retry_after=5)
        # Decoded, a slash within a name would look like one between names.
        if path.startswith("/v1/sessions/") and b"%2f" in scope.get("raw_path", b"").lower():
            raise bad_field("session_id", "must not contain a slash", "bad_name")
        return caller

    def _crosses_sites(self, scope: Scope, headers: dict[str, str]) -> bool:
        """Whether this is a cross-site request that must be rejected.

        A page cannot forge a request with a key that it does not know. WebSockets are always checked: a page
        can read their answers, and browsers send no preflight before they connect.
        """
        if scope["type"] == "http" and self.keys.required:
            return False
        if scope["type"] == "http" and scope["method"] in READING and scope["path"] not in GET_WITH_EFFECTS:
            return False
        return foreign_page(headers, self.origins)


def _require_framing(scope: Scope, headers: dict[str, str]) -> None:
    """Reject ambiguous framing that a proxy in front might read differently (request smuggling)."""
    if "transfer-encoding" in headers and ("content-length" in headers or scope["http_version"] != "1.1"):
        raise Problem(
            400, "ambiguous_length", "transfer-encoding: allowed in HTTP/1.1 only, and without content-length"
        )
    if scope["http_version"] not in VERSIONS:
        raise Problem(
            505, "unsupported_version", f"HTTP/{scope['http_version']} is not supported, HTTP/1.1 is"
        )
    if not scope["path"].startswith("/") and scope.get("method") != "OPTIONS":
        raise Problem(400, "bad_target", "the request target must be a path that begins with a slash")


def _only(scope: Scope, name: bytes) -> str | None:
    """The value of a header that must occur once; None otherwise."""
    found = [value for each, value in scope["headers"] if each.lower() == name]
    return found[0].decode("latin-1") if len(found) == 1 else None


def _length(headers: dict[str, str]) -> int:
    """The content length; the HTTP library rejects values that are not a number."""
    length = headers.get("content-length", "0")
    return int(length[:20]) if length.isascii() and length.isdigit() else 0


def _long_body(headers: dict[str, str]) -> bool:
    """Whether a request's body is too long to be read after an early answer."""
    return "transfer-encoding" in headers or _length(headers) > SHORT_BODY_BYTES


def _key(headers: dict[str, str]) -> str | None:
    kind, _, key = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and key.strip():
        return key.strip()
    for protocol in headers.get("sec-websocket-protocol", "").split(","):
        for prefix in (SUBPROTOCOL, SUBPROTOCOL_OPENAI):
            if protocol.strip().startswith(prefix):
                return protocol.strip().removeprefix(prefix)
        if protocol.strip().startswith(SUBPROTOCOL_ENCODED):
            return _decoded(protocol.strip().removeprefix(SUBPROTOCOL_ENCODED))
    return headers.get("x-api-key")


def _decoded(text: str) -> str | None:
    """A key from its base64; None if it is not valid base64."""
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode()
    except ValueError:
        return None


async def refuse(scope: Scope, send: Send, problem: Problem, request_id: str, *, started: bool) -> None:
    """Answer with a problem, unless an answer has been started."""
    if started:
        return
    headers = [(b"content-type", b"application/json")]
    if problem.retry_after is not None:
        headers.append((b"retry-after", str(problem.retry_after).encode()))
    if problem.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    prefix = "websocket.http.response" if scope["type"] == "websocket" else "http.response"
    body = msgspec.json.encode(error_body(problem, scope["path"], request_id))
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": f"{prefix}.start", "status": problem.status, "headers": headers})
    await send({"type": f"{prefix}.body", "body": body})
