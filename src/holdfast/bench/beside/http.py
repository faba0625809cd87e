"""A minimal HTTP client that times streamed answers.

The servers share the machine with this client, so events are not decoded while they arrive: the lines of
server-sent events are kept as bytes.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

__all__ = ["BenchError", "Busy", "Timing", "ask", "stream"]

HOST = "127.0.0.1"
LINE_BYTES_MAX = 1 << 22


class BenchError(RuntimeError):
    """A measured system failed or gave a wrong answer."""


class Busy(BenchError):
    """The session is busy (409); a retry may succeed."""


@dataclass(slots=True)
class Timing:
    """Times of one answer in seconds since its request was sent; `events` are its data lines."""

    first: float
    total: float
    events: list[bytes] = field(default_factory=list)

    def payloads(self) -> list[dict[str, Any]]:
        """The events as objects, without the end mark."""
        return [json.loads(line) for line in self.events if line.startswith(b"{")]


async def stream(port: int, path: str, body: dict[str, Any], leave_after: int | None = None) -> Timing:
    """Send a request and collect its events; with `leave_after` close the connection after so many."""
    timing = Timing(0.0, 0.0)
    try:
        await _listen(port, path, body, leave_after, timing)
    except OSError as error:
        raise BenchError(f"connection to {path} lost: {error}") from error
    if not timing.events:
        raise BenchError(f"{path} answered without an event")
    return timing


async def _listen(
    port: int, path: str, body: dict[str, Any], leave_after: int | None, timing: Timing
) -> None:
    began = time.perf_counter()
    reader, writer = await _send(port, "POST", path, body)
    try:
        await _expect_success(reader, path)
        while line := await reader.readline():
            if not line.startswith(b"data:"):
                continue
            if not timing.events:
                timing.first = time.perf_counter() - began
            data = line[5:].strip()
            if data == b"[DONE]":
                break
            timing.events.append(data)
            if leave_after is not None and len(timing.events) >= leave_after:
                break
    finally:
        writer.close()
    timing.total = time.perf_counter() - began


async def ask(port: int, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """Send a request and return the JSON of its answer."""
    reader, writer = await _send(port, method, path, body)
    try:
        await _expect_success(reader, path)
        text = await reader.read()
    finally:
        writer.close()
    start = min((place for mark in (b"{", b"[") if (place := text.find(mark)) >= 0), default=-1)
    return json.JSONDecoder().raw_decode(text[start:].decode())[0] if start >= 0 else None


async def _send(
    port: int, method: str, path: str, body: dict[str, Any] | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(HOST, port, limit=LINE_BYTES_MAX)
    content = b"" if body is None else json.dumps(body).encode()
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: {HOST}:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode() + content)
    await writer.drain()
    return reader, writer


async def _expect_success(reader: asyncio.StreamReader, path: str) -> None:
    """Read the status and headers of an answer; raise `BenchError` with its text unless it is a success."""
    status = await reader.readline()
    while (await reader.readline()).strip():
        continue
    parts = status.split()
    if len(parts) < 2 or not parts[1].startswith(b"2"):
        text = (await reader.read())[:500].decode(errors="replace")
        kind = Busy if parts[1:2] == [b"409"] else BenchError
        raise kind(f"{path} answered {status.decode(errors='replace').strip()}: {text}")
