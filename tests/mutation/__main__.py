"""`python -m tests.mutation`: remove one statement of the core at a time, and list those that nobody misses.

With `--results` verdicts are kept in a file, with the judges that noticed nothing, and a run goes on where
the last one ended, with further judges if it had few; `--again` judges the survivors in that file once more.
"""

import argparse
import json
import sys
from pathlib import Path
from random import Random

from tests.mutation.removal import JUDGES, Key, Removal, Verdict
from tests.mutation.statements import CORE, ROOT, Statement, statements


def main() -> int:
    """Run the command; 1 if a statement survived."""
    options = _options()
    known, asked = _known(options.results, options.again, options.until)
    chosen = [s for s in _chosen(options) if s.key not in known]
    survivors: list[Verdict] = [
        Verdict(s, None) for s in _chosen(options) if s.key in known and known[s.key] is None
    ]
    judged = 0

    def told(verdict: Verdict) -> None:
        nonlocal judged
        judged += 1
        if verdict.noticed_by is None:
            survivors.append(verdict)
        keep({**verdict.as_json(), "until": options.until})

    def passed(statement: Statement, judge: str) -> None:
        keep({**Verdict(statement, None).as_json(), "passed": judge})

    def keep(line: dict[str, object]) -> None:
        if options.results is not None:
            with options.results.open("a") as results:
                results.write(json.dumps(line) + "\n")

    def said(text: str) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\033[K{judged} of {len(chosen)} judged; {text}")
            sys.stderr.flush()

    ladder = JUDGES[: JUDGES.index(options.until) + 1]
    Removal(chosen, options.jobs, options.tests, ladder, told, said, asked, passed).run()
    said("\n")
    _report(survivors, judged, options.json)
    return int(bool(survivors))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--file", action="append", help="one file, as core/prefix.py; may be repeated")
    parser.add_argument("--line", type=int, action="append", help="one line of it; may be repeated")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--sample", type=int, help="so many statements, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--tests", type=int, default=sys.maxsize, help="tests of a folder for each, at most")
    parser.add_argument("--until", choices=JUDGES[2:], default=JUDGES[-1], help="the last judge to ask")
    parser.add_argument("--results", type=Path, help="verdicts, a JSON object a line; skips what is there")
    parser.add_argument("--again", action="store_true", help="judge survivors among the results again")
    parser.add_argument("--json", action="store_true", help="survivors as JSON objects, a line each")
    return parser.parse_args()


def _chosen(options: argparse.Namespace) -> list[Statement]:
    names = [Path(name).name for name in options.file or sorted(path.name for path in CORE.glob("*.py"))]
    chosen = [statement for name in names for statement in statements(CORE / name)]
    if options.line:
        chosen = [s for s in chosen if any(s.line <= line <= s.end_line for line in options.line)]
    if options.sample is not None and options.sample < len(chosen):
        chosen = Random(options.seed).sample(chosen, options.sample)
    return chosen


def _known(
    results: Path | None, again: bool, until: str
) -> tuple[dict[Key, str | None], dict[Key, set[str]]]:
    """The verdicts of earlier runs by statement: which judge noticed; and which judges noticed nothing.

    Of a statement that survived fewer judges than are to be asked, there is no verdict yet.
    """
    known: dict[Key, str | None] = {}
    asked: dict[Key, set[str]] = {}
    if results is not None and results.exists():
        for line in results.read_text().splitlines():
            one = json.loads(line)
            key = (one["file"], one["function"], one["statement"], one["occurrence"])
            if "passed" in one:
                asked.setdefault(key, set()).add(one["passed"])
            elif one["noticed_by"] is not None or JUDGES.index(one["until"]) >= JUDGES.index(until):
                known[key] = one["noticed_by"]
    if again:
        survivors = {key for key, judge in known.items() if judge is None}
        return {key: known[key] for key in known.keys() - survivors}, {}
    return known, asked


def _report(survivors: list[Verdict], judged: int, as_json: bool) -> None:
    survivors.sort(key=lambda verdict: (verdict.statement.file, verdict.statement.line))
    for verdict in survivors:
        print(json.dumps(verdict.as_json()) if as_json else verdict.statement)
    summary = {"name": "summary", "judged": judged, "survivors": len(survivors)}
    print(json.dumps(summary) if as_json else f"{judged} judged, {len(survivors)} survive")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "src"))
    raise SystemExit(main())
