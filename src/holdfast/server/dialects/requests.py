"""Request bodies made from the dialects' tables, once, at import.

A route declares its own fields; `make_body` adds those of its tables and, in dialects that
ignore unknown fields, those that are refused by name. `described` is for the OpenAPI document, `read`
decodes the body.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from operator import attrgetter, or_
from types import UnionType
from typing import Any, Generic, TypeVar, cast, get_args, get_origin

import msgspec

from holdfast.server.dialects.refused import FIELDS, NOT_BUILT, Values
from holdfast.server.dialects.table import FieldTable
from holdfast.server.http.problems import bad_field

__all__ = ["Body", "make_body", "refuse_unbuilt"]

T = TypeVar("T", bound=msgspec.Struct)


class _Refusals:
    """The refused fields of one kind of body."""

    def __init__(self, fields: Mapping[str, Values], reasons: Mapping[str, str]) -> None:
        assert len(fields) > 1, "attrgetter makes no tuple of one name"
        self._fields = fields
        self._reasons = reasons
        self._values_of = attrgetter(*fields)

    def check(self, body: msgspec.Struct, prefix: str) -> None:
        """Raise for the first field that asks for something that is not built."""
        given = self._values_of(body)
        if given.count(None) == len(given):
            return
        for (name, allowed), value in zip(self._fields.items(), given, strict=True):
            if value is not None and not any(type(value) is type(one) and value == one for one in allowed):
                reason = self._reasons.get(name, NOT_BUILT)
                raise bad_field(f"{prefix}{name}", reason, "unsupported")


_refusals: dict[type[msgspec.Struct], _Refusals] = {}
"""The refused fields of each kind of body that has any."""


@dataclass(frozen=True, slots=True)
class Body(Generic[T]):
    """One kind of request body: as the OpenAPI document shows it, and as it is decoded."""

    described: type[T]
    read: type[T]


def make_body(
    kind: type[T],
    *tables: FieldTable[Any],
    refused: Mapping[str, Values] = FIELDS,
    nested: Mapping[str, Body[Any]] | None = None,
    **allowed: Values,
) -> Body[T]:
    """The body `kind` with the fields of `tables`.

    `nested` are fields that are bodies in turn, alone or as a list. `allowed` are values of refused fields
    that ask for nothing here.
    """
    inner = nested or {}
    fields: list[Any] = [field for table in tables for field in table.struct_fields()]
    described = _extended(kind, fields + [_nested(kind, name, inner[name].described) for name in inner])
    if kind.__struct_config__.forbid_unknown_fields:
        return Body(described, described)
    entries = [(table, entry) for table in tables for entry in table.absent]
    absent = {entry.field: (table.declared[entry.field].default,) for table, entry in entries}
    reasons = {entry.field: entry.reason for _, entry in entries}
    names = {*kind.__struct_fields__, *(field[0] for field in fields)}
    unbuilt = {name: values for name, values in {**absent, **refused, **allowed}.items() if name not in names}
    hidden: list[Any] = [(name, Any, None) for name in unbuilt]
    read = _extended(described, hidden + [_nested(kind, name, inner[name].read) for name in inner])
    _refusals[read] = _Refusals(unbuilt, reasons)
    return Body(described, read)


def _extended(kind: type[T], fields: list[Any]) -> type[T]:
    made = msgspec.defstruct(
        kind.__name__,
        fields,
        bases=(kind,),
        kw_only=True,
        module=kind.__module__,
        namespace={"__doc__": kind.__doc__},
    )
    return cast(type[T], made)


def _nested(kind: type[msgspec.Struct], name: str, inner: Any) -> tuple[Any, ...]:
    """The field `name` of `kind` with `inner` for the struct that its type mentions."""
    field = next(each for each in msgspec.structs.fields(kind) if each.name == name)
    types = _replaced(field.type, inner)
    if field.required:
        return name, types
    if field.default_factory is not msgspec.NODEFAULT:
        return name, types, msgspec.field(default_factory=inner)
    return name, types, field.default


def _replaced(kind: Any, inner: type[msgspec.Struct]) -> Any:
    """A type with `inner` in the place of the struct that it extends."""
    if isinstance(kind, type) and issubclass(inner, kind):
        return inner
    arguments = [_replaced(each, inner) for each in get_args(kind)]
    origin = get_origin(kind)
    if origin is UnionType:
        return reduce(or_, arguments)
    return kind if origin is None else origin[*arguments]


def refuse_unbuilt(body: msgspec.Struct, prefix: str = "") -> None:
    """Raise for the first field that asks for something that is not built; `prefix` is the body's path."""
    refusals = _refusals.get(type(body))
    if refusals is not None:
        refusals.check(body, prefix)
