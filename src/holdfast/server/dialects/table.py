"""A dialect's table over a declaration: the name, default and bound of each field, or why it is missing.

A `FieldTable` has an entry for every declared field and fails at import otherwise: a field that is added to
the declaration must get a row, or a reason, in every dialect. From the table come the fields of the struct
that decodes the request (`struct_fields`), their bounds (`bound_of`, read by `server.limits`), the value
itself (`read`), and the names under which problems are reported (`names`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

import msgspec

from holdfast.engine.fields import Bound, Declared, declarations
from holdfast.engine.sampling import SamplingError
from holdfast.server.http.problems import Problem, bad_field

__all__ = ["Absent", "Elsewhere", "Entry", "FieldTable", "Row", "same"]

T = TypeVar("T")

DECLARED: Any = object()
"""Stands for the declared default."""

JSON_TYPES: Mapping[Any, Any] = {
    str | Sequence[str]: str | list[str],
    Sequence[int]: list[int],
    Mapping[int, float]: dict[str, float],
    Mapping[str, Any]: dict[str, Any],
    str | Mapping[str, Any]: str | dict[str, Any],
    Sequence[Mapping[str, Any]]: list[dict[str, Any]],
}
"""How JSON writes declared types; all others are written as they are."""


@dataclass(frozen=True, slots=True)
class Row:
    """A declared field in a dialect; omitted attributes are as declared.

    `default` is the value of an omitted or null field, `null` that of a null field, if the two
    differ. `kind` is the JSON type and `value` converts it to the declared value, if the dialect's form
    differs; None has no effect. A row with a `switch` counts only if the boolean field of that name
    is true. If two rows have the same field, the last one given counts; with `alone`, giving both is an
    error.
    """

    field: str
    name: str = ""
    default: Any = DECLARED
    null: Any = DECLARED
    kind: Any = None
    bound: Bound | None = None
    value: Callable[[Any], Any] | None = None
    switch: str = ""
    alone: bool = False

    @property
    def written(self) -> str:
        """The name that clients write."""
        return self.name or self.field


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A declared field whose value the route takes from other fields; problems with it are told as `name`."""

    field: str
    name: str


@dataclass(frozen=True, slots=True)
class Absent:
    """A declared field that the dialect does not have, and the reason that clients are told.

    Dialects that ignore unknown fields refuse it under its declared name, too. `names` are other names of it
    in the table of refused fields.
    """

    field: str
    reason: str
    names: tuple[str, ...] = ()


Entry = Row | Elsewhere | Absent


def same(*fields: str) -> tuple[Row, ...]:
    """Rows of fields that a dialect has as they are declared."""
    return tuple(map(Row, fields))


def integers_by_token(given: Mapping[str, float], name: str) -> dict[int, float]:
    """Numbers by token id, which JSON writes as text."""
    if not all(token.isascii() and token.isdigit() and len(token) < 12 for token in given):
        raise bad_field(name, "must be keyed by token ids")
    return {int(token): number for token, number in given.items()}


class _Reader(NamedTuple):
    """How `FieldTable.read` reads a row."""

    field: str
    name: str
    switch: str
    default: Any
    convert: Callable[[Any], Any] | None
    alone: bool


class FieldTable(Generic[T]):
    """The fields of one declaration in one JSON object of a dialect.

    `struct` names the struct that decodes that object and `prefix` is its path in the request ("sampling.").
    With `nullable`, null is the same as a field that is left out. `other_names` are the dialect's names of
    fields that are not in the declaration, such as the input.
    """

    def __init__(
        self,
        declaration: type[T],
        struct: str,
        entries: Sequence[Entry],
        *,
        prefix: str = "",
        nullable: bool,
        other_names: Mapping[str, str] | None = None,
    ) -> None:
        self.declaration = declaration
        self.declared = declarations(declaration)
        self.struct = struct
        self.prefix = prefix
        self.nullable = nullable
        stated = {entry.field for entry in entries}
        assert stated == self.declared.keys(), f"{struct}: {stated ^ self.declared.keys()}"
        self.entries = tuple(entries)
        self.rows = tuple(entry for entry in entries if isinstance(entry, Row))
        self.absent = tuple(entry for entry in entries if isinstance(entry, Absent))
        self._readers = tuple(map(self._reader, self.rows))
        self._aliased = len({row.field for row in self.rows}) < len(self.rows)
        self._names = {row.field: prefix + row.written for row in reversed(self.rows)} | {
            entry.field: entry.name for entry in entries if isinstance(entry, Elsewhere)
        }
        self._names |= other_names or {}

    def bound_of(self, row: Row) -> Bound | None:
        """The bound of a row: its own, or the declared one."""
        return row.bound if row.bound is not None else self.declared[row.field].bound

    # --- decoding -----------------------------------------------------------------------------------

    def struct_fields(self) -> list[tuple[str, Any, Any]]:
        """The fields of the struct that decodes this object: name, type, default."""
        fields: list[tuple[str, Any, Any]] = []
        for row in self.rows:
            if row.switch:
                fields.append((row.switch, bool | None, None))
            fields.append((row.written, self._type_of(row), self._struct_default(row)))
        return fields

    def _type_of(self, row: Row) -> Any:
        declared = self.declared[row.field]
        kind = row.kind if row.kind is not None else JSON_TYPES.get(declared.kind, declared.kind)
        annotated: Any = Annotated
        described: Any = annotated[kind, _meta(declared, self.bound_of(row))]
        return described | None if self.nullable or declared.optional else described

    def _struct_default(self, row: Row) -> Any:
        if row.null is not DECLARED:
            return row.default
        default = None if self.nullable else self.declared[row.field].default
        return list(default) if isinstance(default, tuple) else default

    # --- reading ------------------------------------------------------------------------------------

    def read(self, given: msgspec.Struct, **more: Any) -> T:
        """The declared value of a decoded object. `more` are fields that the route took from elsewhere."""
        fields = more
        chosen: dict[str, str] = {}
        for field, name, switch, default, convert, alone in self._readers:
            if switch and not getattr(given, switch):
                self._require_off(given, switch, name)
                continue
            value = getattr(given, name)
            if value is not None and convert is not None:
                value = convert(value)
                if value is None:
                    continue
            if value is None:
                if default is not DECLARED and field not in fields:
                    fields[field] = default
                continue
            if alone and chosen.setdefault(field, name) != name:
                raise bad_field(
                    self.prefix + name,
                    f"cannot be combined with {self.prefix}{chosen[field]}; give one of both",
                )
            fields[field] = value
        try:
            return self.declaration(**fields)
        except SamplingError as error:
            names = self.names(given)
            raise Problem(400, "invalid_value", str(error), error.param).renamed(names) from error

    def _require_off(self, given: msgspec.Struct, switch: str, name: str) -> None:
        """Raise if a field is given without the switch that it needs."""
        if getattr(given, name):
            raise bad_field(self.prefix + name, f"needs {switch} to be true")

    def names(self, given: msgspec.Struct) -> Mapping[str, str]:
        """The client's name of each declared field, by its declared name."""
        if not self._aliased:
            return self._names
        used = {
            row.field: self.prefix + row.written
            for row in self.rows
            if getattr(given, row.written) is not None
        }
        return {**self._names, **used}

    def _reader(self, row: Row) -> _Reader:
        convert = row.value
        if convert is None and self.declared[row.field].kind == Mapping[int, float]:
            place = self.prefix + row.written

            def by_token(given: Any) -> Any:
                return integers_by_token(given, place)

            convert = by_token
        default = row.null if row.null is not DECLARED else row.default
        if row.switch and default is DECLARED:
            default = 0
        return _Reader(row.field, row.written, row.switch, default, convert, row.alone)


def _meta(declared: Declared, bound: Bound | None) -> msgspec.Meta:
    """The description of a field in the OpenAPI document. Bounds are checked by `server.limits`, which names
    the field as the client wrote it."""
    schema: dict[str, Any] = {}
    if bound is not None and bound.low is not None and declared.kind in (int, float):
        schema = {"exclusiveMinimum" if bound.above else "minimum": bound.low, "maximum": bound.high}
    return msgspec.Meta(description=declared.meaning, extra_json_schema=schema or None)
