"""CUDA sources carried out on the CPU, lane by lane, so that they are tested without a GPU.

`host_cuda.h` has what the GPU brings along. Functions of a source that are written in assembler are replaced
by those of the same name there.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from holdfast.kernels.cuda.driver import NO_SWIZZLE

needs_host_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

HEADER = Path(__file__).with_name("host_cuda.h")
FUNCTION = re.compile(r"(?:template <[^>]*>\n)?__device__ __forceinline__ [^\n(]*?(\w+)\([^{;]*\{")
BOUNDS = re.compile(r"__launch_bounds__\(([^,)]+)(?:,[^)]*)?\)\s+(\w+)\(")
KERNEL = re.compile(r'extern "C"\s+void\s+(\w+)\(([^)]*)\)')


class HostMap(ctypes.Structure):
    """A tensor map of three dimensions, as `host_cuda.h` has it."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_int),
        ("second", ctypes.c_int),
        ("third", ctypes.c_int),
        ("second_stride", ctypes.c_longlong),
        ("third_stride", ctypes.c_longlong),
        ("seconds", ctypes.c_int),
        ("thirds", ctypes.c_int),
    )


def host_map(
    data: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], swizzle: int
) -> HostMap:
    """What `holdfast.kernels.cuda.driver.map_of` returns for a GPU."""
    assert swizzle == NO_SWIZZLE and box[0] == sizes[0] and box[0] % 8 == 0 and max(box) <= 256
    assert all(stride % 8 == 0 for stride in strides)
    return HostMap(data, 2 * box[0], *sizes[1:], *(2 * stride for stride in strides), *box[1:])


class HostKernel:
    """A kernel of a source, launched as those of `holdfast.kernels.cuda.driver` are.

    The first launch compiles all kernels of the source, unless the folder has them.
    """

    def __init__(self, source: str, name: str, folder: Path, cluster: int = 1) -> None:
        self.source, self.name, self.folder, self.cluster = source, name, folder, cluster

    def launch(self, programs: int, maps: tuple[Any, ...], *parameters: Any) -> None:
        launch = _compiled(self.source, self.folder)[f"launch_{self.name}"]
        waiting = launch(ctypes.c_int(programs), ctypes.c_int(self.cluster), *maps, *parameters)
        assert waiting == 0, f"{waiting} lanes wait for others that never come"


def _compiled(source: str, folder: Path) -> ctypes.CDLL:
    """The library of a source: `launch_NAME` for each kernel, which takes programs and cluster first."""
    body = _without_assembler(source[source.index("#define") :])
    threads = {name: count for count, name in BOUNDS.findall(body)}
    body = re.sub(r"__launch_bounds__\([^\n]*\)|__device__|__global__", "", body)
    body = body.replace("extern __shared__ char memory[]", "const char* memory = program->memory")
    body = body.replace("__forceinline__", "inline").replace("__shared__", "static")
    for name, given in KERNEL.findall(body):
        names = ", ".join(part.split()[-1].lstrip("*") for part in given.split(","))
        body += f'\nextern "C" int launch_{name}(int programs, int cluster, {given}) '
        body += f"{{ return run(programs, {threads[name]}, cluster, [&] {{ {name}({names}); }}); }}\n"
    content = HEADER.read_text() + body
    file = folder / f"{hashlib.sha256(content.encode()).hexdigest()[:16]}.cpp"
    library = file.with_suffix(".so")
    if not library.exists():
        file.write_text(content)
        command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-o", str(library), str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


def _without_assembler(source: str) -> str:
    """The source without functions that the header has, or that only the GPU could run."""
    kept, at = [], 0
    theirs = set(re.findall(r"\binline [^\n(]*?(\w+)\(", HEADER.read_text()))
    for found in FUNCTION.finditer(source):
        end, depth = found.end(), 1
        while depth:
            depth += {"{": 1, "}": -1}.get(source[end], 0)
            end += 1
        if found[1] in theirs or "asm volatile" in source[found.start() : end]:
            kept.append(source[at : found.start()])
            at = end
    return "".join([*kept, source[at:]])
