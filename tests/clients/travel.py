"""The tools and the output type that every client is given, with checks of what came of them."""

from __future__ import annotations

import json
from typing import Any, Literal

import jsonschema_rs
from pydantic import BaseModel, Field

City = Literal["Paris", "Rome", "Oslo"]

WEATHER_PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
PRICE_PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city for some days.",
        "parameters": WEATHER_PARAMETERS,
    },
}
PRICE = {
    "type": "function",
    "function": {
        "name": "price",
        "description": "The price of a journey to a city, in euros.",
        "parameters": PRICE_PARAMETERS,
    },
}
PARAMETERS = {"weather": WEATHER_PARAMETERS, "price": PRICE_PARAMETERS}
QUESTION = "What is the weather in Rome for two days, and what does it cost to get there?"


class Trip(BaseModel):
    """A trip."""

    city: City
    days: int = Field(ge=1, le=7)
    cheap: bool


def assert_valid(name: str, arguments: str | dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call, which must satisfy the tool's schema."""
    read: dict[str, Any] = json.loads(arguments) if isinstance(arguments, str) else arguments
    jsonschema_rs.validate(PARAMETERS[name], read)
    return read


class Tools:
    """The tools as functions that remember how they were called."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def weather(self, city: City, days: int) -> str:
        """The weather of a city for some days."""
        self.calls.append(("weather", assert_valid("weather", {"city": city, "days": days})))
        return f"{city}: sunny for {days} days"

    def price(self, city: City) -> str:
        """The price of a journey to a city, in euros."""
        self.calls.append(("price", assert_valid("price", {"city": city})))
        return "120"

    def answer(self, name: str, arguments: str | dict[str, Any]) -> str:
        """The result of a call."""
        read = assert_valid(name, arguments)
        return self.weather(**read) if name == "weather" else self.price(**read)
