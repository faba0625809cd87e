"""A client of the native door for the tests: calls, and answers that run beside them."""

import json
import threading
import time
from typing import Any

import httpx

from tests.plain import NO_TLS
from tests.server.serving import Server

GREEDY = {"temperature": 0}
LONG = {"max_new_tokens": 100_000, "ignore_eos": True}
"""Sampling of an answer that takes long enough to be stopped."""


class Running:
    """An answer that is read by a thread of its own."""

    def __init__(self, server: Server, body: dict[str, Any], headers: dict[str, str]) -> None:
        self.chunks: list[Any] = []
        self.status: int | None = None
        self.text = ""
        self._dropped = False
        self._http = httpx.Client(base_url=server.url, headers=headers, timeout=60, verify=NO_TLS)
        self._body = body
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self._http.stream("POST", "/generate", json=self._body) as answer:
            self.status = answer.status_code
            if not self._body["stream"] or answer.status_code != 200:
                self.text = answer.read().decode()
                self.chunks.append(json.loads(self.text))
                return
            for line in answer.iter_lines():
                if self._dropped:
                    return
                if line.startswith("data: ") and line != "data: [DONE]":
                    self.chunks.append(json.loads(line.removeprefix("data: ")))

    @property
    def tokens(self) -> int:
        return int(self.chunks[-1]["meta_info"]["completion_tokens"]) if self.chunks else 0

    def wait_for_tokens(self, count: int) -> None:
        """Wait until that many tokens were said."""
        deadline = time.monotonic() + 30
        while self.tokens < count:
            assert time.monotonic() < deadline and self.status in (None, 200), (self.status, self.text)
            time.sleep(0.005)

    def last(self) -> Any:
        """The end of the answer."""
        self._thread.join(60)
        assert not self._thread.is_alive(), "the answer does not end"
        self._http.close()
        return self.chunks[-1]

    def drop(self) -> None:
        """Go away in the middle."""
        self._dropped = True
        self._thread.join(60)
        self._http.close()


class NativeClient:
    """Calls of SGLang's interface."""

    def __init__(self, server: Server, key: str | None = None) -> None:
        self.server = server
        self.headers = {} if key is None else {"authorization": f"Bearer {key}"}

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.server.http.post(path, json=body, headers=self.headers)

    def get(self, path: str) -> httpx.Response:
        return self.server.http.get(path, headers=self.headers)

    def generate(self, **body: Any) -> Any:
        """A whole answer."""
        answer = self.post("/generate", body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refused(self, **body: Any) -> tuple[int, str | None]:
        """The status and the field of a refusal."""
        answer = self.post("/generate", body)
        assert 400 <= answer.status_code < 500, answer.text
        error = answer.json()["error"]
        assert error["message"]
        return answer.status_code, error["param"]

    def stream(self, **body: Any) -> list[Any]:
        """All chunks of a streamed answer."""
        with self.server.http.stream(
            "POST", "/generate", json={**body, "stream": True}, headers=self.headers
        ) as answer:
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            said = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        return [chunk if chunk == "[DONE]" else json.loads(chunk) for chunk in said]

    def begin(self, stream: bool = True, **body: Any) -> Running:
        """An answer that runs while other calls are made."""
        return Running(self.server, {**body, "stream": stream}, self.headers)

    def open(self, **body: Any) -> str:
        answer = self.post("/open_session", {"capacity_of_str_len": 1000, **body})
        assert answer.status_code == 200, answer.text
        name = answer.json()
        assert isinstance(name, str)
        return name

    def close(self, name: str) -> int:
        return self.post("/close_session", {"session_id": name}).status_code

    def abort(self, **body: Any) -> int:
        return self.post("/abort_request", body).status_code

    def turn(self, session: str, text: str, **more: Any) -> Any:
        """A turn of a session."""
        params = {"id": session, **more.pop("session_params", {})}
        return self.generate(text=text, session_params=params, **more)

    def until_running(self, count: int) -> None:
        """Wait until that many turns hold memory."""
        deadline = time.monotonic() + 30
        while self._turns() < count:
            assert time.monotonic() < deadline, "no turn runs"
            time.sleep(0.005)

    def _turns(self) -> int:
        memory = self.server.get("/v1/memory", headers=self.headers).json()
        return sum(entry["holder"].startswith("turn") for entry in memory["top"])


def total(answer: Any) -> int:
    """All tokens of a turn and of what came before it."""
    meta = answer["meta_info"]
    return int(meta["prompt_tokens"] + meta["completion_tokens"])
