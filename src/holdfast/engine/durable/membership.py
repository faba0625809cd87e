"""How an engine takes part in a cluster: engines that write one journal and take sessions over.

Given to the journal by `holdfast engine`. A server without it is alone: at its start it takes over the
sessions that earlier runs of its name have left.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ALONE", "Identity", "Membership"]


@dataclass(frozen=True, slots=True)
class Membership:
    """An engine among others: its name, the address where others reach it, and a limit over all engines.

    A tenant may have `tenant_sessions` sessions open; None for any number.
    """

    name: str
    address: str = ""
    tenant_sessions: int | None = None


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of an engine: the digest of its weights, and its place in a cluster.

    Snapshots are valid for the same weights only.
    """

    weights: str = ""
    member: Membership | None = None


ALONE = Identity()
"""An engine with a journal of its own, and without snapshots."""
