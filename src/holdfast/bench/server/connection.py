"""A minimal HTTP client, so that the client takes little of the time that is measured."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

__all__ = ["Connection"]


class Connection:
    """One persistent connection."""

    def __init__(self, host: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._host = host
        self.reader = reader
        self.writer = writer

    @classmethod
    @asynccontextmanager
    async def open(cls, address: tuple[str, int]) -> AsyncIterator[Connection]:
        """Connect; leaving the context closes the connection."""
        reader, writer = await asyncio.open_connection(*address)
        try:
            yield cls(f"{address[0]}:{address[1]}", reader, writer)
        finally:
            writer.close()

    async def post(self, path: str, body: Any) -> tuple[int, dict[str, str]]:
        """Send a request; returns the status and the headers of its answer."""
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
        self.writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {
            name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])
        }
        return int(lines[0].split()[1]), headers

    async def whole(self, path: str, body: Any) -> Any:
        """Send a request and return the JSON of its answer."""
        status, headers = await self.post(path, body)
        answer = json.loads(await self.reader.readexactly(int(headers["content-length"])))
        if status not in (200, 201):
            raise RuntimeError(f"{path} answered {status}: {answer}")
        return answer

    async def stream(self, path: str, body: Any) -> tuple[float, float, int]:
        """Run a streamed turn; returns the seconds to its first token, its seconds, and its tokens."""
        began = time.perf_counter()
        status, _ = await self.post(path, body)
        if status != 200:
            raise RuntimeError(f"{path} answered {status}")
        first = 0.0
        tokens = 0
        while True:
            size = int(await self.reader.readline(), 16)
            chunk = await self.reader.readexactly(size + 2)
            if size == 0:
                return first, time.perf_counter() - began, tokens
            for line in chunk.split(b"\n"):
                if line.startswith(b"data: ") and b'"index"' in line:
                    first = first or time.perf_counter() - began
                    tokens += len(json.loads(line[6:])["token_ids"])
