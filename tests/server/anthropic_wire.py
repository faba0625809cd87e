"""Requests and answers of Anthropic's dialect over HTTP, for the tests."""

import json
from typing import Any

from tests.server.serving import Server

Body = dict[str, Any]

WEATHER: Body = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern", "days": 2}}\n</tool_call>'
ROUND = f"<think>Hm.</think>Let me see.\n{CALL}"
"""What the echo model says in thinking, text and a call."""


def user(content: Any) -> Body:
    return {"role": "user", "content": content}


def text(said: str, **more: Any) -> Body:
    return {"type": "text", "text": said, **more}


def result(call: str, content: Any, **more: Any) -> Body:
    return {"type": "tool_result", "tool_use_id": call, "content": content, **more}


def body(*messages: Body, **fields: Any) -> Body:
    return {"model": "echo", "max_tokens": 400, "temperature": 0, "messages": list(messages), **fields}


def create(server: Server, *messages: Body, **fields: Any) -> Body:
    """A whole answer."""
    answer = server.post("/v1/messages", body(*messages, **fields))
    assert answer.status_code == 200, answer.text
    message: Body = answer.json()
    return message


def stream(server: Server, *messages: Body, **fields: Any) -> list[Body]:
    """The events of an answer, in order; each is named as its type."""
    answer = server.post("/v1/messages", body(*messages, stream=True, **fields))
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events_of(answer.text)


def events_of(content: str) -> list[Body]:
    events = []
    for block in content.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def collected(events: list[Body]) -> Body:
    """The message that a client puts together from a stream, as Anthropic's clients do."""
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
    message: Body = events[0]["message"]
    open_block, written = None, ""
    for event in events[1:-1]:
        match event["type"]:
            case "content_block_start":
                assert open_block is None and event["index"] == len(message["content"])
                open_block, written = dict(event["content_block"]), ""
            case "content_block_delta":
                assert open_block is not None and event["index"] == len(message["content"])
                delta = dict(event["delta"])
                kind, ((name, piece),) = delta.pop("type"), delta.items()
                if kind == "input_json_delta":
                    written += piece
                else:
                    assert kind == f"{name}_delta"
                    open_block[name] += piece
            case "content_block_stop":
                assert open_block is not None and event["index"] == len(message["content"])
                if open_block["type"] == "tool_use":
                    open_block["input"] = json.loads(written or "{}")
                message["content"].append(open_block)
                open_block = None
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
            case other:
                assert other == "ping"
    assert open_block is None
    return message


def total(usage: Body) -> int:
    """All tokens of a prompt."""
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    return sum(int(usage[name]) for name in names)
