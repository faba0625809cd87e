"""Sampling that cannot be, by field and value: what every door must refuse, under the names that it knows.

Bodies that are no JSON stand with the tests of each door, because they break the very fields that it reads.
"""

from __future__ import annotations

from typing import Any

JSON = {"content-type": "application/json"}

SECRET = "zqxjkvbp"
"""Stands in values that are wrong, and must not come back."""

SAMPLING: list[tuple[str, Any]] = [
    ("temperature", "hot" + SECRET),
    ("temperature", -1),
    ("temperature", True),
    ("temperature", 1e300),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_p", "x"),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_k", 2**63),
    ("min_p", -0.1),
    ("min_p", 2),
    ("max_tokens", -1),
    ("max_tokens", 2**63),
    ("max_tokens", True),
    ("max_tokens", 5.0),
    ("max_tokens", "5"),
    ("frequency_penalty", 1e308),
    ("presence_penalty", -3),
    ("repetition_penalty", 0),
    ("repetition_penalty", 1e308),
    ("seed", 2**65),
    ("seed", "x"),
    ("logit_bias", {str(token): 1.0 for token in range(100_000)}),
    ("logit_bias", {"999999": 1.0}),
    ("logit_bias", {"-1": 1.0}),
    ("logit_bias", {SECRET: 1.0}),
    ("logit_bias", {"1": 1e9}),
    ("stop", ""),
    ("stop", [""]),
    ("stop", "x" * 1_000_000),
    ("stop", ["x"] * 10_000),
    ("stop", [1]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [1 << 40]),
    ("ignore_eos", "yes"),
]


def renamed(**names: str) -> list[tuple[str, Any]]:
    """The same values for a door that calls some of the fields differently."""
    return [(names.get(field, field), value) for field, value in SAMPLING]


ODD: list[Any] = [
    None,
    True,
    0,
    -1,
    1.5,
    2**64,
    "",
    "x",
    SECRET,
    [],
    [[]],
    {},
    {"type": "text"},
    [None],
    "\x00",
]
"""Values of every kind, for whatever place."""


def replaced(value: Any, number: int, odd: Any) -> tuple[Any, int]:
    """A value whose inner value of that number, counted depth first, is another; and how many there were."""
    if number == 0:
        return odd, 1
    count = 1
    if isinstance(value, dict | list):
        made: Any = dict(value) if isinstance(value, dict) else list(value)
        for key in value if isinstance(value, dict) else range(len(value)):
            made[key], inner = replaced(value[key], number - count, odd)
            count += inner
        return made, count
    return value, count
