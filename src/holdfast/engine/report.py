"""The ledger as a report: who holds the memory, as `/v1/memory` and `Engine.memory` show it."""

from __future__ import annotations

from holdfast.core.layout import Component
from holdfast.engine.loop import EngineLoop

TOP_HOLDERS = 10


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
            "bytes_per_unit": loop.plan.page_bytes[pool.component],
            "holders": pool.counts(),
        }
        pools.append(shown)
    return {
        "step": ledger.step,
        "pools": pools,
        "top": _top_holders(loop),
        "audit": {
            "mode": loop.options.audit,
            "steps": ledger.settled,
            "last_full_census_step": audit.last_full_step,
        },
        "findings": [
            {"kind": finding.kind, "holder": finding.holder, "step": finding.step, "detail": str(finding)}
            for finding in audit.findings
        ],
    }


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
