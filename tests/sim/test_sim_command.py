"""`holdfast sim`: its exit statuses, what it prints, and that what it prints can be run."""

import json
import shlex

import pytest
from typer.testing import CliRunner

from holdfast.cli.sim import app
from holdfast.core.planner import Planner
from holdfast.sim.faults import SITES
from holdfast.sim.mutants import MUTANTS

SUMMARY = {
    "name",
    "steps",
    "turns",
    "faults",
    "findings",
    "state_hash",
    "fault_sites",
    "worlds",
    "quarantined",
}


def run(*arguments: str) -> tuple[int, list[str], str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout.splitlines(), result.stderr


def test_a_clean_run_exits_0_with_a_summary() -> None:
    status, lines, progress = run("--seed", "3", "--steps", "1500", "--workload", "mix", "--json")
    assert status == 0
    assert len(lines) == 1
    summary = json.loads(lines[0])
    assert summary.keys() == SUMMARY
    assert (summary["name"], summary["steps"], summary["findings"]) == ("summary", 1500, 0)
    assert list(summary["fault_sites"]) == list(SITES)
    assert "1500 of 1500 steps" in progress


def test_layout_page_size_and_workload_narrow_the_run() -> None:
    arguments = (
        "--layout",
        "hybrid",
        "--page-size",
        "3",
        "--workload",
        "voice",
        "--mutant",
        "close-forgets-state-slot",
    )
    status, lines, _ = run("--seed", "3", "--steps", "9000", *arguments, "--json")
    assert status == 1
    finding, summary = (json.loads(line) for line in lines)
    assert (finding["layout"], finding["page_size"], finding["workload"]) == ("hybrid", 3, "voice")
    assert summary["mutant_reached"] >= 1
    assert (summary["kind"], summary["holder"]) == (finding["kind"], finding["holder"])


def test_a_finding_exits_1_with_what_who_when_and_a_line_that_replays_it() -> None:
    arguments = ("--seed", "7", "--steps", "9000", "--mutant", "abort-wipes-the-memory")
    status, lines, _ = run(*arguments)
    assert status == 1
    shown = {line.partition(":")[0]: line.partition(":")[2].strip() for line in lines[:4]}
    assert shown.keys() == {"finding", "who", "when", "replay"}
    assert shown["finding"].startswith("recomputation")
    command, verb, *replay = shlex.split(shown["replay"])
    assert (command, verb) == ("holdfast", "sim")
    again = run(*replay)
    assert (again[0], again[1][:4]) == (1, lines[:4])


def test_a_crash_exits_3_with_its_traceback_and_a_line_that_replays_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def crash(*_arguments: object) -> None:
        raise KeyError("lost")

    monkeypatch.setattr(Planner, "fill", crash)
    status, _, errors = run("--steps", "500")
    assert status == 3
    assert "KeyError: 'lost'" in errors
    assert "--world 0" in errors
    assert run("--explore", "--states", "50")[0] == 3


def test_the_exploration_exits_0_or_1() -> None:
    status, lines, _ = run("--explore", "--states", "400", "--json")
    summary = json.loads(lines[-1])
    assert (status, summary["states"], summary["findings"]) == (0, 400, 0)
    status, lines, _ = run("--explore", "--states", "400", "--mutant", "abort-advances-the-history")
    assert status == 1
    assert lines[0].startswith("finding: transcript")


def test_the_mutants_are_listed() -> None:
    status, lines, _ = run("--list-mutants", "--json")
    assert status == 0
    assert [json.loads(line)["name"] for line in lines] == list(MUTANTS)
    assert run("--list-mutants")[0] == 0


@pytest.mark.parametrize(
    "wrong",
    [("--layout", "round"), ("--workload", "none"), ("--mutant", "all"), ("--steps", "0"), ("--faults", "2")],
)
def test_what_is_unknown_is_refused(wrong: tuple[str, str]) -> None:
    status, lines, errors = run(*wrong)
    assert (status, lines) == (2, [])
    assert wrong[0] in errors or wrong[0].removeprefix("--") in errors
