"""Holders of units, and the account of the tenant that each belongs to."""

from __future__ import annotations

from enum import IntEnum


class Kind(IntEnum):
    """What sort of holder has a unit."""

    FREE = 0
    TREE = 1
    TURN = 2
    SESSION = 3
    CHECKPOINT = 4
    RETIRING = 5
    TRANSIT = 6
    QUARANTINE = 7
    COPY = 8


class Account:
    """The units and limits of one tenant in each pool."""

    __slots__ = ("held", "limits", "name")

    def __init__(self, name: str, limits: list[int]) -> None:
        self.name = name
        self.limits = limits
        self.held = [0] * len(limits)


class Holder:
    """An owner of units, with its count in each pool."""

    __slots__ = ("account", "held", "kind", "name")

    def __init__(self, kind: Kind, name: str, account: Account) -> None:
        self.kind = kind
        self.name = name
        self.account = account
        self.held = [0] * len(account.held)

    def __repr__(self) -> str:
        return f"{self.kind.name} {self.name}"
