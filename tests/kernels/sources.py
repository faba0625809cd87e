"""What the tests of CUDA kernels share: the properties of an H200, and nvcc where it is installed."""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from holdfast.kernels.cuda.driver import Machine

H200 = Machine(132, 232_448)

needs_compiler = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


def said_without_compiler(
    module: ModuleType,
    ask: Callable[[], object],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> list[str]:
    """The log when a module is asked for a kernel twice on an H200 whose compiler always fails."""

    def refuse(_: str) -> bytes:
        raise OSError("no compiler today")

    monkeypatch.setattr(module, "machine_of", lambda _: H200)
    monkeypatch.setattr(module, "compile_source", refuse)
    with caplog.at_level(logging.WARNING, "holdfast.kernels"):
        for _ in range(2):
            assert not ask()
    return [record.getMessage() for record in caplog.records]


def compiler_report(source: str, folder: Path, spilled_most: int = 0) -> str:
    """nvcc's report on a source, which spills few bytes and has no serialised matrix instructions."""
    file = folder / "kernel.cu"
    file.write_text(source)
    flags = ("-arch=sm_90a", "-std=c++17", "-cubin", "-Werror", "all-warnings", "-Xptxas", "-v")
    done = subprocess.run(
        ["nvcc", *flags, "-o", str(folder / "kernel.cubin"), str(file)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    assert spilled is not None and max(map(int, spilled.groups())) <= spilled_most, done.stderr
    assert "serialized" not in done.stderr, "the matrix units would wait for each other"
    return done.stderr
