"""The request fields of a client's package: read from the typed dictionaries that describe its requests."""

from __future__ import annotations

from typing import Any, get_args

from typing_extensions import get_type_hints, is_typeddict

__all__ = ["shapes_of"]


def shapes_of(*roots: Any) -> dict[str, list[str]]:
    """The fields of every typed dictionary that a request may have at any depth, by its name.

    Dictionaries of one name are one: those of a beta have its name in front, which is left out.
    """
    found: dict[str, set[str]] = {}
    seen: set[Any] = set()
    waiting = list(roots)
    while waiting:
        kind = waiting.pop()
        if not is_typeddict(kind):
            waiting.extend(get_args(kind))
        elif kind not in seen:
            seen.add(kind)
            hints = get_type_hints(kind)
            found.setdefault(kind.__name__.removeprefix("Beta"), set()).update(hints)
            waiting.extend(hints.values())
    return {name: sorted(found[name]) for name in sorted(found)}
