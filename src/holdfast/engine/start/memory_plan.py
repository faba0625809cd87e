"""The sizes of the memory pools: units for each component, from the model's shapes and the free memory.

The plan is numbers only, printed at start-up and turned into the core's layout and the storage tensors. Pools
without a stated size get the units of as many sessions of the expected length as fit, so that no component
runs out long before the others. On a GPU, free memory is what remains beside the largest step, which is run
to measure it. The sizes of pages and steps are chosen on the way (tuning.py).
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from holdfast.core.layout import Component, MemoryLayout, Tier
from holdfast.engine.options import EngineOptions, OptionError
from holdfast.engine.start import tuning
from holdfast.engine.start.tuning import Choice, StepCost, Tuning, stated
from holdfast.engine.step.graphs import small_step_of
from holdfast.engine.step.profiling import measure_step
from holdfast.models.available import available_bytes
from holdfast.models.fp8 import stays as multiplies_fp8
from holdfast.models.layout import MemoryShape
from holdfast.models.memory import FP8, MemoryTypes, UnitCounts
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
SLOTS_PER_TURN = 2  # In full precision: of a turn, and of one whose last token is computed beside it.


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Units on the device, on the host and on disk, the bytes of a unit, and the sizes of steps."""

    layout: MemoryLayout
    device: UnitCounts
    host: UnitCounts
    unit_bytes: dict[Component, int]
    session_tokens: int
    sessions: int
    disk: UnitCounts
    tuning: Tuning
    types: MemoryTypes
    running_states: int = 0
    """Slots of states in full precision, where states rest in eight bits."""

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
        """The plan as text: a line a component, then the sizes of steps with their reasons."""
        lines = []
        for component in self.layout.components:
            units = _units(self.device, component)
            kind = "slots" if component is Component.STATE else f"pages of {self.layout.page_size} tokens"
            size = units * self.unit_bytes[component] / 2**20
            lines.append(f"{component.name.lower()}: {units} {kind}, {size:.0f} MiB")
        if str(self.types):
            lines.append(f"types of memory: {self.types}")
        lines.append(f"room for {self.sessions} sessions of {self.session_tokens} tokens on the device")
        return [*lines, *self.tuning.lines()]

    def rank_options(self, options: EngineOptions) -> EngineOptions:
        """Options that give another rank the same pools and steps, whatever memory is free there."""
        size = self.layout.page_size
        return replace(
            options,
            **self.tuning.options(),  # type: ignore[arg-type]
            kv_tokens=self.device.full * size or None,
            window_tokens=self.device.window * size or None,
            state_slots=self.device.state or None,
        )


class Measure(Protocol):
    """`profiling.measure_step`, on this rank alone or on all of them."""

    def __call__(
        self, model: Model, tokens: int, page_size: int, rows_max: int, types: MemoryTypes, *, timed: bool
    ) -> StepCost: ...


def _units(counts: UnitCounts, component: Component) -> int:
    return (counts.full, counts.window, counts.state)[component]


def plan_memory(
    model: ModelDescription, options: EngineOptions, measure: Measure = measure_step, *, promised: int = 0
) -> MemoryPlan:
    """Size the pools and the steps as stated, or by the device and the memory that is free now.

    In tensor parallelism these are the pools of one rank: all ranks have the same. `promised` bytes of what
    is free are taken later: a draft model's cache, which a CPU allocates lazily, or what a draft head is fed.
    """
    ranks = options.tensor_parallel
    shape, on_gpu = model.memory_shape, model.device.type == "cuda"
    window = shape.window_tokens if shape.window is not None else 0
    page_size = stated(options.page_size) or tuning.choose_page_size(on_gpu, window)
    layout = MemoryLayout(
        page_size.value, full=shape.full is not None, window=window, state=shape.state is not None
    )
    types = memory_types(model, options)
    weights = unit_bytes(shape, page_size.value, types)
    session_tokens = min(options.session_tokens, model.context_length)
    needs = session_units(layout, session_tokens)
    each = sum(needs[component] * weights[component] for component in layout.components)
    asked = {
        Component.FULL: options.kv_tokens,
        Component.WINDOW: options.window_tokens,
        Component.STATE: options.state_slots,
    }
    sizing = any(asked[component] is None for component in layout.components)
    step, working = _step_size(model, options, page_size.value, types, sizing, measure)
    fitting, pool = 1, _pool_bytes(model, options, working, promised) if sizing else 0
    awake = _states_awake(model, options, types, pool)
    if sizing:
        fitting = max(1, min(SESSIONS_PLANNED_MAX, (pool - awake.bytes) // each))
    units: dict[Component, int] = {}
    for component in layout.components:
        size = asked[component]
        if size is None:
            units[component] = needs[component] * fitting
        else:
            units[component] = size if component is Component.STATE else layout.pages_for(size)
        if units[component] < 2:
            raise OptionError(_SIZE_OPTIONS[component], "is too small for a turn")
    sessions = min(units[component] // max(1, needs[component]) for component in layout.components)
    disk_most = each * DISK_UNITS_MAX // max(needs.values())
    host = tier_units(needs, weights, options.host_memory // ranks)
    if isinstance(model, Model):
        room = {component: units[component] * weights[component] for component in units}
        if awake.bytes:
            room[Component.STATE] += awake.bytes
        _check_room(model.device, room, [name for name in room if asked[name] is not None], options, promised)
    disk = tier_units(needs, weights, min(disk_bytes(options) // ranks, disk_most))
    tuned = _tune(model, options, layout, units, page_size, step, awake.turns)
    return MemoryPlan(
        layout,
        UnitCounts(*(units.get(component, 0) for component in Component)),
        UnitCounts(*(host.get(component, 0) for component in Component)),
        weights,
        session_tokens,
        sessions,
        UnitCounts(*(disk.get(component, 0) for component in Component)),
        tuned,
        types,
        SLOTS_PER_TURN * tuned.max_running if types.rested else 0,
    )


class _Awake(NamedTuple):
    """Turns for whose states there is room in full precision, and the bytes of that; None: any number."""

    turns: int | None = None
    bytes: int = 0


def _states_awake(model: ModelDescription, options: EngineOptions, types: MemoryTypes, pool: int) -> _Awake:
    """Room for states in full precision, where others rest in eight bits: at most a quarter of the pools."""
    state = model.memory_shape.state
    if state is None or not types.rested:
        return _Awake()
    each = SLOTS_PER_TURN * state.bytes_per_slot(types.plain.itemsize)
    turns = options.max_running
    if turns is None:
        most = tuning.GPU_RUNNING if model.device.type == "cuda" else tuning.CPU_RUNNING
        turns = max(tuning.RUNNING_MIN, min(most, pool // 4 // each)) if pool else most
    return _Awake(turns, turns * each)


def memory_types(model: ModelDescription, options: EngineOptions) -> MemoryTypes:
    """The types of a model's memory, as the options state them."""
    name = options.kv_dtype
    kinds = {"auto": model.dtype, "fp8": FP8, "fp8_e4m3": FP8}
    kv = kinds[name] if name in kinds else getattr(torch, name)
    if kv == FP8 and model.device.type == "cuda" and not multiplies_fp8(model.device):
        raise OptionError("kv_dtype", f"{name} needs a GPU of compute capability 8.9 or later")
    rested = options.state_dtype == "int8" and model.memory_shape.state is not None
    return MemoryTypes(model.dtype, kv, rested)


def _tune(
    model: ModelDescription,
    options: EngineOptions,
    layout: MemoryLayout,
    units: dict[Component, int],
    page_size: Choice,
    step: Choice,
    awake: int | None,
) -> Tuning:
    """The sizes that follow from those of the pools."""
    on_gpu = model.device.type == "cuda"
    full, window, slots = (units.get(component) for component in Component)
    window_tokens = None if window is None else window * layout.page_size
    # A running turn holds the pages of its window, of the tokens before it in the first, and of one row.
    window_turns = None if window is None else window // (layout.pages_for(layout.window) + 2)
    running = stated(options.max_running) or tuning.choose_running(
        on_gpu, None if full is None else full * layout.page_size, window_turns, slots
    )
    if awake is not None and running.value > awake:
        running = Choice(awake, "one for two states in full precision")
    small = small_step_of(model) if isinstance(model, Model) else step.value
    return Tuning.of(
        page_size=page_size,
        chunk_tokens=stated(options.chunk_tokens) or tuning.choose_chunk(on_gpu, step.value, window_tokens),
        step_tokens=step,
        mixed_tokens=stated(options.mixed_tokens)
        or tuning.choose_mixed(on_gpu, step.value, small, not options.fast_start),
        max_running=running,
        checkpoints=stated(options.checkpoints) or tuning.choose_checkpoints(on_gpu),
    )


def _step_size(
    model: ModelDescription,
    options: EngineOptions,
    page_size: int,
    types: MemoryTypes,
    sizing: bool,
    measure: Measure,
) -> tuple[Choice, int]:
    """The tokens of the largest step, and on a GPU the memory that it takes beside weights and pools.

    It is measured where the step is to be chosen, or pools are to be sized.
    """
    given = stated(options.step_tokens)
    if model.device.type != "cuda" or not isinstance(model, Model):
        return given or tuning.choose_step(False, None, 0), 0
    if given is not None and not sizing:
        return given, 0
    rows = options.max_running or tuning.GPU_RUNNING
    if given is not None:
        return given, measure(model, given.value, page_size, rows, types, timed=False).bytes
    free, cost = free_bytes(model.device), _largest_step(model, page_size, rows, types, measure)
    step = tuning.choose_step(True, cost, free)
    if step.value == cost.tokens:
        return step, cost.bytes
    return step, measure(model, step.value, page_size, rows, types, timed=False).bytes


def _largest_step(model: Model, page_size: int, rows: int, types: MemoryTypes, measure: Measure) -> StepCost:
    """The cost of the largest default step, or of the largest smaller one that the device has memory for."""
    tokens = tuning.GPU_STEP_TOKENS
    while True:
        try:
            return measure(model, tokens, page_size, rows, types, timed=True)
        except torch.OutOfMemoryError:
            if tokens <= tuning.STEP_TOKENS_MIN:
                raise
            tokens //= 2


def _pool_bytes(model: ModelDescription, options: EngineOptions, working: int, promised: int) -> int:
    """Bytes for pools: on a GPU what is free beside the graphs and the `working` memory of a step."""
    fraction = options.memory_fraction
    if model.device.type != "cuda" or not isinstance(model, Model):
        free = max(0, free_bytes(model.device) - promised) // options.tensor_parallel
        return int(free * (CPU_FRACTION if fraction is None else fraction))
    left = free_bytes(model.device) - working - GRAPH_BYTES - promised
    return max(0, int(left * (GPU_FRACTION if fraction is None else fraction)))


def _check_room(
    device: torch.device,
    room: dict[Component, int],
    stated: list[Component],
    options: EngineOptions,
    promised: int,
) -> None:
    """Reject pools that do not fit: memory allocated lazily would run out in the middle of a turn."""
    free, needed = max(0, free_bytes(device) - promised), sum(room.values())
    if device.type == "cpu":
        needed *= options.tensor_parallel
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


def unit_bytes(shape: MemoryShape, page_size: int, types: MemoryTypes) -> dict[Component, int]:
    """Bytes of a unit of each component."""
    weights: dict[Component, int] = {}
    if shape.full is not None:
        weights[Component.FULL] = types.page_bytes(shape.full, page_size)
    if shape.window is not None:
        weights[Component.WINDOW] = types.page_bytes(shape.window, page_size)
    if shape.state is not None:
        weights[Component.STATE] = types.slot_bytes(shape.state)
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
