"""What the tests of kernels in CUDA share: a device and a kernel that are not there, and a compiler."""

from __future__ import annotations

import ctypes
import logging
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from holdfast.kernels.cuda.driver import Machine

H200 = Machine(132, 232_448)

needs_compiler = pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no CUDA compiler")


def said_without_compiler(
    module: ModuleType,
    ask: Callable[[], object],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> list[str]:
    """What is logged when a kernel of a module is asked for twice on an H200 and nothing can be compiled."""

    def refuse(_: str) -> bytes:
        raise OSError("no compiler today")

    monkeypatch.setattr(module, "machine_of", lambda _: H200)
    monkeypatch.setattr(module, "compile_source", refuse)
    with caplog.at_level(logging.WARNING, "holdfast.kernels"):
        for _ in range(2):
            assert not ask()
    return [record.getMessage() for record in caplog.records]


def compiler_report(source: str, folder: Path) -> str:
    """What the compiler says of a source: nothing spilled, and no products that wait for each other."""
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
    assert " 0 bytes spill stores, 0 bytes spill loads" in done.stderr
    assert "serialized" not in done.stderr, "the matrix units would wait for each other"
    return done.stderr


class Recorded:
    """A kernel that writes down how it is launched."""

    def __init__(self) -> None:
        self.programs = 0
        self.maps: tuple[object, ...] = ()
        self.numbers: list[object] = []

    def launch(self, programs: int, maps: tuple[object, ...], *rest: ctypes.c_void_p | ctypes.c_int) -> None:
        self.programs, self.maps, self.numbers = programs, maps, [each.value for each in rest]
