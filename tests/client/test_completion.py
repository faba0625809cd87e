"""Shells complete commands and their options, without importing what is heavy."""

import os
import subprocess
import sys

import pytest

from holdfast.cli import COMMANDS


def complete(line: str) -> list[str]:
    """What bash is offered at the end of a line."""
    words = line.split(" ")
    variables = {
        "_HOLDFAST_COMPLETE": "complete_bash",
        "COMP_WORDS": "\n".join(words).replace("\n", " "),
        "COMP_CWORD": str(len(words) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "holdfast.cli"],
        capture_output=True, text=True, check=False, timeout=240, env={**os.environ, **variables},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "| torch\n" not in done.stderr, "completion must be quick"
    return done.stdout.split()


def test_commands() -> None:
    assert complete("holdfast ") == [command.name for command in COMMANDS]
    assert complete("holdfast ser") == ["serve"]


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("holdfast serve --po", ["--port"]),
        ("holdfast serve --audit ", ["on", "strict"]),
        ("holdfast serve --device c", ["cpu", "cuda"]),
        ("holdfast chat --ur", ["--url"]),
        ("holdfast chat --tem", ["--temperature"]),
        ("holdfast top --on", ["--once"]),
        ("holdfast bench c", ["core"]),
        ("holdfast bench sessions --ab", ["--aborts"]),
        ("holdfast bench sessions --api s", ["sessions"]),
    ],
)
def test_options(line: str, offered: list[str]) -> None:
    assert complete(line) == offered


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_a_shell(shell: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.cli"],
        capture_output=True, text=True, check=False, timeout=240,
        env={**os.environ, "_HOLDFAST_COMPLETE": f"source_{shell}"},
    )  # fmt: skip
    assert done.returncode == 0
    assert f"_HOLDFAST_COMPLETE=complete_{shell}" in done.stdout
