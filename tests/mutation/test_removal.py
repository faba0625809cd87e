"""The tool that removes statements: what it removes, who notices, and that a removal can be survived."""

import json
import subprocess
import sys
from functools import partial

import pytest

from tests.mutation import judges
from tests.mutation.accepted import ACCEPTED, JUDGED
from tests.mutation.forks import in_forks
from tests.mutation.removal import kept_results
from tests.mutation.statements import CORE, ROOT, Statement, exchange, statements
from tests.mutation.static import undefined


def find(file: str, function: str, text: str) -> Statement:
    found = [s for s in statements(CORE / file) if (s.function, s.text) == (function, text)]
    assert len(found) == 1
    return found[0]


def command(*arguments: str) -> tuple[int, list[dict[str, object]]]:
    """The status of the tool, and what it printed."""
    line = [sys.executable, "-m", "tests.mutation", "--json", *arguments]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    printed = [json.loads(each) for each in done.stdout.splitlines() if each.startswith("{")]
    assert printed, done.stderr
    return done.returncode, printed


# --- what can be removed ------------------------------------------------------------------------------------


def test_statements_have_names_of_their_own_and_their_own_lines() -> None:
    everything = [statement for path in CORE.glob("*.py") for statement in statements(path)]
    assert len(everything) > 2000
    assert len({statement.key for statement in everything}) == len(everything)
    lines = {path.name: path.read_text().splitlines() for path in CORE.glob("*.py")}
    for statement in everything:
        first = lines[statement.file][statement.line - 1].strip()
        assert first != "pass" and not first.startswith(
            ("assert ", "import ", "from ", '"""', "__slots__", "__all__")
        )


@pytest.mark.parametrize("file", ["tokens.py", "eviction.py", "layout.py"])
def test_every_removal_compiles_and_keeps_the_other_lines(file: str) -> None:
    for statement in statements(CORE / file):
        assert statement.code.co_filename == str(CORE / file)


@pytest.mark.parametrize(
    ("file", "function", "text", "says"),
    [
        ("prefix.py", "PrefixTree.match", "forest.tick += 1", None),
        ("prefix.py", "PrefixTree.match", "at = covered = 0", None),
        ("prefix.py", "PrefixTree.match", "page_bytes = self.page_bytes", "undefined name"),
        ("forest.py", "Forest.__init__", "self.tick = 0", None),
        ("prefix.py", "PrefixTree.__init__", "self.state_budget = state_budget", "undefined attribute"),
        ("node.py", "Node.root_key", "return self.holder.name", "missing return"),
        ("forest.py", "Forest.prune", "return", None),
        ("waiting.py", "", "Entry = tuple[int, str, Turn]", "undefined name"),
        ("layout.py", "Tier", "HOST = 1", "undefined member"),
        ("errors.py", "UnknownSession", "code = 'session_not_found'", None),
    ],
)
def test_what_the_linter_or_the_type_checker_sees_needs_no_judge(
    file: str, function: str, text: str, says: str | None
) -> None:
    assert undefined(find(file, function, text)) == says


# --- who notices --------------------------------------------------------------------------------------------


def raises() -> str:
    raise KeyError("missing")


def loops() -> str:
    while True:
        pass


def explodes() -> str:
    return str(len(bytearray(1 << 34)))


def test_forks_tell_what_became_of_them() -> None:
    works = {
        "fine": lambda: None,
        "noticed": lambda: "a leak",
        "raises": raises,
        "loops": loops,
        "explodes": explodes,
    }
    found = dict(in_forks(works.items(), jobs=2, cpu_seconds=lambda _: 1))
    assert found["fine"] is None
    assert found["noticed"] == "a leak"
    assert found["raises"] == "KeyError: 'missing'"
    assert found["loops"] == "out of time"
    assert str(found["explodes"]).startswith("MemoryError")


def without(statement: Statement) -> str | None:
    judges.importing()
    assert exchange(statement)
    return judges.short_simulation()


def test_a_removal_is_noticed_in_its_fork_alone() -> None:
    lock = find("lease_table.py", "LeaseTable.open", "self.forest.lock(node)")
    step = find("hold.py", "Leak.__init__", "self.step = step")
    works = [(statement, partial(without, statement)) for statement in (lock, step)]
    found = dict(in_forks(works, jobs=1, cpu_seconds=lambda _: 60))
    assert str(found[lock]).startswith("lock without a lessee")
    assert found[step] is None
    assert judges.short_simulation() is None


def test_the_command_lists_survivors_and_goes_on_where_it_ended(tmp_path) -> None:
    results = tmp_path / "results"
    refusal = "raise ValueError('a layout needs at least one component')"
    noticed, survives = (
        find("layout.py", "MemoryLayout", "full: bool = True"),
        find("layout.py", "MemoryLayout.__post_init__", refusal),
    )
    lines = [noticed.line, survives.line]
    options = ["--file", "core/layout.py", "--until", "short simulation", "--results", str(results)]
    for line in lines:
        options += ["--line", str(line)]
    status, (survivor, summary) = command(*options)
    assert (status, summary["judged"], summary["survivors"]) == (1, 2, 1)
    assert survivor["line"] == lines[1]
    kept = [json.loads(line) for line in results.read_text().splitlines()]
    verdicts = {one["line"]: one["noticed_by"] for one in kept if "passed" not in one}
    assert verdicts == {lines[0]: "short simulation", lines[1]: None}
    passed = {(one["line"], one["passed"]) for one in kept if "passed" in one}
    assert passed == {(lines[0], "import"), (lines[1], "short simulation")}
    status, (survivor, summary) = command(*options)
    assert (status, summary["judged"], summary["survivors"]) == (1, 0, 1)
    status, (survivor, summary) = command(*options, "--again")
    assert (status, summary["judged"], survivor["line"]) == (1, 1, lines[1])


def test_what_is_accepted_is_still_there_and_has_a_reason() -> None:
    there = {statement.key for path in CORE.glob("*.py") for statement in statements(path)}
    assert [key for key in ACCEPTED if key not in there] == []
    assert {key[0] for key in ACCEPTED} <= set(JUDGED) <= {path.name for path in CORE.glob("*.py")}
    assert all(reason.endswith(".") and len(reason) > 20 for reason in ACCEPTED.values())


@pytest.mark.soak
@pytest.mark.parametrize("file", JUDGED)
def test_every_statement_is_missed(file: str) -> None:
    """A run that was interrupted goes on where it ended, as long as neither the core nor its tests change."""
    _, printed = command("--jobs", "2", "--file", f"core/{file}", "--results", str(kept_results()))
    survivors = {
        (
            one["file"],
            one["function"],
            one["statement"],
            one["occurrence"],
        ): f"core/{one['file']}:{one['line']}"
        for one in printed[:-1]
    }
    new = [f"{where}: {key[2]}" for key, where in survivors.items() if key not in ACCEPTED]
    assert not new, "nothing notices that these are gone:\n" + "\n".join(new)
    noticed = [str(key) for key in ACCEPTED if key[0] == file and key not in survivors]
    assert not noticed, "these are noticed now, take them out of accepted.py:\n" + "\n".join(noticed)


def test_no_tests_notice_nothing(request: pytest.FixtureRequest) -> None:
    assert judges.passing(request.session, []) is None
