"""Who notices that a statement is gone: a ladder of judges, the cheapest first.

Each judge runs in a process that ends with it. It returns what it noticed, or None. The core and the
simulation are imported by the judges and not before, so that a module can be exchanged in front of them.
"""

from collections.abc import Callable, Iterable
from importlib import import_module

import pytest

from tests.mutation.statements import CORE, ROOT

SHORT_STEPS = 100
LONG_STEPS = 20_000
LONG_SEEDS = (7, 13, 1001)
PAGE_SIZES = (3, 16, 1)

Judge = Callable[[], str | None]


def importing() -> str | None:
    """Every module of the core can be imported."""
    for path in CORE.glob("*.py"):
        import_module(f"holdfast.core.{path.stem}")
    return None


def short_simulation() -> str | None:
    """A short world of every layout, with faults, counted whole after each step."""
    world, layout = import_module("holdfast.sim.world"), import_module("holdfast.core.layout")
    loads = import_module("holdfast.sim.workloads").WORKLOADS
    workloads = [name for name in reversed(loads) if loads[name].strict]
    layouts = sorted(layout.LAYOUT_NAMES, key=len, reverse=True)  # Those of many components first.
    for number, name in enumerate(layouts):
        page_size, workload = PAGE_SIZES[number % len(PAGE_SIZES)], workloads[number % len(workloads)]
        setup = world.Setup(number, name, page_size, workload, 0.05)
        one = world.World(setup)
        try:
            one.run(SHORT_STEPS)
            one.close_down()
        except world.Found as found:
            return f"{found.kind}: {found.holder}"
    return None


def long_simulation() -> str | None:
    """Many worlds, with several seeds."""
    runner = import_module("holdfast.sim.runner")
    for seed in LONG_SEEDS:
        finding = runner.simulate(runner.Options(seed, LONG_STEPS)).finding
        if finding is not None:
            return f"{finding.kind}: {finding.holder}"
    return None


def passing(session: pytest.Session, items: Iterable[pytest.Item]) -> str | None:
    """Tests that were collected pass; no tests notice nothing."""
    several = list(items)
    if not several:
        return None
    for item, following in zip(several, [*several[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.testsfailed:
            return item.nodeid
    return None


def freshly_passing(folder: str, module: str) -> str | None:
    """The tests of a folder pass, collected from the start, those that bear the module's name first."""
    own = ROOT / folder / f"test_{module}.py"
    for place in (*([str(own)] if own.exists() else []), folder):
        failed = Failed()
        status = pytest.main(["-x", "-m", "not soak", *QUIET, place], plugins=[failed])
        if status:
            return failed.name or f"status {status}"
    return None


class Failed:
    """Remembers which test failed first."""

    def __init__(self) -> None:
        self.name = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Look at each part of each test."""
        if report.failed and not self.name:
            self.name = report.nodeid


# No cache that tests of other processes see, and no limits of time: they are the runner's.
QUIET = (
    "-p",
    "no:cacheprovider",
    "-p",
    "no:timeout",
    "-p",
    "no:cov",
    "-p",
    "no:xdist",
    "-s",
    "-W",
    "ignore",
    "-qq",
    "--no-summary",
)
