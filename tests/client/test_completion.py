"""Shells complete commands and their options, without importing what is heavy."""

import os
import subprocess
import sys

import pytest

from holdfast.cli import COMMANDS
from tests.preloaded.commands import run


def complete(line: str, watched: bool = True) -> list[str]:
    """What bash is offered at the end of a line; where it is `watched`, nothing heavy is imported for it."""
    words = line.split(" ")
    variables = {
        "_HOLDFAST_COMPLETE": "complete_bash",
        "COMP_WORDS": "\n".join(words).replace("\n", " "),
        "COMP_CWORD": str(len(words) - 1),
    }
    environment = {**os.environ, **variables}
    if not watched:
        return run(env=environment, text=True).stdout.split()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "holdfast.cli"],
        capture_output=True, text=True, check=False, timeout=240, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "| torch\n" not in done.stderr, "completion must be quick"
    return done.stdout.split()


def test_commands() -> None:
    assert complete("holdfast ") == [command.name for command in COMMANDS]
    assert complete("holdfast ser") == ["serve"]


@pytest.mark.parametrize(
    ("line", "offered", "watched"),
    [
        ("holdfast serve --po", ["--port"], True),
        ("holdfast serve --audit ", ["on", "strict"], False),
        ("holdfast serve --device c", ["cpu", "cuda"], False),
        ("holdfast chat --ur", ["--url"], True),
        ("holdfast chat --tem", ["--temperature"], False),
        ("holdfast top --on", ["--once"], True),
        ("holdfast bench c", ["core"], True),
        ("holdfast bench sessions --ab", ["--aborts"], True),
        ("holdfast bench sessions --api s", ["sessions"], False),
    ],
)
def test_options(line: str, offered: list[str], watched: bool) -> None:
    """Each module of options is watched once."""
    assert complete(line, watched) == offered


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_a_shell(shell: str) -> None:
    done = run(env={**os.environ, "_HOLDFAST_COMPLETE": f"source_{shell}"}, text=True)
    assert done.returncode == 0
    assert f"_HOLDFAST_COMPLETE=complete_{shell}" in done.stdout
