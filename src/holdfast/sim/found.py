"""Findings of the simulation, and whom each of them names.

A finding is `Found` by a check of the simulator, by the core's audit, or by an assertion of the core. The
line between a finding and a crash: an `AssertionError`, a `LedgerError` or an `IllegalTransition` raised by
code of the core means that the core itself noticed that something was wrong. Every other exception, and an
assertion that fails outside the core, is a crash: no check has noticed anything.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from types import TracebackType

from holdfast.core.audit import Audit, Finding, FindingKind
from holdfast.core.errors import IllegalTransition
from holdfast.core.lease import LeaseRecord
from holdfast.core.ledger import Grant, Hold, LedgerError
from holdfast.core.sequence import Sequence
from holdfast.core.session import Session
from holdfast.core.turn import Turn

CORE = "holdfast.core."
NOBODY = {"the free list", "nobody"}


class Check(StrEnum):
    """Which check of the simulator found something."""

    ASSERTION = "assertion"
    CONTENT = "content"
    DELAY = "delay"
    EVENT = "event"
    FENCE = "fence"
    LATE = "late"
    LEFT_OVER = "left over"
    PAUSE = "pause"
    QUOTA = "quota"
    RECOMPUTATION = "recomputation"
    REFUSAL = "refusal"
    REGISTRY = "registry"
    RETENTION = "retention"
    STALL = "stall"
    TENANT = "tenant"
    TRANSCRIPT = "transcript"


class Found(Exception):
    """Something that must not be: which check or audit found it, what exactly, and whose it is."""

    def __init__(self, kind: Check | FindingKind, detail: str, holder: str) -> None:
        super().__init__(f"{kind}: {holder}: {detail}")
        self.kind = kind
        self.detail = detail
        self.holder = holder


def found_by(audit: Audit, finding: Finding) -> Found:
    """A finding of the audit. For a unit without a holder it names the last holder that gave some back."""
    holder = finding.holder
    if holder in NOBODY:
        pools = list(audit.ledger.pools.values())
        for _, what, _, index, _, who in reversed(audit.ledger.recorder):
            if what in {"release", "shrink"} and pools[index].name == finding.pool:
                holder = f"{holder}, last given to by {who!r}"
                break
    return Found(finding.kind, str(finding), holder)


class Crashed(Exception):
    """The core or the simulator raised what neither meant to raise; `replay` are options to see it again."""

    def __init__(self, where: str, replay: str) -> None:
        super().__init__(where)
        self.replay = replay


@contextmanager
def assertions_of_the_core() -> Iterator[None]:
    """Turn what the core itself noticed into a finding that names whom it was working for."""
    try:
        yield
    except (AssertionError, LedgerError, IllegalTransition) as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        if not frames[-1].f_globals["__name__"].startswith(CORE):
            raise
        detail = f"{type(error).__name__}: {error}, in {frames[-1].f_code.co_qualname}"
        raise Found(Check.ASSERTION, detail, _whom(error.__traceback__)) from error


def _whom(trace: TracebackType | None) -> str:
    """For whom the core was working: the innermost turn, session, sequence, Hold or lease on the stack."""
    for frame, _ in reversed(list(traceback.walk_tb(trace))):
        for value in frame.f_locals.values():
            if isinstance(value, Session):
                turn = value.turn
                return f"{turn.request.turn_id} of {value.id}" if turn is not None else value.id
            if isinstance(value, Turn):
                return f"{value.request.turn_id} of {value.session_id}"
            if isinstance(value, Sequence):
                return repr(value.holder)
            if isinstance(value, Hold) and value.alive:
                return repr(value.holder)
            if isinstance(value, Grant):
                return repr(value.holder)
            if isinstance(value, LeaseRecord):
                return value.name
    return "nobody"
