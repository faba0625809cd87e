"""The C kernels of `source/`: compiled for this processor when first needed, kept in the user's cache.

`library()` answers the loaded library, or None where there is no compiler, the processor lacks the vector
instructions, or `HOLDFAST_CPU_KERNELS=off`; the torch kernels serve then. A compiled file is named by all
that went into it (sources, flags, compiler, processor), so a cache that machines share holds one for each.
Called by the rest of this package, and by who sets torch's threads.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from holdfast.kernels.compiled import keep, kept, kernel_directory
from holdfast.kernels.cpu.structures import MatrixStructure

log = logging.getLogger("holdfast.kernels")

SOURCES = Path(__file__).parent / "source"
COMPILE_SECONDS_MAX = 300.0

# No -ffast-math: NaN must stay NaN, and sums keep their order, whatever else is in a batch.
FLAGS = (
    "-std=gnu11", "-O3", "-fPIC", "-shared", "-pthread", "-w", "-fno-math-errno", "-fno-trapping-math",
    "-ffp-contract=fast",
)  # fmt: skip
NEEDED_FEATURES = frozenset({"avx2", "fma", "f16c"})
NATIVE = {"x86_64": "-march=native", "aarch64": "-mcpu=native", "arm64": "-mcpu=native"}


@cache
def library() -> ctypes.CDLL | None:
    """The kernels, or None where they cannot be had; the reason is logged once."""
    if os.environ.get("HOLDFAST_CPU_KERNELS", "on") == "off":
        return None
    machine = platform.machine()
    features = processor_features()
    if machine not in NATIVE or (machine == "x86_64" and not features >= NEEDED_FEATURES):
        log.info("no CPU kernels for this processor; the torch ones serve")
        return None
    try:
        loaded = load(compiled((NATIVE[machine],)))
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("the CPU kernels could not be compiled; the torch ones serve: %s", error)
        return None
    if not calculates(loaded):
        log.warning("the CPU kernels were compiled but calculate wrongly; the torch ones serve")
        return None
    loaded.hf_threads(torch.get_num_threads())
    return loaded


def match_threads() -> int:
    """Let the kernels, if they are loaded, run on as many threads as torch does now; answers how many."""
    loaded = library() if library.cache_info().currsize else None
    return 0 if loaded is None else int(loaded.hf_threads(torch.get_num_threads()))


def calculates(loaded: ctypes.CDLL) -> bool:
    """Whether a small product comes out right: a compiler or a processor may be one that nobody has tried."""
    outputs, inputs, group = 16, 64, 32
    x = torch.linspace(-1.0, 1.0, inputs)
    factors = torch.linspace(0.25, 0.5, outputs * inputs // group).view(outputs, -1)
    for bits in (4, 8):
        codes = (torch.arange(outputs * inputs) * 37 % (1 << bits)).to(torch.uint8).view(outputs, inputs)
        blocks = torch.zeros(outputs * inputs * bits // 8 + inputs // group * outputs * 4, dtype=torch.uint8)
        loaded.hf_pack(
            blocks.data_ptr(), codes.data_ptr(), factors.data_ptr(), factors.data_ptr(), outputs, inputs, bits
        )
        matrix = MatrixStructure(blocks.data_ptr(), None, outputs, inputs, bits, 0)
        found = torch.zeros(outputs)
        loaded.hf_linear(ctypes.byref(matrix), x.data_ptr(), inputs, 1, found.data_ptr(), outputs)
        weight = codes * factors.repeat_interleave(group, dim=1) + factors.repeat_interleave(group, dim=1)
        expected = weight @ x
        if not torch.allclose(found, expected, atol=0.02 * float(expected.abs().max())):
            return False
    return True


def processor_features() -> frozenset[str]:
    """The features that the system says this processor has; empty where it does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def compiled(flags: tuple[str, ...]) -> Path:
    """The compiled file for these flags, made if the cache lacks it."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise OSError("there is no C compiler")
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    files = sorted(SOURCES.glob("*.[ch]"))
    digest = hashlib.sha256(repr((FLAGS, flags, version, sorted(processor_features()))).encode())
    for file in files:
        digest.update(file.read_bytes())
    folder = kernel_directory()
    target = folder / f"cpu-{digest.hexdigest()[:24]}.so"
    if kept(target) is not None:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    sources = [str(file) for file in files if file.suffix == ".c"]
    with tempfile.TemporaryDirectory(dir=folder) as place:
        made = Path(place) / target.name
        subprocess.run(
            [compiler, *FLAGS, *flags, *sources, "-lm", "-o", str(made)],
            capture_output=True,
            timeout=COMPILE_SECONDS_MAX,
            check=True,
        )
        keep(target, made.read_bytes())
    return target


def load(path: Path) -> ctypes.CDLL:
    """A compiled file with its functions declared. Calls leave the interpreter free for other threads."""
    loaded = ctypes.CDLL(str(path))
    pointer, whole, long, real = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
    for name, answer, arguments in (
        ("hf_threads", whole, (whole,)),
        ("hf_pack", None, (pointer, pointer, pointer, pointer, whole, whole, whole)),
        ("hf_rows", whole, (pointer, pointer, whole, real, pointer)),
        ("hf_linear", whole, (pointer, pointer, long, whole, pointer, long)),
        ("hf_argmax", None, (pointer, long, whole, whole, pointer, pointer)),
        ("hf_sample", whole, (pointer, long, whole, whole, pointer, pointer)),
        ("hf_attend", None, (pointer, pointer, pointer, long, pointer, long)),
        ("hf_decode", whole, (pointer, pointer, pointer, pointer)),
    ):
        function = getattr(loaded, name)
        function.restype = answer
        function.argtypes = arguments
    return loaded
