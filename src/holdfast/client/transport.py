"""Sending calls over HTTP, for ordinary and for asynchronous code.

A call that fails in a way that passes is sent again (see `retry`); every other failure is raised as one of
`errors`. Both transports have the same three methods: `ask` for the value of an answer, `read` for its bytes,
`open` for a response whose body is still to come. Used by the clients, and by turns for their streams.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
import time
from typing import Any, TypeVar

import httpx

from holdfast.client import calls
from holdfast.client.calls import Call
from holdfast.client.errors import BadArgument, HoldfastError, error_from_response, lost_connection
from holdfast.client.retry import Attempts, Retries

__all__ = ["AsyncTransport", "Transport", "bearer"]

CONNECT_SECONDS = 10.0
KEPT_CONNECTIONS_MAX = 20
JSON_HEADERS = {"content-type": "application/json"}

Answer = TypeVar("Answer")


def bearer(api_key: str | None) -> dict[str, str]:
    """The header that a key is sent in; none without a key."""
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise BadArgument("a key is of printable ASCII characters")
    return {} if api_key is None else {"authorization": f"Bearer {api_key}"}


@functools.cache
def _trust(secure: bool) -> ssl.SSLContext:
    """What all clients of this process trust; for plain HTTP nothing, as reading certificates takes 30 ms."""
    return httpx.create_ssl_context() if secure else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


class _Endpoint:
    """Address, headers and timeouts of calls."""

    http: httpx.Client | httpx.AsyncClient

    def __init__(self, url: str, api_key: str | None, retries: Retries, timeout: float) -> None:
        self.url = calls.base_url(url)
        self.headers = bearer(api_key)
        self.retries = retries
        # Every session may have a turn in flight: the number of connections is the server's to limit.
        self.settings: dict[str, Any] = {
            "base_url": self.url,
            "headers": self.headers,
            "verify": _trust(self.url.startswith("https:")),
            "timeout": httpx.Timeout(timeout, connect=CONNECT_SECONDS, pool=None),
            "limits": httpx.Limits(max_connections=None, max_keepalive_connections=KEPT_CONNECTIONS_MAX),
        }

    def _request(self, call: Call[Any]) -> httpx.Request:
        """A call as it is sent; raises `BadArgument` if it cannot be sent."""
        if self.http.is_closed:
            raise BadArgument("the client is closed")
        if call.body is None:
            return self.http.build_request(call.method, call.path)
        return self.http.build_request(
            call.method, call.path, content=calls.written(call.body), headers=JSON_HEADERS
        )


class Transport(_Endpoint):
    """Sends calls and waits for their answers."""

    def __init__(self, url: str, api_key: str | None, retries: Retries, timeout: float) -> None:
        super().__init__(url, api_key, retries, timeout)
        self.http: httpx.Client = httpx.Client(**self.settings)

    def ask(self, call: Call[Answer]) -> Answer:
        """The value of the answer to a call."""
        return call.read(self.read(call))

    def read(self, call: Call[Any]) -> bytes:
        """The answer to a call; empty if it was lost on the way, though the call has been carried out."""
        attempts = Attempts(self.retries)
        while True:
            try:
                response = self.open(call)
                try:
                    return response.read()
                except httpx.TransportError as error:
                    raise lost_connection(self.url, error) from error
                finally:
                    response.close()
            except HoldfastError as error:
                if attempts.carried_out(error, call.carried_out):
                    return b""
                time.sleep(attempts.after(error))

    def open(self, call: Call[Any]) -> httpx.Response:
        """One attempt: a response whose status is good and whose body is still to be read."""
        request = self._request(call)
        try:
            response = self.http.send(request, stream=True)
            if response.is_success:
                return response
            try:
                raise error_from_response(response.status_code, response.read(), response.headers)
            finally:
                response.close()
        except httpx.TransportError as error:
            raise lost_connection(self.url, error) from error


class AsyncTransport(_Endpoint):
    """`Transport` for asynchronous code."""

    def __init__(self, url: str, api_key: str | None, retries: Retries, timeout: float) -> None:
        super().__init__(url, api_key, retries, timeout)
        self.http: httpx.AsyncClient = httpx.AsyncClient(**self.settings)

    async def ask(self, call: Call[Answer]) -> Answer:
        """The value of the answer to a call."""
        return call.read(await self.read(call))

    async def read(self, call: Call[Any]) -> bytes:
        """The answer to a call; empty if it was lost on the way, though the call has been carried out."""
        attempts = Attempts(self.retries)
        while True:
            try:
                response = await self.open(call)
                try:
                    return await response.aread()
                except httpx.TransportError as error:
                    raise lost_connection(self.url, error) from error
                finally:
                    await response.aclose()
            except HoldfastError as error:
                if attempts.carried_out(error, call.carried_out):
                    return b""
                await asyncio.sleep(attempts.after(error))

    async def open(self, call: Call[Any]) -> httpx.Response:
        """One attempt: a response whose status is good and whose body is still to be read."""
        request = self._request(call)
        try:
            response = await self.http.send(request, stream=True)
            if response.is_success:
                return response
            try:
                raise error_from_response(response.status_code, await response.aread(), response.headers)
            finally:
                await response.aclose()
        except httpx.TransportError as error:
            raise lost_connection(self.url, error) from error
