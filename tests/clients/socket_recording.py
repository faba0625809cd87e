"""A proxy in front of `/v1/realtime` that remembers the events of both sides, in order."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect
from websockets.sync.server import ServerConnection, serve

from tests.clients.conftest import serving
from tests.clients.telling import LONG

PASSED_ON = ("openai-beta",)
LONG_MARK = "(long)"
"""How recordings write the long text."""
TOO_LATE = "response_cancel_not_active"
"""The code of a cancellation whose response has ended."""


SIZES = ("--kv-tokens", "32768", "--context-length", "16384", "--tool-parser", "hermes")


@contextmanager
def restarting(folder: Path) -> Iterator[tuple[SocketRecorder, Callable[[], AbstractContextManager[str]]]]:
    """A proxy, and what starts the server behind it, on the same journal each time."""
    sockets = SocketRecorder("http://127.0.0.1:0")

    @contextmanager
    def server() -> Iterator[str]:
        with serving(folder / "errors", "echo", *SIZES, "--journal", str(folder / "journal")) as url:
            sockets.move_to(url)
            yield sockets.url

    try:
        yield sockets, server
    finally:
        sockets.close()


class SocketRecorder:
    """The proxy at `url`: events that clients sent, and those that they got."""

    def __init__(self, server: str) -> None:
        self.sent: list[dict[str, Any]] = []
        self.heard: list[dict[str, Any]] = []
        self._order: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.move_to(server)
        self._listener = serve(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._listener.socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._listener.serve_forever, daemon=True)
        self._thread.start()

    def move_to(self, server: str) -> None:
        """Connect to this server from now on."""
        self._target = f"ws://{urlsplit(server).netloc}"

    def close(self) -> None:
        """Stop."""
        self._listener.shutdown()
        self._thread.join()

    def errors(self) -> list[dict[str, Any]]:
        """The errors that clients got, but for those of cancellations that were said twice.

        livekit-agents says each one twice, and the second may come too late: it expects that.
        """
        errors = [event["error"] for event in self.heard if event["type"] == "error"]
        cancelled = sum(event["type"] == "response.cancel" for event in self.sent)
        cut = sum(response["status"] == "cancelled" for response in self.responses())
        late = [error for error in errors if error["code"] == TOO_LATE]
        return [error for error in errors if error not in late[: cancelled - cut]]

    def responses(self) -> list[dict[str, Any]]:
        """The responses that ended."""
        return [event["response"] for event in self.heard if event["type"] == "response.done"]

    def cached(self) -> list[tuple[int, int]]:
        """For each response: its cached tokens, and all tokens of the response before it."""
        usages = [response["usage"] for response in self.responses() if response["usage"] is not None]
        return [
            (usage["input_token_details"]["cached_tokens"], before["total_tokens"])
            for before, usage in pairwise(usages)
        ]

    def spoken(self) -> list[str]:
        """For each response its status, then the first words of its text or the names of its calls."""
        return [
            " ".join(
                [
                    response["status"],
                    *(
                        item["name"] if item["type"] == "function_call" else item["content"][0]["text"][:20]
                        for item in response["output"]
                    ),
                ]
            )
            for response in self.responses()
        ]

    def assert_story(self) -> None:
        """Two turns, a tool round, an interruption and one more turn: nothing of them is computed twice."""
        assert self.errors() == []
        hello, call, result, cut, after = self.spoken()
        assert (hello, call, after) == ("completed hello", "completed look", "completed after")
        assert result.startswith("completed <tool_response>") and cut.startswith("cancelled x")
        computed = self.cached()
        assert all(cached == before for cached, before in computed[:-1]), computed
        last_cached, before = computed[-1]
        assert before - last_cached == self._taken_back(), computed

    def _taken_back(self) -> int:
        """Letters, each a token, of the answer that was cut: those that its client has not kept.

        livekit-agents deletes what was cut and says again what of it it has heard.
        """
        (cut,) = (response["output"][0] for response in self.responses() if response["status"] == "cancelled")
        items = [event["item"] for event in self.sent if event["type"] == "conversation.item.create"]
        kept = [item["content"][0]["text"] for item in items if item.get("id") == cut["id"]]
        return len(cut["content"][0]["text"]) - len(kept[0]) if kept else 0

    def assert_continued(self) -> None:
        """The last response was made with all that the one before it had read and said."""
        assert self.errors() == []
        assert [spoken for spoken in self.spoken() if not spoken.startswith("completed")] == []
        before, after = (response["usage"] for response in self.responses()[-2:])
        assert after["input_tokens"] > before["total_tokens"], (before, after)

    def save(self, path: Path) -> None:
        """Write the first connection: what the client sent, and types and ids of what it got, in order."""
        recorded = {"path": self.paths[0], "headers": self.headers[0], "events": self._order}
        path.write_text(json.dumps(recorded, indent=1).replace(LONG, LONG_MARK) + "\n")

    def _note(self, event: dict[str, Any], *, heard: bool) -> None:
        if not heard:
            self.sent.append(event)
            self._order.append({"sent": event})
            return
        self.heard.append(event)
        shown = {"heard": event["type"]}
        if event["type"] == "response.output_item.added":
            item = event["item"]
            shown |= {name: item[name] for name in ("id", "call_id") if name in item}
        if not event["type"].endswith("delta") or self._order[-1] != shown:
            self._order.append(shown)

    def _serve(self, client: ServerConnection) -> None:
        assert client.request is not None
        headers = {name: client.request.headers[name] for name in PASSED_ON if name in client.request.headers}
        self.paths.append(client.request.path)
        self.headers.append(headers)
        with connect(self._target + client.request.path, additional_headers=headers) as server:

            def answer() -> None:
                try:
                    for text in server:
                        self._note(json.loads(text), heard=True)
                        client.send(text)
                except ConnectionClosed:
                    return
                finally:
                    client.close()

            answering = threading.Thread(target=answer, daemon=True)
            answering.start()
            try:
                for text in client:
                    self._note(json.loads(text), heard=False)
                    server.send(text)
            except ConnectionClosed:
                return
            finally:
                server.close()
                answering.join()
