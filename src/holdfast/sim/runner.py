"""Many worlds in a row: any number of steps, in flat memory, over all layouts, page sizes and workloads.

The steps of a run are spread over worlds of a few hundred to a few thousand steps. Which worlds they are
follows from the seed alone, so each can be run again on its own: `--world` in the line that a finding prints.
Every world is closed down and counted at its end. The first finding ends the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from random import Random

from holdfast.core.layout import LAYOUT_NAMES
from holdfast.sim.content import extend
from holdfast.sim.faults import SITES
from holdfast.sim.found import Crashed, Found
from holdfast.sim.workloads import WORKLOADS
from holdfast.sim.world import Setup, World

PAGE_SIZES = (1, 3, 16, 64)
WORLD_STEPS = (200, 400, 800, 1600)


@dataclass(frozen=True, slots=True)
class Options:
    """What to simulate. With the same options everything happens again in the same way."""

    seed: int
    steps: int
    layouts: tuple[str, ...] = LAYOUT_NAMES
    page_sizes: tuple[int, ...] = PAGE_SIZES
    workloads: tuple[str, ...] = tuple(WORKLOADS)
    faults: float = 0.05


@dataclass(frozen=True, slots=True)
class Place:
    """One world of a run: its number, its setup, and its number of steps."""

    number: int
    setup: Setup
    steps: int


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding, its holder, and its place in the run."""

    kind: str
    detail: str
    holder: str
    place: Place
    step: int


@dataclass(slots=True)
class Summary:
    """The result of a run."""

    steps: int = 0
    turns: int = 0
    worlds: int = 0
    quarantined: int = 0
    hash: int = 0
    fault_sites: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SITES, 0))
    finding: Finding | None = None

    @property
    def faults(self) -> int:
        """How many faults have struck."""
        return sum(self.fault_sites.values())

    @property
    def state_hash(self) -> str:
        """A number that stands for all that happened: the same for the same options."""
        return f"{self.hash:016x}"

    def as_json(self) -> dict[str, object]:
        """The last line of a run with `--json`."""
        line: dict[str, object] = {
            "name": "summary",
            "steps": self.steps,
            "turns": self.turns,
            "faults": self.faults,
            "findings": int(self.finding is not None),
            "state_hash": self.state_hash,
            "fault_sites": self.fault_sites,
            "worlds": self.worlds,
            "quarantined": self.quarantined,
        }
        if self.finding is not None:
            line |= {"kind": self.finding.kind, "holder": self.finding.holder, "detail": self.finding.detail}
        return line


def places(options: Options) -> Iterator[Place]:
    """The worlds of a run, in order: every combination comes up before any comes up again."""
    rng = Random(f"worlds of {options.seed}")
    left, number = options.steps, 0
    while left > 0:
        for layout, page_size, workload in _cycle(options, rng):
            setup = Setup(rng.getrandbits(48), layout, page_size, workload, options.faults)
            steps = min(left, rng.choice(WORLD_STEPS))
            if steps <= 0:
                return
            yield Place(number, setup, steps)
            left -= steps
            number += 1


def _cycle(options: Options, rng: Random) -> list[tuple[str, int, str]]:
    """Every combination once; crowds come last among their neighbours, as small worlds are counted whole."""
    combinations = list(product(options.layouts, options.page_sizes, options.workloads))
    rng.shuffle(combinations)
    small = [combination for combination in combinations if WORKLOADS[combination[2]].strict]
    crowds = [combination for combination in combinations if not WORKLOADS[combination[2]].strict]
    each = max(1, len(small) // max(1, len(crowds)))
    mixed: list[tuple[str, int, str]] = []
    while small or crowds:
        mixed += small[:each] + crowds[:1]
        del small[:each], crowds[:1]
    return mixed


def simulate(
    options: Options, only: int | None = None, progress: Callable[[Summary], None] | None = None
) -> Summary:
    """Run all worlds of a run, or `only` one of them, up to the first finding."""
    summary = Summary()
    for place in places(options):
        if only is not None and place.number != only:
            continue
        _live(place, summary)
        if progress is not None:
            progress(summary)
        if summary.finding is not None or place.number == only:
            break
    return summary


def _live(place: Place, summary: Summary) -> None:
    """Run one world from its beginning to its end, and add what came of it to the summary."""
    world = World(place.setup)
    try:
        world.run(place.steps)
        world.close_down()
    except Found as found:
        summary.finding = Finding(found.kind, found.detail, found.holder, place, world.step)
    except Exception as error:
        where = f"{place.setup}, world {place.number}, step {world.step}"
        raise Crashed(where, f" --world {place.number}") from error
    summary.steps += world.step
    summary.turns += world.turns
    summary.worlds += 1
    summary.quarantined += world.quarantined
    summary.hash = extend(summary.hash, world.state_hash)
    for site, count in world.faults.counts.items():
        summary.fault_sites[site] += count
