"""What the tests of kernels in CUDA share: a compiler, and a kernel that is not there."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

needs_compiler = pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no CUDA compiler")


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
