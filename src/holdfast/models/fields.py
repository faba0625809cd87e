"""Typed access to the JSON objects that describe a model, and errors for unreadable files.

`Fields` wraps one JSON object (config.json, generation_config.json, or GGUF metadata in the same shape) and
returns values of a stated type, so that a wrong or missing key is reported by name. Knows no model family.
Used by the configuration, the families and the tokenizer.
"""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


_SPECIAL_NUMBERS = {"Infinity": math.inf, "-Infinity": -math.inf}
_LARGEST = 1 << 32
"""Limit of integers, far above any size or count of a model."""
_JSON_BYTES_MAX = 64 << 20
"""Limit of description files; the index of the largest checkpoints has a few megabytes."""
_REASON_CHARACTERS_MAX = 200
_LISTED, _ITEM_CHARACTERS_MAX = 20, 100
_LFS_POINTER = b"version https://git-lfs"


class ConfigurationError(ValueError):
    """A model's description is unusable; the message names the key or the architecture."""


def unreadable(path: Path, problem: str) -> ConfigurationError:
    """The error for a model file with invalid contents, such as a Git LFS pointer."""
    try:
        with path.open("rb") as file:
            beginning = file.read(len(_LFS_POINTER))
    except OSError as error:
        return ConfigurationError(f"cannot read {path}: {error.strerror}")
    if beginning == _LFS_POINTER:
        return ConfigurationError(
            f"{path} is a Git LFS pointer, not the file that it stands for; fetch that with `git lfs pull`"
        )
    return ConfigurationError(f"{path} {problem}")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn any failure of reading a model's file into a one-line error that names the file.

    The contents are untrusted, so any exception may occur, including a panic of a Rust library, which is not
    an `Exception`.
    """
    try:
        yield
    except (ConfigurationError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror or error}") from error
    except RecursionError as error:
        raise unreadable(path, "cannot be read: it is nested too deeply") from error
    except MemoryError as error:
        raise unreadable(path, "cannot be read: that would take more memory than there is") from error
    except BaseException as error:
        reason = " ".join(str(error).split())[:_REASON_CHARACTERS_MAX]
        problem = f"cannot be read: {reason or type(error).__name__}"
        raise (
            ConfigurationError(f"{path} {problem}") if path.is_dir() else unreadable(path, problem)
        ) from error


def listed(items: Sequence[str]) -> str:
    """Texts from a file for an error, as far as a line has room: names may be many, and long."""
    shown = ", ".join(item[:_ITEM_CHARACTERS_MAX] for item in items[:_LISTED])
    return f"{shown} ..." if len(items) > _LISTED else shown


def require_regular(path: Path) -> int:
    """The size of a file; rejects pipes and devices, which have no end or never answer."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ConfigurationError(f"{path} is not a regular file")
    return found.st_size


def require_size(path: Path, most: int) -> None:
    """Reject a file above its size limit before it is read into memory."""
    size = require_regular(path)
    if size > most:
        raise ConfigurationError(f"{path} has {size} bytes; at most {most} are read")


class Fields:
    """One JSON object with typed access. `where` names it in errors."""

    __slots__ = ("_values", "where")

    def __init__(self, values: Mapping[str, Json], where: str) -> None:
        self._values = values
        self.where = where

    @classmethod
    def read(cls, path: Path) -> Fields:
        """The JSON object in a file."""
        with reading(path):
            require_size(path, _JSON_BYTES_MAX)
            try:
                values = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise unreadable(path, f"is not valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise ConfigurationError(f"{path} does not hold a JSON object")
        return cls(values, path.name)

    def has(self, key: str) -> bool:
        """Whether the key exists with a value other than null."""
        return self._values.get(key) is not None

    def names(self) -> list[str]:
        """The keys, in the order of the object."""
        return list(self._values)

    def raw(self, key: str) -> Json:
        """The untyped value, or None."""
        return self._values.get(key)

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """An integer of at least `least` (default 1, for sizes and counts)."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "an integer", value)
        if not -_LARGEST < value < _LARGEST or value != int(value):
            raise self._wrong(key, "an integer", value)
        if value < least:
            raise self._wrong(key, f"at least {least}", value)
        return int(value)

    def optional_integer(self, key: str, *, least: int = 1) -> int | None:
        return self.integer(key, least=least) if self.has(key) else None

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above zero."""
        value = self.number(key, default)
        if not 0.0 < value < math.inf:
            raise self._wrong(key, "a finite number above zero", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number, which may be infinite."""
        value = self._value(key, default)
        if isinstance(value, dict) and list(value) == ["__float__"]:
            value = value["__float__"]  # how transformers writes infinities, which JSON lacks
        if isinstance(value, str) and value in _SPECIAL_NUMBERS:
            return _SPECIAL_NUMBERS[value]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number", value)
        try:
            number = float(value)
        except OverflowError as error:
            raise self._wrong(key, "a number that fits 64 bits", value) from error
        if math.isnan(number):
            raise self._wrong(key, "a number", value)
        return number

    def optional_number(self, key: str) -> float | None:
        return self.number(key) if self.has(key) else None

    def numbers(self, key: str, default: tuple[float, ...]) -> tuple[float, ...]:
        if not self.has(key):
            return default
        value = self._values[key]
        if not isinstance(value, list):
            raise self._wrong(key, "a list of numbers", value)
        inner = Fields({str(index): item for index, item in enumerate(value)}, f"{self.where}: {key}")
        return tuple(inner.number(str(index)) for index in range(len(value)))

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a string", value)
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        value = self._value(key, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, "a list of strings", value)
        return tuple(str(item) for item in value)

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of integers; a single integer is a list of one, a missing key an empty list."""
        value = self._values.get(key)
        if value is None:
            return ()
        items = value if isinstance(value, list) else [value]
        found: list[int] = []
        for item in items:
            if isinstance(item, bool) or not isinstance(item, int):
                raise self._wrong(key, "an integer or a list of integers", value)
            found.append(item)
        return tuple(found)

    def inner(self, key: str) -> Fields:
        """The object under a key; an empty one where the key is missing or null."""
        value = self._values.get(key)
        if value is None:
            return Fields({}, f"{self.where}: {key}")
        if not isinstance(value, dict):
            raise self._wrong(key, "an object", value)
        return Fields(value, f"{self.where}: {key}")

    def with_defaults(self, outer: Fields) -> Fields:
        """This object, with missing or null keys taken from another one."""
        stated = {key: value for key, value in self._values.items() if value is not None}
        return Fields({**outer._values, **stated}, self.where)

    def _value(self, key: str, default: Json) -> Json:
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ConfigurationError(f"{self.where} has no {key!r}")
        return value

    def _wrong(self, key: str, wanted: str, value: Json) -> ConfigurationError:
        return ConfigurationError(f"{self.where}: {key!r} should be {wanted}, not {value!r:.100}")
