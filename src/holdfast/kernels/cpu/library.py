"""The C kernels of `source/`: compiled for this processor on first use and cached on disk.

`library()` returns the loaded library, or None without a compiler, on a processor without the vector
instructions, or where the settings switch C kernels off; callers then fall back to torch. A compiled file is
named by a hash of its inputs (sources, flags, compiler, processor), so machines can share a cache. Called by
the rest of this package; `match_threads` by the engine.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from holdfast.kernels import settings
from holdfast.kernels.compiled import keep, kept, one_at_a_time
from holdfast.kernels.cpu.structures import Form, MatrixPartStructure, MatrixStructure, UnpackedStructure

log = logging.getLogger("holdfast.kernels")

SOURCES = Path(__file__).parent / "source"
COMPILE_SECONDS_MAX = 300.0

# No -ffast-math: NaN stays NaN, and a row's sums do not depend on the rest of the batch.
FLAGS = (
    "-std=gnu11", "-O3", "-fPIC", "-shared", "-pthread", "-w", "-fno-math-errno", "-fno-trapping-math",
    "-ffp-contract=fast",
)  # fmt: skip
NEEDED_FEATURES = frozenset({"avx2", "fma", "f16c"})
NATIVE = {"x86_64": "-march=native", "aarch64": "-mcpu=native", "arm64": "-mcpu=native"}


@cache
def library() -> ctypes.CDLL | None:
    """The loaded kernels, or None where they are unavailable; the reason is logged once."""
    if not settings.chosen().cpu:
        return None
    machine = platform.machine()
    features = processor_features()
    if machine not in NATIVE or (machine == "x86_64" and not features >= NEEDED_FEATURES):
        log.info("no C kernels for this processor; falling back to torch")
        return None
    try:
        loaded = load(compiled((NATIVE[machine],)))
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("C kernels do not compile; falling back to torch: %s", error)
        return None
    if not calculates(loaded):
        log.warning("compiled C kernels failed their self-test; falling back to torch")
        return None
    loaded.hf_threads(torch.get_num_threads())
    return loaded


def match_threads() -> int:
    """Give the kernels, if loaded, as many threads as torch has now; returns the number."""
    loaded = library() if library.cache_info().currsize else None
    return 0 if loaded is None else int(loaded.hf_threads(torch.get_num_threads()))


def calculates(loaded: ctypes.CDLL) -> bool:
    """Self-test: whether small products of some forms are right with this compiler and processor."""
    return _multiplies_codes(loaded) and _multiplies_numbers(loaded)


def _multiplies_numbers(loaded: ctypes.CDLL) -> bool:
    """Whether weights of 16 bits are multiplied exactly; whole numbers leave nothing to round."""
    outputs, inputs = 16, 300
    for form, dtype in ((Form.BF16, torch.bfloat16), (Form.F16, torch.float16)):
        weight = (torch.arange(outputs * inputs) * 37 % 61 - 30).view(outputs, inputs).to(dtype)
        blocks = torch.zeros(loaded.hf_packed_bytes(form.value, outputs, inputs), dtype=torch.uint8)
        given = UnpackedStructure(weight.data_ptr(), None, None, None, None, outputs, inputs, form.value, 0)
        loaded.hf_pack(ctypes.byref(given), blocks.data_ptr())
        part = MatrixPartStructure(blocks.data_ptr(), form.value, 1)
        matrix = MatrixStructure(ctypes.addressof(part), None, outputs, inputs, 1, 0)
        x = (torch.arange(7 * inputs) * 29 % 97 - 48.0).view(7, inputs)
        found = torch.zeros(7, outputs)
        loaded.hf_linear(ctypes.byref(matrix), x.data_ptr(), inputs, 7, found.data_ptr(), outputs)
        if not torch.equal(found, x @ weight.float().T):
            return False
    return True


def _multiplies_codes(loaded: ctypes.CDLL) -> bool:
    """Whether quantised weights are multiplied right."""
    outputs, inputs = 16, 256
    x = (torch.arange(9 * inputs) * 29 % 97 / 48.0 - 1.0).view(9, inputs)
    for form, bits, group in ((Form.Q4_1, 4, 32), (Form.Q8_0, 8, 32), (Form.Q5_K, 5, 32), (Form.Q6_K, 6, 16)):
        codes = (torch.arange(outputs * inputs) * 37 % (1 << bits)).to(torch.uint8).view(outputs, inputs)
        blocks = torch.zeros(loaded.hf_packed_bytes(form.value, outputs, inputs), dtype=torch.uint8)
        groups = (torch.arange(outputs * inputs // group) % 7 + 1).to(torch.int8).view(outputs, -1)
        supers = form in (Form.Q5_K, Form.Q6_K)
        factors = torch.linspace(0.25, 0.5, outputs * (1 if supers else inputs // group)).view(outputs, -1)
        factors = factors.half().float()
        scale = factors * groups if supers else factors
        given = (each.data_ptr() for each in (codes, factors, factors, groups, groups))
        unpacked = UnpackedStructure(*given, outputs, inputs, form.value, 0)
        loaded.hf_pack(ctypes.byref(unpacked), blocks.data_ptr())
        part = MatrixPartStructure(blocks.data_ptr(), form.value, 1)
        matrix = MatrixStructure(ctypes.addressof(part), None, outputs, inputs, 1, 0)
        centre = {Form.Q8_0: 128.0, Form.Q6_K: 32.0}.get(form, -1.0)  # minima are equal to scales
        weight = (codes - centre) * scale.repeat_interleave(group, dim=1)
        for rows in (1, 9):
            found = torch.zeros(rows, outputs)
            loaded.hf_linear(ctypes.byref(matrix), x.data_ptr(), inputs, rows, found.data_ptr(), outputs)
            expected = x[:rows] @ weight.T
            if not torch.allclose(found, expected, atol=0.02 * float(expected.abs().max())):
                return False
    return True


def processor_features() -> frozenset[str]:
    """The processor features in /proc/cpuinfo; empty where there are none."""
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
    """The compiled file for these flags, compiled on a cache miss."""
    chosen = settings.chosen()
    compiler = shutil.which(chosen.c_compiler)
    if compiler is None:
        raise OSError(f"no C compiler ({chosen.c_compiler})")
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    files = sorted(SOURCES.glob("*.[ch]"))
    digest = hashlib.sha256(repr((FLAGS, flags, version, sorted(processor_features()))).encode())
    for file in files:
        digest.update(file.read_bytes())
    folder = chosen.kernel_directory
    target = folder / f"cpu-{digest.hexdigest()[:24]}.so"
    if kept(target) is not None:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    sources = [str(file) for file in files if file.suffix == ".c"]
    with one_at_a_time(folder):
        if kept(target) is None:
            _compile([compiler, *FLAGS, *flags, *sources, "-lm"], target)
    return target


def _compile(command: list[str], target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as place:
        made = Path(place) / target.name
        subprocess.run(
            [*command, "-o", str(made)], capture_output=True, timeout=COMPILE_SECONDS_MAX, check=True
        )
        keep(target, made.read_bytes())


def load(path: Path) -> ctypes.CDLL:
    """Load a compiled file and declare its functions. Calls release the interpreter lock."""
    loaded = ctypes.CDLL(str(path))
    pointer, whole, long, real = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
    for name, answer, arguments in (
        ("hf_threads", whole, (whole,)),
        ("hf_packed_bytes", long, (whole, whole, whole)),
        ("hf_pack", None, (pointer, pointer)),
        ("hf_rows", whole, (pointer, pointer, whole, real, pointer)),
        ("hf_widens", whole, ()),
        ("hf_linear", whole, (pointer, pointer, long, whole, pointer, long)),
        ("hf_experts", whole, (pointer, pointer, long, whole, pointer, pointer, whole, pointer)),
        ("hf_argmax", None, (pointer, long, whole, whole, pointer, pointer)),
        ("hf_sample", whole, (pointer, long, whole, whole, pointer, pointer, pointer)),
        ("hf_attend", None, (pointer, pointer, pointer, long, pointer, long)),
        ("hf_decode", whole, (pointer, pointer, pointer, pointer)),
    ):
        function = getattr(loaded, name)
        function.restype = answer
        function.argtypes = arguments
    return loaded
