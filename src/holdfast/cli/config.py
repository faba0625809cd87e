"""The configuration file: where it is, and which keys it may have.

TOML. The options of `serve` and `chat` are keys at the top, named as on the command line; a table `[chat]` or
`[serve]` has the options of one command. An unknown key or a value of the wrong type is an error that names
the file and the key; msgspec.convert would save the type test alone (docs/decisions/0019). Used by `options`;
the environment and the command line override the file.
"""

from __future__ import annotations

import difflib
import os
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.cli.sampling_options import SAMPLING_FIELDS

__all__ = ["SECTIONS", "ConfigError", "config_paths", "find_config", "read_config"]

FILE_NAME = "holdfast.toml"

SECTIONS: Mapping[str, Mapping[str, Any]] = {
    "chat": {
        "url": str,
        "api_key": str,
        "system": str,
        "tools": str,
        "tool_choice": str,
        "response_format": str,
        "thinking": bool,
        "thinking_tokens": int,
        "show_thinking": bool,
        **{field.name: field.kind for field in SAMPLING_FIELDS if field.name != "seed"},
    },
    "serve": {},
    "engine": {"listen": str, "engine_id": str},
}
"""Keys of a command's own table, besides those at the top."""

TYPE_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


class ConfigError(ValueError):
    """A configuration file is invalid; the message names the file and the problem."""


def config_paths() -> tuple[Path, ...]:
    """The paths of the configuration file, in the order of search."""
    base = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    user = base if base.is_absolute() else Path.home() / ".config"
    return Path(FILE_NAME), user / "holdfast" / FILE_NAME


def find_config(stated: Path | None) -> Path | None:
    """The file that was named, or the first that exists."""
    if stated is not None:
        if not stated.is_file():
            raise ConfigError(f"{stated} does not exist")
        return stated
    return next((path for path in config_paths() if path.is_file()), None)


def read_config(path: Path, kinds: Mapping[str, Any], section: Sequence[str] = ()) -> dict[str, Any]:
    """The values of a file; those of the command's own table override those at the top."""
    try:
        with path.open("rb") as file:
            stated = tomllib.load(file)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    tables = {name: stated.pop(name) for name in SECTIONS if isinstance(stated.get(name), dict)}
    values = _checked(path, "", stated, kinds)
    for name, table in tables.items():
        own = _checked(path, f"[{name}] ", table, {**kinds, **SECTIONS[name]})
        if name in section:
            values |= own
    return values


def _checked(path: Path, where: str, stated: Mapping[str, Any], kinds: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    named = {key: key.replace("-", "_") for key in stated}
    unknown = [key for key, name in named.items() if name not in kinds]
    if unknown:
        raise ConfigError(
            f"{path} has unknown keys: " + ", ".join(_hint(where, key, kinds) for key in unknown)
        )
    for key, name in named.items():
        if name in values:
            raise ConfigError(f"{path} sets {where}{name} twice, with a hyphen and with an underscore")
        values[name] = _typed(f"{path}: {where}{key}", stated[key], kinds[name])
    return values


def _hint(where: str, key: str, kinds: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(key.replace("-", "_"), kinds, n=1)
    return f"{where}{key} (did you mean {near[0]}?)" if near else f"{where}{key}"


def _typed(where: str, value: object, kind: Any) -> object:
    """The value, if it has the type of its option."""
    if typing.get_origin(kind) is list:
        listed = [value] if isinstance(value, str) else value
        if not isinstance(listed, list) or not all(isinstance(part, str) for part in listed):
            raise ConfigError(f"{where} must be a list of texts")
        return listed
    allowed = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    fits = type(value) in allowed or (float in allowed and type(value) is int)
    if not fits:
        raise ConfigError(f"{where} must be {' or '.join(TYPE_WORDS[one] for one in allowed)}")
    return value
