"""Settings of a session, given when it is opened and changed later.

`SettingsChange` is a checked change: the given fields. The journal has the settings as
JSON (`written`), the time to live in a column of its own. Used by the verbs and the session log.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from typing import Any

from holdfast.core.errors import Refused
from holdfast.core.retention import PRIORITY_MAX, Retention

__all__ = ["DEFAULT_SETTINGS", "BadSetting", "SessionSettings", "SettingsChange", "check_change"]

SettingsChange = dict[str, Any]
"""Changed settings by name: `ttl` (None for the server's default), `pin`, `priority`, `keep_reasoning`."""


class BadSetting(Refused):
    """A setting of a session has a value that it cannot have."""

    code = "invalid_value"

    def __init__(self, name: str, needed: str) -> None:
        super().__init__(f"{name} {needed}")
        self.param = self.name = name
        self.needed = needed


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """The settings of a session beside its time to live.

    `pin` keeps its memory on the device as long as others can be evicted; `priority` is from -4 to 4, the
    lowest is evicted first. Without `keep_reasoning` the reasoning is dropped at the end of each turn.
    """

    pin: bool = False
    priority: int = 0
    keep_reasoning: bool = True

    def changed(self, change: SettingsChange) -> SessionSettings:
        """The settings after a change that was checked."""
        return replace(self, **{name: value for name, value in change.items() if name != "ttl"})

    def retention(self, ttl: float | None) -> Retention:
        """How the core keeps the session."""
        return Retention(ttl, self.pin, self.priority)

    def written(self) -> str:
        """As JSON: what differs from the defaults."""
        return json.dumps(
            {
                each.name: getattr(self, each.name)
                for each in fields(self)
                if getattr(self, each.name) != each.default
            }
        )

    @classmethod
    def read(cls, written: str) -> SessionSettings:
        """From JSON; values of later versions, and values that cannot be, are dropped."""
        found: SettingsChange = {}
        for name, value in json.loads(written).items():
            try:
                check_change({name: value})
            except BadSetting:
                continue
            found[name] = value
        return DEFAULT_SETTINGS.changed(found)


DEFAULT_SETTINGS = SessionSettings()


def check_change(change: SettingsChange) -> None:
    """Raise `BadSetting` for a change that cannot be."""
    for name, value in change.items():
        match name:
            case "ttl":
                if value is not None and not (_is_number(value) and value > 0):
                    raise BadSetting("ttl", "must be a positive number of seconds, or null for the default")
            case "pin" | "keep_reasoning":
                if not isinstance(value, bool):
                    raise BadSetting(name, "must be true or false")
            case "priority":
                if not (_is_number(value) and isinstance(value, int) and abs(value) <= PRIORITY_MAX):
                    raise BadSetting(name, f"must be a whole number from {-PRIORITY_MAX} to {PRIORITY_MAX}")
            case _:
                raise BadSetting(name, "is not a setting of a session")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
