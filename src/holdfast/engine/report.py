"""The ledger as a report: who holds the memory, as `/v1/memory` and `Engine.memory` show it."""

from __future__ import annotations

from holdfast.core.layout import Component
from holdfast.core.session import Place, Session
from holdfast.engine.loop import EngineLoop

TOP_HOLDERS = 10
TOP_TENANTS = 1000


def memory_report(loop: EngineLoop) -> dict[str, object]:
    """Units by holder kind, component and tier; the largest holders; the audit and its findings."""
    ledger = loop.scheduler.registry.ledger
    audit = loop.scheduler.audit
    pools: list[dict[str, object]] = []
    for pool in ledger.pools.values():
        state = pool.component is Component.STATE
        shown: dict[str, object] = {
            "component": pool.component.name.lower(),
            "tier": pool.tier.name.lower(),
            "unit": "slot" if state else "page",
        }
        if not state:
            shown["page_size"] = ledger.layout.page_size
        shown |= {
            "units": pool.size,
            "bytes_per_unit": loop.memory_plan.unit_bytes[pool.component],
            "holders": pool.counts(),
        }
        pools.append(shown)
    return {
        "step": ledger.step,
        "pools": pools,
        "top": _top_holders(loop),
        "tenants": _tenants(loop),
        "audit": {
            "mode": loop.options.audit,
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


def _tenants(loop: EngineLoop) -> list[dict[str, object]]:
    """What each tenant holds and may hold of every pool: those that hold something, largest first."""
    ledger = loop.scheduler.registry.ledger
    accounts = [account for account in ledger.accounts.values() if any(account.held)]
    accounts.sort(key=lambda account: -sum(account.held))
    return [
        {
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
        for account in accounts[:TOP_TENANTS]
    ]


def _top_holders(loop: EngineLoop) -> list[dict[str, object]]:
    held: dict[str, dict[str, int]] = {}
    for grant in loop.scheduler.registry.ledger.live.values():
        if grant.units:
            name = f"{grant.holder.kind.name.lower()} {grant.holder.name}"
            by_component = held.setdefault(name, {})
            component = grant.pool.component.name.lower()
            by_component[component] = by_component.get(component, 0) + len(grant.units)
    largest = sorted(held.items(), key=lambda item: -sum(item[1].values()))[:TOP_HOLDERS]
    return [{"holder": name, **counts} for name, counts in largest]


def session_report(loop: EngineLoop, session: Session) -> dict[str, object]:
    """One session: what it does, how long it is, and what it holds. Its name is the caller's business."""
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
            "bytes": units * loop.memory_plan.unit_bytes.get(component, 0),
        }
    sequence = session.sequence
    lease = sequence.lease
    held["leased"] = {"full": lease.length // ledger.layout.page_size if lease is not None else 0}
    held["checkpoints"] = len(sequence.points)
    busy = session.turn is not None
    return {
        "id": session.id,
        "state": session.state,
        "tier": "device"
        if session.parcel is None or session.place is Place.HOME
        else session.parcel.tier.name.lower(),
        "turns": len(session.boundaries),
        "tokens": {"known": sequence.known, "computed": sequence.computed},
        "idle_seconds": 0.0 if busy else max(0.0, loop.now() - session.idle_since),
        "age_seconds": loop.now() - session.created,
        "ttl": session.ttl,
        "memory": held,
    }
