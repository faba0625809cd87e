"""Reports of several engines as one: what one engine answers, with the figures of all added up.

A joined report has the form of an engine's own, so that routes, `holdfast top` and the page read it as they
read that of a single server. The memory report also has each engine's own part, under `engines`. Used by
`engine_set`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.engine.reports.memory_map import FIRST_NAMED, NUMBERS_MAX
from holdfast.server.link import wire

__all__ = ["JoinedPictures", "joined_memory", "joined_pulse"]

TOP_HOLDERS = 10

Report = dict[str, Any]


def joined_pulse(pulses: Sequence[wire.Pulse]) -> wire.Pulse | None:
    """The heartbeats of all engines as one; None without any."""
    if not pulses:
        return None
    counters: Counter[str] = Counter()
    holders: Counter[tuple[str, str, str]] = Counter()
    drafts: Counter[str] = Counter()
    leased: Counter[str] = Counter()
    for pulse in pulses:
        counters.update(pulse.counters)
        drafts.update(pulse.drafts)
        leased.update(pulse.leased)
        for component, tier, kind, units in pulse.holders:
            holders[component, tier, kind] += units
    graphs = [pulse.graphs for pulse in pulses if pulse.graphs is not None]
    return wire.Pulse(
        step=sum(pulse.step for pulse in pulses),
        running=sum(pulse.running for pulse in pulses),
        queued=sum(pulse.queued for pulse in pulses),
        sessions=sum(pulse.sessions for pulse in pulses),
        counters=dict(counters),
        holders=[(*place, units) for place, units in holders.items()],
        findings=sum(pulse.findings for pulse in pulses),
        draining=all(pulse.draining for pulse in pulses),
        graphs=(sum(each[0] for each in graphs), sum(each[1] for each in graphs)) if graphs else None,
        drafts=dict(drafts),
        leased=dict(leased),
    )


def joined_memory(reports: Mapping[str, Report]) -> Report:
    """The memory reports of engines, by their names, as one."""
    pools: dict[tuple[str, str], Report] = {}
    tenants: dict[str, Report] = {}
    for report in reports.values():
        for pool in report["pools"]:
            _add_pool(pools, pool)
        for row in report["tenants"]:
            _add_tenant(tenants, row)
    top = [{**each, "engine": name} for name, report in reports.items() for each in report["top"]]
    top.sort(key=_units, reverse=True)
    audits = [report["audit"] for report in reports.values()]
    return {
        "step": sum(report["step"] for report in reports.values()),
        "pools": list(pools.values()),
        "top": top[:TOP_HOLDERS],
        "listening": [
            {**each, "engine": name} for name, report in reports.items() for each in report["listening"]
        ],
        "tenants": list(tenants.values()),
        "audit": {
            "mode": ", ".join(sorted({audit["mode"] for audit in audits})),
            "steps": sum(audit["steps"] for audit in audits),
            "last_full_census_step": sum(audit["last_full_census_step"] for audit in audits),
        },
        "findings": [
            {**each, "engine": name} for name, report in reports.items() for each in report["findings"]
        ],
        "engines": [
            {
                "engine": name,
                **{key: report[key] for key in ("step", "pools", "draft", "audit") if key in report},
            }
            for name, report in reports.items()
        ],
    }


def _add_pool(pools: dict[tuple[str, str], Report], pool: Report) -> None:
    place = pool["component"], pool["tier"]
    known = pools.get(place)
    if known is None:
        pools[place] = {**pool, "holders": dict(pool["holders"])}
        return
    known["units"] += pool["units"]
    for kind, units in pool["holders"].items():
        known["holders"][kind] = known["holders"].get(kind, 0) + units


def _add_tenant(tenants: dict[str, Report], row: Report) -> None:
    known = tenants.get(row["tenant"])
    if known is None:
        tenants[row["tenant"]] = {**row, "pools": [dict(pool) for pool in row["pools"]]}
        return
    for pool in row["pools"]:
        place = pool["component"], pool["tier"]
        found = next((each for each in known["pools"] if (each["component"], each["tier"]) == place), None)
        if found is None:
            known["pools"].append(dict(pool))
        else:
            found["units"] += pool["units"]
            found["limit"] += pool["limit"]


def _units(entry: Report) -> int:
    return sum(value for value in entry.values() if isinstance(value, int))


class JoinedPictures:
    """Live maps of several engines as one: pools one after the other, holders with numbers of their own.

    A holder keeps its number from picture to picture while it holds anything.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, int], int] = {}
        self._free: list[int] = []
        self._next = FIRST_NAMED
        self._places: dict[str, list[tuple[int, int]]] = {}
        """For each pool of an engine: the joined pool, and the first unit there."""

    def join(self, pictures: Mapping[str, Report]) -> Report:
        """The pictures of engines, by their names, as one."""
        pools: dict[tuple[str, str], list[npt.NDArray[np.uint16]]] = {}
        holders: list[tuple[int, int, str, str]] = []
        seen: set[tuple[str, int]] = set()
        self._places = {}
        for name, picture in pictures.items():
            shown = np.arange(1 << 16, dtype=np.uint16)
            for number, kind, session, turn in picture["holders"]:
                seen.add((name, number))
                mine = self._number(name, number)
                shown[number] = kind if mine is None else mine
                if mine is not None:
                    holders.append((mine, kind, session, turn))
            self._places[name] = places = []
            for component, tier, cells in picture["pools"]:
                parts = pools.setdefault((component, tier), [])
                places.append((list(pools).index((component, tier)), sum(map(len, parts))))
                parts.append(shown[np.frombuffer(cells, dtype=np.uint16)])
        for key in [key for key in self._numbers if key not in seen]:
            self._free.append(self._numbers.pop(key))
        return {
            "step": sum(picture["step"] for picture in pictures.values()),
            "pools": [(*place, np.concatenate(parts).tobytes()) for place, parts in pools.items()],
            "holders": holders,
        }

    def leased(self, name: str, units: Mapping[Any, list[int]]) -> dict[int, list[int]]:
        """Units of an engine's pools, as units of the joined ones."""
        places = self._places.get(name, [])
        joined: dict[int, list[int]] = {}
        for pool, each in units.items():
            if int(pool) < len(places):
                place, first = places[int(pool)]
                joined[place] = [first + unit for unit in each]
        return joined

    def _number(self, name: str, number: int) -> int | None:
        """The number of an engine's holder; None if all are in use."""
        known = self._numbers.get((name, number))
        if known is None and self._free:
            known = self._numbers[name, number] = self._free.pop()
        elif known is None and self._next <= NUMBERS_MAX:
            known = self._numbers[name, number] = self._next
            self._next += 1
        return known
