"""Tools of the agents in the tests, and calls as models write them and as clients read them."""

import json
from typing import Any

__all__ = [
    "BERN",
    "OSLO",
    "SING",
    "TOOLS",
    "WEATHER",
    "assert_valid",
    "called",
    "calling",
    "session_calls",
    "user",
]

Body = dict[str, Any]

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Bern", "Oslo"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
SING: Any = {
    "type": "function",
    "function": {
        "name": "sing",
        "parameters": {
            "type": "object",
            "properties": {"loud": {"type": "boolean"}},
            "required": ["loud"],
            "additionalProperties": False,
        },
    },
}
TOOLS = [WEATHER, SING]
BERN = {"city": "Bern", "days": 2}
OSLO = {"city": "Oslo", "days": 1}


def calling(name: str, arguments: Any) -> str:
    """A call as a model writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def called(message: Any) -> list[tuple[str, Any]]:
    """The calls of a message of OpenAI's client."""
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]


def session_calls(calls: list[Body]) -> list[tuple[str, Any]]:
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def assert_valid(name: str, arguments: Any) -> None:
    """The arguments satisfy the schema of the tool."""
    if name == "sing":
        assert list(arguments) == ["loud"] and isinstance(arguments["loud"], bool)
    else:
        assert name == "weather" and set(arguments) == {"city", "days"}
        assert arguments["city"] in ("Bern", "Oslo") and arguments["days"] in range(1, 8)
