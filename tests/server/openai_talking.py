"""An OpenAI realtime client for the tests: sends events as they are written, and waits for others."""

import contextlib
import itertools
import json
from types import TracebackType
from typing import Any

from websockets.sync.client import ClientConnection, connect

from tests.server.serving import Server

Body = dict[str, Any]


def message(text: str, role: str = "user", **fields: Any) -> Body:
    """An item: a message of one part."""
    part = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": part, "text": text}], **fields}


class OpenAITalk:
    """One connection to `/v1/realtime`, as OpenAI's clients make it."""

    def __init__(self, server: Server, query: str = "?model=any", **options: Any) -> None:
        url = server.url.replace("http://", "ws://") + "/v1/realtime" + query
        self._stack = contextlib.ExitStack()
        self.connection: ClientConnection = self._stack.enter_context(connect(url, **options))
        self.heard: list[Body] = []
        self._numbers = itertools.count(1)
        self.session: Body = {}
        if query or options:
            self.session = self.hear("session.created")["session"]

    def __enter__(self) -> "OpenAITalk":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def send(self, event: Body) -> None:
        self.connection.send(json.dumps(event))

    def hear(self, *kinds: str) -> Body:
        """The next event of one of these types; all that come are in `heard`."""
        while True:
            event: Body = json.loads(self.connection.recv(timeout=60))
            self.heard.append(event)
            if event["type"] in kinds:
                return event

    def told(self, event: Body, kind: str) -> Body:
        """Send an event, and wait for its answer, which is no error."""
        self.send(event)
        answer = self.hear(kind, "error")
        assert answer["type"] == kind, answer
        return answer

    def refused(self, event: Body) -> Body:
        """Send an event with an id, and wait for the error about it."""
        name = f"mine-{next(self._numbers)}"
        self.send({**event, "event_id": name})
        error: Body = self.hear("error")["error"]
        assert error["event_id"] == name, error
        return error

    def update(self, **fields: Any) -> Body:
        """Change settings, and return them all."""
        session: Body = self.told({"type": "session.update", "session": fields}, "session.updated")["session"]
        return session

    def create(self, item: Body, **fields: Any) -> Body:
        """Create an item, and return it with the id of the item before it."""
        event = {"type": "conversation.item.create", "item": item, **fields}
        return self.told(event, "conversation.item.added")

    def respond(self, **fields: Any) -> Body:
        """Have a response made, and return it as it ended."""
        self.send({"type": "response.create", "response": fields})
        return self.ended()

    def ended(self) -> Body:
        """The next response that ends."""
        answer = self.hear("response.done", "error")
        assert answer["type"] == "response.done", answer
        response: Body = answer["response"]
        return response

    def ask(self, text: str, **fields: Any) -> Body:
        """Say something as the user, and return the response."""
        self.send({"type": "conversation.item.create", "item": message(text)})
        return self.respond(**fields)

    def kinds(self) -> list[str]:
        """The types of what was heard since the last call; those that follow each other once."""
        kinds = [event["type"] for event in self.heard]
        self.heard.clear()
        return [kind for kind, _ in itertools.groupby(kinds)]


def text_of(response: Body) -> str:
    """The text of a response's messages."""
    return "".join(
        part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"]
    )


def computed(response: Body) -> int:
    """The tokens of the input that a response had to compute."""
    usage = response["usage"]
    return int(usage["input_tokens"]) - int(usage["input_token_details"]["cached_tokens"])
