"""Random JSON schemas with instances that satisfy them, and a hundred fixed ones for measurements.

`make_schema(random)` draws a schema in the manner of JSONSchemaBench: nested objects, arrays, enums,
patterns, formats, bounds, references, unions and recursion. `Made.instance` draws a value that the schema
allows, with its properties in the schema's order, which is the order that constrained output has. Used by the
benchmarks of constrained turns and by `tests/constraints`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

__all__ = ["FIXED_KEYS", "Made", "endless", "hundred", "make_schema", "object_of"]

Instance = Callable[[Random], Any]

FIXED_KEYS = ["name", "age", "height", "weight", "score", "identifier"]
ENDLESS_ITEMS = 200

LETTERS = "abcdefghijklmnopqrstuvwxyz"
TEXT = [*LETTERS, *"ABCXYZ 0123456789.,-_/<>", '"', "\\", "\n", "é", "日", "😀"]
NAMES = [
    "id",
    "name",
    "kind",
    "value",
    "city",
    "tags",
    "notes",
    "size",
    "is_open",
    "créé",
    "a b",
    "x-y",
    "items",
]

PATTERNS: list[tuple[str, Instance]] = [
    ("^[a-z]{2,8}$", lambda random: _letters(random, 2, 8)),
    ("^[A-Z]{3}-[0-9]{4}$", lambda random: f"{_letters(random, 3, 3).upper()}-{random.randrange(10_000):04}"),
    (r"^\d{3}(-\d{2})?$", lambda random: random.choice(["123", "456-78"])),
    ("^(red|green|blue)$", lambda random: random.choice(["red", "green", "blue"])),
    (
        r"^https?://[a-z]+\.org/",
        lambda random: f"https://{_letters(random, 1, 5)}.org/{_letters(random, 0, 3)}",
    ),
]
FORMATS: list[tuple[str, Instance]] = [
    (
        "date",
        lambda random: f"20{random.randrange(100):02}-{random.randint(1, 12):02}-{random.randint(1, 28):02}",
    ),
    ("date-time", lambda random: f"2026-11-17T{random.randrange(24):02}:30:00Z"),
    ("uuid", lambda random: "123e4567-e89b-12d3-a456-42661417400" + str(random.randrange(10))),
    ("email", lambda random: f"{_letters(random, 1, 6)}@example.org"),
    ("ipv4", lambda random: f"10.0.{random.randrange(256)}.{random.randrange(256)}"),
]


@dataclass(frozen=True)
class Made:
    """A schema and a way to draw values for it."""

    schema: dict[str, Any]
    instance: Instance

    def text(self, random: Random) -> str:
        """A value as constrained output writes it."""
        return json.dumps(self.instance(random), ensure_ascii=False)


def make_schema(random: Random, depth: int = 3) -> Made:
    """A schema with an object at its root; one in four has definitions, one in eight is recursive."""
    if random.random() < 0.125:
        return _recursive(random)
    made = _object(random, depth)
    if random.random() < 0.25:
        shared = _leaf(random)
        schema = {
            "$defs": {"shared": shared.schema},
            "type": "object",
            "properties": {"first": {"$ref": "#/$defs/shared"}, "rest": made.schema},
            "required": ["first", "rest"],
            "additionalProperties": False,
        }
        return Made(schema, lambda draw: {"first": shared.instance(draw), "rest": made.instance(draw)})
    return made


def hundred() -> list[dict[str, Any]]:
    """The schemas of the measurements: small to large, always the same."""
    return [make_schema(Random(seed), depth=1 + seed % 4).schema for seed in range(100)]


def endless(schema: dict[str, Any]) -> dict[str, Any]:
    """A long array of what a schema describes: a turn does not end while it is measured."""
    items = {name: value for name, value in schema.items() if name != "$defs"}
    array = {"type": "array", "items": items, "minItems": ENDLESS_ITEMS}
    return array | ({"$defs": schema["$defs"]} if "$defs" in schema else {})


def object_of(names: list[str]) -> dict[str, Any]:
    """The schema of an object of integers with these keys and no others."""
    return {
        "type": "object",
        "properties": {name: {"type": "integer", "minimum": 0, "maximum": 99} for name in names},
        "required": names,
        "additionalProperties": False,
    }


def _any(random: Random, depth: int) -> Made:
    makers: list[Callable[[Random], Made]] = [_leaf, _leaf, _leaf]
    if depth > 0:
        makers += [
            lambda each: _object(each, depth - 1),
            lambda each: _array(each, depth - 1),
            lambda each: _union(each, depth - 1),
        ]
    return random.choice(makers)(random)


def _leaf(random: Random) -> Made:
    return random.choice(
        [_string, _string, _pattern, _format, _integer, _number, _enum, _constant, _boolean]
    )(random)


def _string(random: Random) -> Made:
    if random.random() < 0.5:
        return Made({"type": "string"}, lambda draw: _text(draw, 0, 12))
    least, more = random.randrange(4), random.randrange(1, 12)
    schema = {"type": "string", "minLength": least, "maxLength": least + more, "description": "a text"}
    return Made(schema, lambda draw: _text(draw, least, least + more))


def _pattern(random: Random) -> Made:
    pattern, instance = random.choice(PATTERNS)
    return Made({"type": "string", "pattern": pattern}, instance)


def _format(random: Random) -> Made:
    name, instance = random.choice(FORMATS)
    return Made({"type": "string", "format": name}, instance)


def _integer(random: Random) -> Made:
    if random.random() < 0.4:
        return Made({"type": "integer"}, lambda draw: draw.randint(-(10**6), 10**6))
    least = random.randint(-500, 500)
    most = least + random.randint(0, 2000)
    return Made(
        {"type": "integer", "minimum": least, "maximum": most}, lambda draw: draw.randint(least, most)
    )


def _number(random: Random) -> Made:
    if random.random() < 0.5:
        return Made({"type": "number"}, lambda draw: draw.randint(-(10**6), 10**6) / 64)
    least = random.randint(-50, 50)
    most = least + random.randint(1, 100)
    schema = {"type": "number", "minimum": least, "exclusiveMaximum": most}
    return Made(schema, lambda draw: least + draw.randrange((most - least) * 4) / 4)


def _enum(random: Random) -> Made:
    values: list[Any] = random.choice(
        [
            ["red", "green", "blue"],
            [1, 2, "three", None],
            [True, False],
            [f"value {index}" for index in range(40)],
        ]
    )
    return Made({"enum": values}, lambda draw: draw.choice(values))


def _constant(random: Random) -> Made:
    value = random.choice(["fixed", 42, None, {"a": [1, 2]}, "<|end|> as text"])
    return Made({"const": value}, lambda _draw: value)


def _boolean(_random: Random) -> Made:
    return Made({"type": ["boolean", "null"]}, lambda draw: draw.choice([True, False, None]))


def _array(random: Random, depth: int) -> Made:
    inner = _any(random, depth)
    least, more = random.randrange(3), random.randrange(4)
    schema = {"type": "array", "items": inner.schema, "minItems": least, "maxItems": least + more}
    return Made(schema, lambda draw: [inner.instance(draw) for _ in range(draw.randint(least, least + more))])


def _union(random: Random, depth: int) -> Made:
    choices = [_any(random, depth) for _ in range(random.randint(2, 3))]
    return Made(
        {"anyOf": [made.schema for made in choices]}, lambda draw: draw.choice(choices).instance(draw)
    )


def _object(random: Random, depth: int) -> Made:
    names = random.sample(NAMES, random.randint(1, 6))
    inner = {name: _any(random, depth) for name in names}
    required = [name for name in names if random.random() < 0.7]
    schema: dict[str, Any] = {
        "title": "An object",
        "type": "object",
        "properties": {name: made.schema for name, made in inner.items()},
        "required": required,
        "additionalProperties": False,
    }

    def instance(draw: Random) -> Any:
        present = [name for name in names if name in required or draw.random() < 0.5]
        return {name: inner[name].instance(draw) for name in present}

    return Made(schema, instance)


def _recursive(random: Random) -> Made:
    leaf = _leaf(random)
    node = {
        "type": "object",
        "properties": {
            "value": leaf.schema,
            "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
        },
        "required": ["value", "children"],
        "additionalProperties": False,
    }

    def instance(draw: Random, depth: int = 3) -> Any:
        count = draw.randrange(3) if depth else 0
        return {"value": leaf.instance(draw), "children": [instance(draw, depth - 1) for _ in range(count)]}

    return Made({"$defs": {"node": node}, "$ref": "#/$defs/node"}, instance)


def _letters(random: Random, least: int, most: int) -> str:
    return "".join(random.choice(LETTERS) for _ in range(random.randint(least, most)))


def _text(random: Random, least: int, most: int) -> str:
    return "".join(random.choice(TEXT) for _ in range(random.randint(least, most)))
