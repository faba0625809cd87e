"""The sizes of the memory pools: units for each component, from the model's shapes and the free memory.

The plan is numbers only, printed at start-up and turned into the core's layout and the storage tensors. Pools
without a stated size get the units of as many sessions of the expected length as fit, so that no component
runs out long before the others. On a GPU, free memory is what remains beside the largest step, which is run
once to measure it.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from holdfast.core.layout import Component, MemoryLayout, Tier
from holdfast.engine.options import EngineOptions, OptionError
from holdfast.engine.step.profiling import step_bytes
from holdfast.models.available import available_bytes
from holdfast.models.layout import MemoryShape
from holdfast.models.memory import UnitCounts
from holdfast.models.model import Model, ModelDescription

SESSIONS_PLANNED_MAX = 4096
CPU_FRACTION, GPU_FRACTION = 0.25, 0.95
"""Default shares of the free memory for pools: other programs need a CPU's memory, too."""
GRAPH_BYTES = 2 << 30
"""Reserved for captured graphs and library workspaces, beside a step's own memory."""
DISK_SHARE = 0.8
DISK_UNITS_MAX = 1 << 17
_SIZE_OPTIONS = {
    Component.FULL: "kv_tokens",
    Component.WINDOW: "window_tokens",
    Component.STATE: "state_slots",
}
SLOTS_PER_SESSION = 3  # At rest one; while a turn runs two; a checkpoint.


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Units on the device, on the host and on disk, and the bytes of a unit."""

    layout: MemoryLayout
    device: UnitCounts
    host: UnitCounts
    unit_bytes: dict[Component, int]
    session_tokens: int
    sessions: int
    disk: UnitCounts

    def sizes(self) -> dict[tuple[Component, Tier], int]:
        """The sizes of the core's pools."""
        sizes: dict[tuple[Component, Tier], int] = {}
        tiers = ((Tier.DEVICE, self.device), (Tier.HOST, self.host), (Tier.DISK, self.disk))
        for tier, counts in tiers:
            for component in self.layout.components:
                units = _units(counts, component)
                if units or tier is Tier.DEVICE:
                    sizes[component, tier] = units
        return sizes

    @property
    def tokens_max(self) -> int:
        """The longest sequence that fits into all full-attention pages."""
        return self.device.full * self.layout.page_size if self.layout.full else 1 << 62

    def lines(self) -> list[str]:
        """The plan as text, one line a component."""
        lines = []
        for component in self.layout.components:
            units = _units(self.device, component)
            kind = "slots" if component is Component.STATE else f"pages of {self.layout.page_size} tokens"
            size = units * self.unit_bytes[component] / 2**20
            lines.append(f"{component.name.lower()}: {units} {kind}, {size:.0f} MiB")
        lines.append(f"room for {self.sessions} sessions of {self.session_tokens} tokens on the device")
        return lines


def _units(counts: UnitCounts, component: Component) -> int:
    return (counts.full, counts.window, counts.state)[component]


def plan_memory(model: ModelDescription, options: EngineOptions) -> MemoryPlan:
    """Size the pools as stated, or by the memory that is free now."""
    shape = model.memory_shape
    layout = MemoryLayout(
        options.page_size,
        full=shape.full is not None,
        window=shape.window_tokens if shape.window is not None else 0,
        state=shape.state is not None,
    )
    weights = unit_bytes(shape, options.page_size, torch.finfo(model.dtype).bits // 8)
    session_tokens = min(options.session_tokens, model.context_length)
    needs = session_units(layout, session_tokens)
    each = sum(needs[component] * weights[component] for component in layout.components)
    stated = {
        Component.FULL: options.kv_tokens,
        Component.WINDOW: options.window_tokens,
        Component.STATE: options.state_slots,
    }
    fitting = 1
    if any(stated[component] is None for component in layout.components):
        fitting = max(1, min(SESSIONS_PLANNED_MAX, _pool_bytes(model, options) // each))
    units: dict[Component, int] = {}
    for component in layout.components:
        asked = stated[component]
        if asked is None:
            units[component] = needs[component] * fitting
        else:
            units[component] = asked if component is Component.STATE else layout.pages_for(asked)
        if units[component] < 2:
            raise OptionError(_SIZE_OPTIONS[component], "is too small for a turn")
    sessions = min(units[component] // max(1, needs[component]) for component in layout.components)
    disk_most = each * DISK_UNITS_MAX // max(needs.values())
    host = tier_units(needs, weights, options.host_memory)
    if isinstance(model, Model):
        room = {component: units[component] * weights[component] for component in units}
        _check_room(model.device, room, [name for name in room if stated[name] is not None], options)
    disk = tier_units(needs, weights, min(disk_bytes(options), disk_most))
    return MemoryPlan(
        layout,
        UnitCounts(*(units.get(component, 0) for component in Component)),
        UnitCounts(*(host.get(component, 0) for component in Component)),
        weights,
        session_tokens,
        sessions,
        UnitCounts(*(disk.get(component, 0) for component in Component)),
    )


def _pool_bytes(model: ModelDescription, options: EngineOptions) -> int:
    """Bytes for pools: on a GPU what is free beside the largest step and the graphs."""
    fraction = options.memory_fraction
    if model.device.type != "cuda" or not isinstance(model, Model):
        return int(free_bytes(model.device) * (CPU_FRACTION if fraction is None else fraction))
    working = step_bytes(model, options)
    left = free_bytes(model.device) - working - GRAPH_BYTES
    return max(0, int(left * (GPU_FRACTION if fraction is None else fraction)))


def _check_room(
    device: torch.device, room: dict[Component, int], stated: list[Component], options: EngineOptions
) -> None:
    """Reject pools that do not fit: memory allocated lazily would run out in the middle of a turn."""
    free, needed = free_bytes(device), sum(room.values())
    if needed > free:
        said = f"is too large: pools need {_gb(needed)}, and {_gb(free)} are free"
        if not stated:
            raise OptionError("session_tokens", said)
        largest = max(stated, key=lambda component: room[component])
        option, left = _SIZE_OPTIONS[largest], max(0, free - needed + room[largest])
        raise OptionError(option, f"{said}, enough for {getattr(options, option) * left // room[largest]:,}")
    if options.host_memory:
        left = free - needed if device.type == "cpu" else available_bytes()
        if options.host_memory > left:
            raise OptionError(
                "host_memory",
                f"is too large: {_gb(options.host_memory)} were requested, and {_gb(left)} are free",
            )


def _gb(size: int) -> str:
    return f"{size / 1e9:,.1f} GB"


def session_units(layout: MemoryLayout, tokens: int) -> dict[Component, int]:
    """Units of a session of `tokens` tokens, with a running turn and a checkpoint."""
    pages = layout.pages_for(tokens)
    window = min(pages, 2 * (layout.pages_for(layout.window) + 1))
    needs = {Component.FULL: pages, Component.WINDOW: window, Component.STATE: SLOTS_PER_SESSION}
    return {component: needs[component] for component in layout.components}


def tier_units(needs: dict[Component, int], weights: dict[Component, int], room: int) -> dict[Component, int]:
    """Units that fit into `room` bytes of another tier: for whole sessions, or for part of one.

    A tier that lacks a component can hold no session: it has a unit of each component, or none at all.
    """
    each = sum(needs[component] * weights[component] for component in needs)
    if room >= each:
        return {component: needs[component] * (room // each) for component in needs}
    units = {component: needs[component] * room // each for component in needs}
    single = {component: 1 for component in needs if not units[component]}
    left = room - sum(weights[component] for component in single)
    others = {component: needs[component] for component in needs if component not in single}
    if left < 0:
        return {}
    if not single or not others:
        return single or units
    shared = tier_units(others, weights, left)
    return {**single, **shared} if shared else {}


def unit_bytes(shape: MemoryShape, page_size: int, element_bytes: int) -> dict[Component, int]:
    """Bytes of a unit of each component."""
    weights: dict[Component, int] = {}
    if shape.full is not None:
        weights[Component.FULL] = shape.full.bytes_per_page(page_size, element_bytes)
    if shape.window is not None:
        weights[Component.WINDOW] = shape.window.bytes_per_page(page_size, element_bytes)
    if shape.state is not None:
        weights[Component.STATE] = shape.state.bytes_per_slot(element_bytes)
    return weights


def disk_bytes(options: EngineOptions) -> int:
    """Maximum bytes for files of sessions: as stated, or most of the free space."""
    if options.disk is None:
        return 0
    directory = Path(options.disk)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(directory).free
    except OSError as error:
        raise OptionError("disk", f"cannot be used: {error}") from error
    return options.disk_limit if options.disk_limit is not None else int(free * DISK_SHARE)


def free_bytes(device: torch.device) -> int:
    """Free memory of a device; torch's unused cache is released first."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        return free
    return available_bytes()
