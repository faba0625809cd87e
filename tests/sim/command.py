"""Running `holdfast sim` as a process of its own, and reading its summary."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def start(*arguments: str, hash_seed: str = "0", optimised: bool = False) -> subprocess.Popen[str]:
    """Begin `holdfast sim` with `--json`; `optimised` is `python -O`: without assertions."""
    interpreter = [sys.executable, "-O"] if optimised else [sys.executable]
    environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.Popen(
        [*interpreter, "-m", "holdfast.cli", "sim", *arguments, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, dict[str, Any]]:
    """Wait for it: the exit status and the last line."""
    output, errors = process.communicate()
    assert output, errors
    summary = json.loads(output.splitlines()[-1])
    assert summary["name"] == "summary"
    return process.returncode, summary


def run(*arguments: str, hash_seed: str = "0") -> tuple[int, dict[str, Any]]:
    """Begin and wait."""
    return finish(start(*arguments, hash_seed=hash_seed))
