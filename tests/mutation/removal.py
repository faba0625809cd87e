"""Remove one statement of the core at a time, and see who notices.

The tests are collected once. For each statement a fork of that process exchanges the code of one function and
asks a judge; what survives one judge is shown to the next. Tests are asked only if they run the statement,
first those that noticed others of its file. What is not inside a function needs a process that has not
imported the core: those forks come first.

A judge that needs several times the processor time that it needs with every statement in place has noticed.

    static            what the linter or the type checker reports (static.py)
    import            the core can be imported
    short simulation  a world of each layout, faults, strict audit
    core tests        tests/core
    property tests    tests/property
    long simulation   three seeds
"""

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from importlib import import_module
from itertools import zip_longest
from math import ceil
from pathlib import Path
from typing import Any

import coverage
import pytest
from hypothesis import Phase, settings

from tests.mutation import judges
from tests.mutation.forks import in_forks
from tests.mutation.statements import CORE, ROOT, FreshModule, Statement, exchange
from tests.mutation.static import undefined

Key = tuple[str, str, str, int]

CPU_SECONDS = {"import": 10, "short simulation": 15, "long simulation": 240}
CPU_SECONDS_ALL = 1800
PATIENCE = 3
CACHE = ROOT / ".pytest_cache"
TESTS = {"core tests": "tests/core", "property tests": "tests/property"}
SIMULATIONS = {"short simulation": judges.short_simulation, "long simulation": judges.long_simulation}
JUDGES = ("static", "import", "short simulation", "core tests", "property tests", "long simulation")


@dataclass
class Verdict:
    """Which judge noticed that a statement is gone, and how; nobody, if it survived."""

    statement: Statement
    noticed_by: str | None
    how: str = ""

    def as_json(self) -> dict[str, object]:
        """A line of results."""
        file, function, text, occurrence = self.statement.key
        return {
            "file": file,
            "line": self.statement.line,
            "function": function,
            "statement": text,
            "occurrence": occurrence,
            "noticed_by": self.noticed_by,
            "how": self.how,
        }


@dataclass
class Suite:
    """The tests of a folder: how long each takes, and which run a line of a file. Tests are numbers.

    `noticed` counts by file what each test has noticed.
    """

    items: list[pytest.Item]
    seconds: list[float]
    lines: dict[str, list[int]]
    noticed: dict[str, dict[str, int]] = field(default_factory=dict)

    def tests_of(self, statement: Statement, tests_max: int) -> list[int]:
        """The tests that run a statement: those named after its file, then of each function one, the quickest
        first, then another one. Those that noticed statements of the file are the first of all.
        """
        functions: dict[str, list[int]] = {}
        for line in range(statement.line, statement.end_line + 1):
            for number in self.lines.get(f"{statement.file}:{line}", []):
                functions.setdefault(self.items[number].nodeid.partition("[")[0], []).append(number)
        own = f"/test_{statement.path.stem}.py::"
        rounds = zip_longest(*(dict.fromkeys(several) for several in functions.values()))
        chosen = [number for each in rounds for number in each if number is not None]
        chosen = sorted(chosen, key=lambda number: own not in self.items[number].nodeid)[:tests_max]
        noticed = self.noticed.get(statement.file, {})
        return sorted(chosen, key=lambda number: -noticed.get(self.items[number].nodeid, 0))

    def cpu_seconds(self, statement: Statement, tests_max: int) -> int:
        """What the tests that run a statement may take without it."""
        return 10 + ceil(PATIENCE * sum(self.seconds[each] for each in self.tests_of(statement, tests_max)))

    def heard(self, verdict: Verdict) -> None:
        """Count what a test has noticed."""
        noticed = self.noticed.setdefault(verdict.statement.file, {})
        noticed[verdict.how] = noticed.get(verdict.how, 0) + 1


@dataclass
class Removal:
    """A run over some statements. `told` hears each verdict, `said` how far the run is.

    At most `tests_max` tests of a folder are asked about a statement. `asked` are judges of earlier runs, by
    the keys of statements that they did not miss: they are not asked again. `passed` hears of others.
    """

    statements: list[Statement]
    jobs: int = 1
    tests_max: int = sys.maxsize
    ladder: tuple[str, ...] = JUDGES
    told: Callable[[Verdict], None] = lambda _verdict: None
    said: Callable[[str], None] = lambda _text: None
    asked: Mapping[Key, set[str]] = field(default_factory=dict)
    passed: Callable[[Statement, str], None] = lambda _statement, _judge: None

    def run(self) -> None:
        """Judge them all: first those that need an import of their own, then the others."""
        left = self._static()
        fresh = [s for s in left if not s.in_function or "super()" in s.text]
        assert not any(name.startswith("holdfast.core") for name in sys.modules), "the core is imported"
        for name in self.ladder[1:]:
            fresh = self._ask(name, fresh, partial(_freshly, name=name))
        self._survived(fresh)
        rest = [s for s in left if s.in_function and "super()" not in s.text]
        if rest:
            collected = _Collected(self, rest)
            pytest.main(["-m", "not soak", *judges.QUIET, *TESTS.values()], plugins=[collected])
            assert collected.ran, "the tests could not be collected"

    def _static(self) -> list[Statement]:
        left: list[Statement] = []
        for statement in self.statements:
            how = undefined(statement)
            if how is None:
                left.append(statement)
            else:
                self.told(Verdict(statement, "static", how))
        return left

    def _survived(self, statements: list[Statement]) -> None:
        for statement in statements:
            self.told(Verdict(statement, None))

    def _ask(
        self,
        name: str,
        statements: list[Statement],
        judge: Callable[[Statement], str | None],
        suite: Suite | None = None,
    ) -> list[Statement]:
        """Show statements to one judge; returns what it did not notice the loss of."""
        left = [statement for statement in statements if name in self.asked.get(statement.key, ())]
        works = [(each, partial(judge, each)) for each in statements if each not in left]

        def limit(statement: Statement) -> int:
            if suite is not None:
                return suite.cpu_seconds(statement, self.tests_max)
            return CPU_SECONDS.get(name, CPU_SECONDS_ALL)

        for number, (statement, how) in enumerate(in_forks(works, self.jobs, limit), 1):
            if how is None:
                left.append(statement)
                self.passed(statement, name)
            else:
                verdict = Verdict(statement, name, how)
                self.told(verdict)
                if suite is not None:
                    suite.heard(verdict)
            self.said(f"{statement.file}, {name}: {number} of {len(works)}, {len(left)} unnoticed")
        return sorted(left, key=lambda statement: (statement.file, statement.line))

    def judge_collected(self, session: pytest.Session, statements: list[Statement]) -> None:
        """Judge statements of functions, in a process that has imported the core and collected the tests."""
        judges.importing()
        import_module("holdfast.sim.runner")
        gc.collect()
        gc.freeze()
        suites: dict[str, Suite] = {}
        for file in dict.fromkeys(statement.file for statement in statements):
            left = [statement for statement in statements if statement.file == file]
            for name in self.ladder[2:]:
                if left and name in TESTS and name not in suites:
                    suites[name] = self._suite(session, name)
                left = self._ask(
                    name, left, partial(self._collected, session, name, suites), suites.get(name)
                )
            self._survived(left)

    def _collected(
        self, session: pytest.Session, name: str, suites: dict[str, Suite], statement: Statement
    ) -> str | None:
        """One judge on a statement of a function, in a fork of the process that collected the tests."""
        assert exchange(statement), "not a statement of a function"
        if name not in suites:
            return SIMULATIONS[name]()
        suite = suites[name]
        return judges.passing(
            session, [suite.items[number] for number in suite.tests_of(statement, self.tests_max)]
        )

    def _suite(self, session: pytest.Session, name: str) -> Suite:
        """The tests of a folder, and which lines of the core each of them runs.

        That is recorded for each file of tests, in a process of its own, and kept until the core, what tests
        share or the file itself changes.
        """
        items = [item for item in session.items if item.nodeid.startswith(TESTS[name])]
        files: dict[Path, list[pytest.Item]] = {}
        for item in items:
            files.setdefault(item.path, []).append(item)
        base = _digest(shared_files())
        places = {path: CACHE / f"lines-{path.stem}-{_digest([path], base)}.json" for path in files}
        CACHE.mkdir(exist_ok=True)
        works = [
            (path.stem, partial(_record, session, files[path], at))
            for path, at in places.items()
            if not at.exists()
        ]
        for number, (stem, failed) in enumerate(in_forks(works, self.jobs, lambda _: CPU_SECONDS_ALL), 1):
            assert failed is None, f"{stem} fails with every statement in place: {failed}"
            self.said(f"which lines do the {name} run? {number} of {len(works)} files")
        return _joined(items, [(files[path], json.loads(at.read_text())) for path, at in places.items()])


class _Collected:
    """A plugin of pytest: once tests are collected, statements are judged instead of tests run."""

    def __init__(self, removal: Removal, statements: list[Statement]) -> None:
        self.removal = removal
        self.statements = statements
        self.ran = False

    def pytest_collection(self) -> None:
        """Failing examples need not be made small."""
        settings.register_profile(
            "removal", settings.get_profile("repeatable"), phases=(Phase.explicit, Phase.generate)
        )
        settings.load_profile("removal")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """In place of running the tests."""
        self.removal.judge_collected(session, self.statements)
        self.ran = True
        return True


def _freshly(statement: Statement, name: str) -> str | None:
    """One judge on a statement, in a process that has not imported the core."""
    sys.meta_path.insert(0, FreshModule(statement))
    if name in TESTS:
        return judges.freshly_passing(TESTS[name], statement.path.stem)
    return judges.importing() if name == "import" else SIMULATIONS[name]()


def _record(session: pytest.Session, items: Iterable[pytest.Item], at: Path) -> str | None:
    """Run the tests of a file one by one, and write down how long each takes and which lines it runs."""
    tracer = coverage.Coverage(data_file=None, source_pkgs=["holdfast.core"], branch=False, config_file=False)
    seconds: list[float] = []
    tracer.start()
    for number, item in enumerate(items):
        tracer.switch_context(str(number))
        began = time.process_time()
        failed = judges.passing(session, [item])
        seconds.append(time.process_time() - began)
        if failed is not None:
            return failed
    tracer.stop()
    lines: dict[str, list[int]] = {}
    recorded = tracer.get_data()
    for file in recorded.measured_files():
        for line, contexts in recorded.contexts_by_lineno(file).items():
            lines[f"{Path(file).name}:{line}"] = [int(context) for context in contexts if context]
    part = at.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps({"seconds": seconds, "lines": lines}))
    part.rename(at)
    return None


def _joined(items: list[pytest.Item], parts: list[tuple[list[pytest.Item], dict[str, Any]]]) -> Suite:
    """One suite of what was recorded for each file; of the tests that run a line the quickest comes first."""
    numbers = {item: number for number, item in enumerate(items)}
    seconds = [0.0] * len(items)
    lines: dict[str, list[int]] = {}
    for several, recorded in parts:
        for item, each in zip(several, recorded["seconds"], strict=True):
            seconds[numbers[item]] = each
        for line, places in recorded["lines"].items():
            lines.setdefault(line, []).extend(numbers[several[place]] for place in places)
    for found in lines.values():
        found.sort(key=lambda number: seconds[number])
    return Suite(items, seconds, lines)


def shared_files() -> list[Path]:
    """Files that the lines depend on which any test runs: the core, and what tests share."""
    folders = [CORE, ROOT / "src" / "holdfast" / "sim", *(ROOT / folder for folder in TESTS.values())]
    return [
        path
        for folder in folders
        for path in sorted(folder.rglob("*.py"))
        if not path.name.startswith("test_")
    ]


def kept_results() -> Path:
    """Where verdicts are kept until a file changes that they depend on."""
    tests = [path for folder in TESTS.values() for path in sorted((ROOT / folder).rglob("test_*.py"))]
    tool = sorted(Path(__file__).parent.glob("*.py"))
    return CACHE / f"verdicts-{_digest([*shared_files(), *tests, *tool])}.jsonl"


def _digest(paths: Iterable[Path], base: str = "") -> str:
    """What files say."""
    digest = sha256(base.encode())
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
