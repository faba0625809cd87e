"""The command starts without torch: help, version, simulation, the core's benchmark, and API processes."""

import subprocess
import sys
from importlib import import_module

import pytest

from holdfast.cli import COMMANDS
from tests.tidy.tree import sources

# Runs the command in a fresh interpreter, whatever way it ends, and prints which heavy modules it imported.
PROBE = """
import sys
try:
    {statement}
except SystemExit as end:
    assert end.code in (None, 0), end.code
print("imported:", sorted({{"torch", "triton", "transformers"}} & sys.modules.keys()))
"""

TORCH_FREE = {
    "version": ["version"],
    "sim": ["sim", "--help"],
    "bench": ["bench", "core", "--help"],
}


def last_line(statement: str, *arguments: str) -> str:
    script = PROBE.format(statement=statement)
    run = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True, timeout=60
    )
    return run.stdout.splitlines()[-1]


def test_importing_the_package() -> None:
    assert last_line("import holdfast") == "imported: []"


def test_help() -> None:
    assert last_line("from holdfast.cli import main; main()", "--help") == "imported: []"


@pytest.mark.parametrize("name", [command.name for command in COMMANDS if command.name in TORCH_FREE])
def test_torch_free_command(name: str) -> None:
    assert last_line("from holdfast.cli import main; main()", *TORCH_FREE[name]) == "imported: []"


@pytest.mark.parametrize("package", ["core", "sim", "client", "bench.core"])
def test_every_module_of_a_torch_free_package(package: str) -> None:
    modules = [file.module for file in sources("src") if f"{file.module}.".startswith(f"holdfast.{package}.")]
    assert modules
    assert last_line(f"import {', '.join(modules)}") == "imported: []"


@pytest.mark.parametrize("module", ["server.app", "server.text.process", "server.link.engine_set"])
def test_the_processes_in_front_of_an_engine(module: str) -> None:
    """Torch would be two thirds of an API process's start and of its memory."""
    assert last_line(f"import holdfast.{module}") == "imported: []"


def test_core_stands_alone() -> None:
    """In this process, so that the coverage counts every module of the core, even one without tests."""
    for file in sources("src"):
        if file.package == "core":
            assert import_module(file.module).__doc__


def test_probe_sees_torch() -> None:
    assert "torch" in last_line("import torch")
