"""The ledger as a report: who holds the memory, as `/v1/memory` and `Engine.memory` show it.

A report walks all sessions and tenants, so it is made in portions: a generator that yields after each, so
that steps can run in between, and returns the report. Units by kind are the ledger's counters at the end of
the walk; holders are counted on the way. A tenant's report shows its own memory exactly, and that of all
others as one figure, rounded down to a sixteenth of the pool: a tenant cannot derive what others hold, or a
change of it, by allocating and freeing units of its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import count
from typing import TYPE_CHECKING

from holdfast.core.layout import Component
from holdfast.core.ledger import Account, Holder, Kind, Ledger, Pool
from holdfast.core.session import Place, Session
from holdfast.engine.draft.reporting import draft_report
from holdfast.engine.portions import Portions, finish
from holdfast.engine.reports.coarse import coarse
from holdfast.engine.session_settings import DEFAULT_SETTINGS

if TYPE_CHECKING:
    from holdfast.engine.loop import EngineLoop

__all__ = [
    "listening_report",
    "memory_report",
    "memory_reports",
    "session_report",
    "session_reports",
]

TOP_HOLDERS = 10
LISTENING_SHOWN = 40
"""Sessions that listen, as far as a report shows them: those that began last."""
TOP_TENANTS = 1000
PORTION = 32
"""Sessions, tenants or prefix trees in one portion."""

SESSIONS_PORTION = 16

Report = dict[str, object]


def memory_report(loop: EngineLoop) -> Report:
    """Units by holder kind, component and tier; the largest holders; the audit and its findings."""
    return finish(memory_reports(loop, {None}))[None]


class Census:
    """Counts for one report: of all holders, or of one tenant."""

    def __init__(self, ledger: Ledger, tenant: str | None) -> None:
        self.tenant = tenant
        self.ledger = ledger
        self.by_kind = [[0] * len(Kind) for _ in ledger.pools]
        self._top: list[tuple[int, int, Holder]] = []
        self._numbers = count()

    def add(self, holder: Holder) -> None:
        """Count the units of a holder."""
        total = sum(holder.held)
        if not total:
            return
        for index, units in enumerate(holder.held):
            self.by_kind[index][holder.kind] += units
        entry = (total, -next(self._numbers), holder)
        if len(self._top) < TOP_HOLDERS:
            heapq.heappush(self._top, entry)
        else:
            heapq.heappushpop(self._top, entry)

    def largest(self) -> list[Report]:
        """The largest holders, by name and with their units of each component."""
        shown: list[Report] = []
        for _, _, holder in sorted(self._top, reverse=True):
            counts: dict[str, int] = {}
            for pool in self.ledger.pools.values():
                if holder.held[pool.index]:
                    name = pool.component.name.lower()
                    counts[name] = counts.get(name, 0) + holder.held[pool.index]
            shown.append({"holder": f"{holder.kind.name.lower()} {holder.name}", **counts})
        return shown

    def holders(self, pool: Pool) -> dict[str, int]:
        """Units of a pool by kind: all, or a tenant's own with the others' as one coarse figure."""
        if self.tenant is None:
            return pool.counts()
        # Retiring units are on no account: counted as others', they would reveal what others hold.
        used = pool.size - len(pool.free) - pool.by_kind[Kind.RETIRING]
        account = self.ledger.accounts.get(self.tenant)
        held = 0 if account is None else account.held[pool.index]
        own = self.by_kind[pool.index]
        mine = sum(own)
        others = min(coarse(used - held, pool.size), pool.size - mine)
        shown = {kind.name: own[kind] for kind in Kind}
        shown[Kind.FREE.name] = pool.size - mine - others
        return {**shown, "OTHERS": others}


def memory_reports(loop: EngineLoop, tenants: Iterable[str | None]) -> Portions[dict[str | None, Report]]:
    """The reports of some tenants, and under None of all, from one walk."""
    registry = loop.scheduler.registry
    ledger = registry.ledger
    asked = {tenant: Census(ledger, tenant) for tenant in tenants}
    everything = asked.get(None)
    for place, holder in enumerate(_holders(loop), 1):
        own = asked.get(holder.account.name)
        if own is not None:
            own.add(holder)
        if everything is not None:
            everything.add(holder)
        if not place % PORTION:
            yield
    rows: list[Report] = []
    if everything is not None:
        rows = yield from _tenants(ledger)
    reports: dict[str | None, Report] = {}
    for tenant, census in asked.items():
        account = None if tenant is None else ledger.accounts.get(tenant)
        holds = account is not None and any(account.held)
        own_rows = [_row(ledger, account)] if account is not None and holds else []
        reports[tenant] = _report(loop, census, rows if tenant is None else own_rows)
        yield
    return reports


def _holders(loop: EngineLoop) -> Iterator[Holder]:
    """All holders of units: sessions with their checkpoints, turns, copies and parcels, and prefix trees."""
    registry = loop.scheduler.registry
    for session in list(registry.sessions.values()):
        yield session.holder
        yield session.checkpoints
        if session.turn is not None and session.turn.holder is not session.holder:
            yield session.turn.holder
        if session.sequence.copy is not None:
            yield session.sequence.copy.holder
        if session.parcel is not None:
            yield session.parcel.holder
            for hold in session.parcel.home.values():
                yield hold.holder  # All of them have the same holder, which is not the parcel's.
                break
    for root in list(registry.tree.roots.values()):
        yield root.holder


def _report(loop: EngineLoop, census: Census, tenants: list[Report]) -> Report:
    ledger = loop.scheduler.registry.ledger
    audit = loop.scheduler.audit
    pools: list[Report] = []
    for pool in ledger.pools.values():
        state = pool.component is Component.STATE
        shown: Report = {
            "component": pool.component.name.lower(),
            "tier": pool.tier.name.lower(),
            "unit": "slot" if state else "page",
        }
        if not state:
            shown["page_size"] = ledger.layout.page_size
        shown |= {
            "units": pool.size,
            "bytes_per_unit": loop.setup.memory_plan.unit_bytes[pool.component],
            "holders": census.holders(pool),
        }
        pools.append(shown)
    draft: Report = {} if loop.drafts is None else {"draft": draft_report(loop.drafts, census.tenant)}
    return {
        "step": ledger.step,
        "pools": pools,
        **draft,
        "top": census.largest(),
        "listening": listening_report(loop, census.tenant),
        "tenants": tenants,
        "audit": {
            "mode": loop.setup.options.audit,
            "steps": ledger.settled,
            "last_full_census_step": audit.last_full_step,
        },
        "findings": [
            {
                "kind": finding.kind,
                "holder": finding.holder,
                "step": finding.step,
                "detail": str(finding),
                "trail": finding.trail,
            }
            for finding in audit.findings
        ],
    }


def listening_report(loop: EngineLoop, tenant: str | None) -> list[Report]:
    """Sessions that listen ahead: how many tokens they have heard, and how many of those are computed."""
    shown: list[Report] = []
    for session in reversed(list(loop.scheduler.registry.listening)):
        if tenant in (None, session.tenant) and session.state == "LISTENING":
            shown.append({"session": session.id, **heard_tokens(session)})
        if len(shown) == LISTENING_SHOWN:
            break
    return shown


def heard_tokens(session: Session) -> dict[str, int]:
    """The input of an open turn so far, in tokens."""
    assert session.turn is not None, "a session that listens has an open turn"
    heard = len(session.turn.request.tokens)
    ahead = max(0, session.sequence.computed - session.history)
    return {"heard": heard, "ahead": min(heard, ahead)}


def _tenants(ledger: Ledger) -> Portions[list[Report]]:
    """Units and quota of each tenant that holds units, largest first."""
    largest: list[tuple[int, int, Account]] = []
    for number, account in enumerate(list(ledger.accounts.values()), 1):
        held = sum(account.held)
        if held and len(largest) < TOP_TENANTS:
            heapq.heappush(largest, (held, -number, account))
        elif held:
            heapq.heappushpop(largest, (held, -number, account))
        if not number % PORTION:
            yield
    rows: list[Report] = []
    for _, _, account in sorted(largest, reverse=True):
        rows.append(_row(ledger, account))
        if not len(rows) % PORTION:
            yield
    return rows


def _row(ledger: Ledger, account: Account) -> Report:
    return {
        "tenant": account.name,
        "pools": [
            {
                "component": pool.component.name.lower(),
                "tier": pool.tier.name.lower(),
                "units": account.held[pool.index],
                "limit": account.limits[pool.index],
            }
            for pool in ledger.pools.values()
        ],
    }


def session_reports(loop: EngineLoop, names: list[str]) -> Portions[list[Report]]:
    """Reports of some sessions, in that order; closed sessions are left out."""
    sessions = loop.scheduler.registry.sessions
    reports: list[Report] = []
    for place, name in enumerate(names, 1):
        session = sessions.get(name)
        if session is not None:
            reports.append(session_report(loop, session))
        if not place % SESSIONS_PORTION:
            yield
    return reports


def session_report(loop: EngineLoop, session: Session) -> Report:
    """One session: its state, its length, and the memory that it holds."""
    ledger = loop.scheduler.registry.ledger
    held: dict[str, object] = {}
    for component in Component:
        units = 0
        for pool in ledger.pools.values():
            if pool.component is component:
                holders = [session.holder, session.checkpoints]
                if session.turn is not None:
                    holders.append(session.turn.holder)
                units += sum(holder.held[pool.index] for holder in holders)
        held[component.name.lower()] = {
            "units": units,
            "bytes": units * loop.setup.memory_plan.unit_bytes.get(component, 0),
        }
    sequence = session.sequence
    lease = sequence.lease
    held["leased"] = {"full": lease.length // ledger.layout.page_size if lease is not None else 0}
    held["checkpoints"] = len(sequence.points)
    busy = session.turn is not None
    entry = loop.session_log.sessions.get(session.id)
    settings = DEFAULT_SETTINGS if entry is None else entry.settings
    return {
        "id": session.id,
        "state": session.state,
        "tier": "device"
        if session.parcel is None or session.place is Place.HOME
        else session.parcel.tier.name.lower(),
        "turns": len(session.boundaries),
        "tokens": _tokens(session),
        "idle_seconds": 0.0 if busy else max(0.0, loop.now() - session.idle_since),
        "age_seconds": loop.now() - session.created,
        "ttl": session.retention.ttl,
        **asdict(settings),
        "memory": held,
    }


def _tokens(session: Session) -> dict[str, int]:
    """The tokens of a session: its history, and what it has heard of the next turn if it listens."""
    sequence = session.sequence
    if session.state != "LISTENING":
        return {"known": sequence.known, "computed": sequence.computed}
    computed = min(session.history, sequence.computed)
    return {"known": session.history, "computed": computed, **heard_tokens(session)}
