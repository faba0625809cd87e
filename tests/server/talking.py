"""A realtime client for the tests: says messages, and waits for those that it expects."""

import contextlib
import json
from types import TracebackType
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from tests.server.serving import Server

Body = dict[str, Any]

LONG = {"max_tokens": 6000, "ignore_eos": True}
"""Sampling of a turn that takes long enough to be cut."""


class Talk:
    """One connection to `/v1/realtime`."""

    def __init__(self, server: Server, **options: Any) -> None:
        url = server.url.replace("http://", "ws://") + "/v1/realtime"
        self._stack = contextlib.ExitStack()
        self.connection: ClientConnection = self._stack.enter_context(connect(url, **options))
        self.heard: list[Body] = []

    def __enter__(self) -> "Talk":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def say(self, kind: str, **fields: Any) -> None:
        self.connection.send(json.dumps({"type": kind, **fields}))

    def hear(self, *kinds: str) -> Body:
        """The next message of one of these kinds; what comes before it is in `heard`."""
        while True:
            message: Body = json.loads(self.connection.recv(timeout=60))
            self.heard.append(message)
            if message["type"] in kinds:
                return message

    def open(self, name: str | None = None, **fields: Any) -> Body:
        self.say("session.open", **fields, **({} if name is None else {"id": name}))
        return self.hear("session.opened")

    def commit(self, text: str, **fields: Any) -> None:
        self.say("input.append", text=text)
        self.say("input.commit", **fields)

    def turn(self, text: str, **fields: Any) -> Body:
        """Say something and hear the whole answer."""
        self.commit(text, **fields)
        return self.hear("response.done")

    def refused(self) -> Body:
        """The error that is the next message."""
        message = self.hear("error", "response.started", "session.opened", "session.closed")
        assert message["type"] == "error", message
        error: Body = message["error"]
        return error

    def closed_with(self) -> int:
        """The code that the server closes the connection with."""
        with pytest.raises(ConnectionClosed) as closed:
            self.hear("nothing that is ever said")
        assert closed.value.rcvd is not None
        return int(closed.value.rcvd.code)

    def drop(self) -> None:
        """Break the connection without a word."""
        self.connection.socket.close()

    def last_seq(self) -> int:
        return max(int(message["seq"]) for message in self.heard if message["seq"] is not None)


def spoken(messages: list[Body], turn_id: str) -> str:
    """The text of a turn's deltas."""
    return "".join(
        message["text"]
        for message in messages
        if message["type"] == "response.delta" and message["turn_id"] == turn_id
    )
