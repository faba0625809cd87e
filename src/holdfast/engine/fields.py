"""Declarations of request fields: type, default, bound and meaning in one place.

A dataclass whose fields are made by `declared` is a declaration. Everything that reads requests (the HTTP
dialects, the wire, the command) takes names, types, defaults and bounds from `declarations`, so a field is
written down once. Standard library only.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Union, get_args, get_origin, get_type_hints

__all__ = ["INTEGER_MAX", "Bound", "Declared", "check_for", "declarations", "declared"]

INTEGER_MAX = 1 << 31


@dataclass(frozen=True, slots=True)
class Bound:
    """How large a field may be; each part applies to the values that it fits.

    `low` and `high` are for numbers, those in lists and mappings included; with `above`, `low` itself is out
    of range. `characters` is for a text and each text of a list, `entries` for lists and mappings. With
    `context`, a text or a list of token ids must fit the model's context. `size` is for an object of any
    content, in bytes, nested at most `depth` deep. `code` is the error code of a value out of bounds.
    """

    low: float | None = None
    high: float | None = None
    above: bool = False
    characters: int | None = None
    entries: int | None = None
    context: bool = False
    size: int | None = None
    depth: int | None = None
    code: str = "invalid_value"

    def allows(self, value: float) -> bool:
        """Whether a number is in range."""
        if self.low is None or self.high is None:
            return True
        return self.low <= value <= self.high and not (self.above and value == self.low)

    @property
    def range(self) -> str:
        """The range of numbers, for error messages."""
        if self.above:
            return f"must be more than {self.low} and at most {self.high}"
        return f"must be between {self.low} and {self.high}"


@dataclass(frozen=True, slots=True)
class Declared:
    """One declared field. `kind` is its type without None; `plain` is the value if neither the request nor
    the checkpoint gives one."""

    name: str
    kind: Any
    default: Any
    optional: bool
    bound: Bound | None
    meaning: str
    plain: Any = None


@dataclass(frozen=True, slots=True)
class _Notes:
    bound: Bound | None
    meaning: str
    plain: Any


def declared(default: Any, bound: Bound | None, meaning: str, *, plain: Any = None) -> Any:
    """A dataclass field with its bound and its meaning."""
    notes = {"declared": _Notes(bound, meaning, plain)}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=notes)
    return field(default=default, metadata=notes)


def declarations(kind: type[Any]) -> Mapping[str, Declared]:
    """The declared fields of a dataclass, by name and in order."""
    hints = get_type_hints(kind)
    found: dict[str, Declared] = {}
    for each in fields(kind):
        notes: _Notes = each.metadata["declared"]
        hint = hints[each.name]
        alternatives = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        stated = tuple(one for one in alternatives if one is not type(None))
        default = each.default_factory() if each.default is MISSING else each.default  # type: ignore[misc]
        found[each.name] = Declared(
            each.name,
            stated[0] if len(stated) == 1 else Union[stated],  # noqa: UP007
            default,
            len(stated) < len(alternatives),
            notes.bound,
            notes.meaning,
            notes.plain,
        )
    return types.MappingProxyType(found)


Check = Callable[[Any, Bound], str | None]
"""Says what is wrong with a value, or None."""


def check_for(kind: Any) -> Check | None:
    """The check for values of a declared type; None for types without bounds."""
    return CHECKS.get(kind)


def _integer(value: Any, bound: Bound) -> str | None:
    if isinstance(value, bool) or not isinstance(value, int):
        return "must be an integer"
    return None if bound.allows(value) else bound.range


def _number(value: Any, bound: Bound) -> str | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return "must be a finite number"
    return None if bound.allows(value) else bound.range


def _texts(value: Any, bound: Bound) -> str | None:
    texts = (value,) if isinstance(value, str) else value
    if bound.entries is not None and len(texts) > bound.entries:
        return f"may have at most {bound.entries} strings"
    characters = bound.characters or INTEGER_MAX
    if all(isinstance(text, str) and 1 <= len(text) <= characters for text in texts):
        return None
    return f"must be strings of 1 to {characters} characters"


def _integers(value: Any, bound: Bound) -> str | None:
    if bound.entries is not None and len(value) > bound.entries:
        return f"may have at most {bound.entries} entries"
    return next((problem for each in value if (problem := _integer(each, bound)) is not None), None)


def _numbers_by_token(value: Any, bound: Bound) -> str | None:
    if bound.entries is not None and len(value) > bound.entries:
        return f"may have at most {bound.entries} entries"
    for token, number in value.items():
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= INTEGER_MAX:
            return f"must be keyed by token ids from 0 to {INTEGER_MAX}"
        if (problem := _number(number, bound)) is not None:
            return problem
    return None


CHECKS: Mapping[Any, Check] = {
    int: _integer,
    float: _number,
    str | Sequence[str]: _texts,
    Sequence[int]: _integers,
    Mapping[int, float]: _numbers_by_token,
}
