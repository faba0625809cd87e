"""The CUDA driver and NVRTC by ctypes: compile, load, describe tensors for the copy engine (TMA), launch.

NVRTC is the one that torch ships; the driver is the machine's. Every failure is an OSError that names the
call. Not cuda-bindings, whose tensor maps are misaligned (docs/decisions/0019). Used by `products`, `twelve`,
`attention` and `scaled_attention`.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple, cast

import torch

from holdfast.kernels import settings
from holdfast.kernels.compiled import keep, kept

log = logging.getLogger("holdfast.kernels")

COMPILER_OPTIONS = ("--gpu-architecture=sm_90a", "--std=c++17", "--device-as-default-execution-space")

BFLOAT16 = 9
NO_SWIZZLE, SWIZZLE_64_BYTES, SWIZZLE_128_BYTES = 0, 2, 3
PROMOTE_TO_256_BYTES = 3
SHARED_MEMORY_OF_A_PROGRAM = 8
SHARED_MEMORY_AT_MOST = 97
CLUSTER_SIZE = 4
OVERLAPS_THE_KERNEL_BEFORE = 6
MAPS_KEPT = 8192


HOPPER = Path(__file__).parent / "source" / "hopper.cu"
"""The common prelude of all Hopper sources."""

Number = ctypes.c_void_p | ctypes.c_int | ctypes.c_float


class _Attribute(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_uint32 * 16))


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint32),
    )


class Map:
    """A tensor map (CUtensorMap): blocks of a bfloat16 tensor for the copy engine, swizzled.

    Sizes, strides and the block are in elements, innermost dimension first; the innermost stride is 1 and
    left out of `strides`.
    """

    __slots__ = ("_storage", "address")

    def __init__(
        self,
        data: int,
        sizes: tuple[int, ...],
        strides: tuple[int, ...],
        block: tuple[int, ...],
        swizzle: int = SWIZZLE_128_BYTES,
    ) -> None:
        rank = len(sizes)
        self._storage = ctypes.create_string_buffer(128 + 64)
        self.address = (ctypes.addressof(self._storage) + 63) & ~63
        _check(
            _driver().cuTensorMapEncodeTiled(
                ctypes.c_void_p(self.address),
                BFLOAT16,
                rank,
                ctypes.c_void_p(data),
                (ctypes.c_uint64 * rank)(*sizes),
                (ctypes.c_uint64 * (rank - 1))(*(2 * stride for stride in strides)),
                (ctypes.c_uint32 * rank)(*block),
                (ctypes.c_uint32 * rank)(*(1 for _ in sizes)),
                0,
                swizzle,
                PROMOTE_TO_256_BYTES,
                0,
            ),
            "describe a tensor",
        )


@lru_cache(maxsize=MAPS_KEPT)
def map_of(
    data: int,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    block: tuple[int, ...],
    swizzle: int = SWIZZLE_128_BYTES,
) -> Map:
    """The tensor map of an address and shape, cached: a map does not depend on the contents."""
    return Map(data, sizes, strides, block, swizzle)


class Kernel:
    """A loaded kernel on the current device with its launch attributes."""

    __slots__ = ("_attributes", "_function", "_module", "_shared", "_threads")

    def __init__(self, image: bytes, name: str, threads: int, shared: int, cluster: int) -> None:
        driver = _driver()
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        _check(driver.cuModuleLoadData(ctypes.byref(self._module), image), "load a kernel")
        found = driver.cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode())
        _check(found, f"find the kernel {name}")
        allowed = driver.cuFuncSetAttribute(self._function, SHARED_MEMORY_OF_A_PROGRAM, shared)
        _check(allowed, f"get {shared} bytes of shared memory")
        attributes = [_Attribute(OVERLAPS_THE_KERNEL_BEFORE, 0, (ctypes.c_uint32 * 16)(1))]
        if cluster > 1:
            attributes.append(_Attribute(CLUSTER_SIZE, 0, (ctypes.c_uint32 * 16)(cluster, 1, 1)))
        self._attributes = (_Attribute * len(attributes))(*attributes)
        self._threads, self._shared = threads, shared

    def launch(self, programs: int, maps: tuple[Map, ...], *rest: Number) -> None:
        """Launch on the current stream; kernel parameters are the maps, then pointers and numbers."""
        launch = _Launch(
            (programs, 1, 1),
            (self._threads, 1, 1),
            self._shared,
            torch.cuda.current_stream().cuda_stream,
            ctypes.addressof(self._attributes),
            len(self._attributes),
        )
        places = [each.address for each in maps] + [ctypes.addressof(each) for each in rest]
        arguments = (ctypes.c_void_p * len(places))(*places)
        launched = _driver().cuLaunchKernelEx(ctypes.byref(launch), self._function, arguments, None)
        _check(launched, "launch a kernel")


def compile_source(source: str) -> bytes:
    """The cubin of a source, from the cache or compiled."""
    compiler = _compiler()
    version = (ctypes.c_int(), ctypes.c_int())
    compiler.nvrtcVersion(ctypes.byref(version[0]), ctypes.byref(version[1]))
    inputs = repr((source, COMPILER_OPTIONS, version[0].value, version[1].value))
    name = f"cuda-{hashlib.sha256(inputs.encode()).hexdigest()[:24]}.cubin"
    target = settings.chosen().kernel_directory / name
    image = kept(target)
    if image is not None:
        return image
    image = _compiled(compiler, source)
    try:
        keep(target, image)
    except OSError as error:
        log.info("compiled kernel not cached: %s", error)
    return image


def _compiled(compiler: ctypes.CDLL, source: str) -> bytes:
    program = ctypes.c_void_p()
    compiler.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"holdfast.cu", 0, None, None)
    options = (ctypes.c_char_p * len(COMPILER_OPTIONS))(*(option.encode() for option in COMPILER_OPTIONS))
    failed = compiler.nvrtcCompileProgram(program, len(COMPILER_OPTIONS), options)
    answer = "nvrtcGetProgramLog" if failed else "nvrtcGetCUBIN"
    size = ctypes.c_size_t()
    getattr(compiler, f"{answer}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    getattr(compiler, answer)(program, text)
    compiler.nvrtcDestroyProgram(ctypes.byref(program))
    if failed:
        raise OSError(f"CUDA kernel does not compile: {text.value.decode(errors='replace').strip()}")
    return text.raw


class Machine(NamedTuple):
    """What tiling depends on: multiprocessors of a GPU, and bytes of shared memory a program may have."""

    processors: int
    shared_memory: int


@contextmanager
def falling_back_to(fallback: str) -> Iterator[None]:
    """Log an OSError of the block, with the fallback that runs instead, and go on."""
    try:
        yield
    except OSError as error:
        log.warning("CUDA kernel unavailable; falling back to %s: %s", fallback, error)


def index_of(device: torch.device) -> int | None:
    """The index of a GPU (the current one for a device without an index); None for other devices."""
    if device.type != "cuda":
        return None
    index = cast("int | None", device.index)  # torch's annotation leaves out devices without a number
    return torch.cuda.current_device() if index is None else index


@cache
def machine_of(index: int | None) -> Machine | None:
    """The properties of a Hopper GPU; None for other devices, or where CUDA kernels are switched off."""
    if index is None or not settings.chosen().cuda:
        return None
    if torch.cuda.get_device_capability(index) != (9, 0):
        return None
    # Driver calls need a context; torch creates one with its first allocation.
    torch.empty(1, device=torch.device("cuda", index))
    return Machine(torch.cuda.get_device_properties(index).multi_processor_count, _shared_memory(index))


def _shared_memory(index: int) -> int:
    """The largest dynamic shared memory of a program, in bytes."""
    driver, device, most = _driver(), ctypes.c_int(), ctypes.c_int()
    _check(driver.cuDeviceGet(ctypes.byref(device), index), f"find device {index}")
    told = driver.cuDeviceGetAttribute(ctypes.byref(most), SHARED_MEMORY_AT_MOST, device)
    _check(told, "read the shared memory limit")
    return most.value


@cache
def _compiler() -> ctypes.CDLL:
    """NVRTC: already loaded by torch, or from the packages that torch installs."""
    major = (torch.version.cuda or "").partition(".")[0]
    name = f"libnvrtc.so.{major}"
    try:
        return ctypes.CDLL(name)
    except OSError:
        beside = Path(torch.__file__).parent.parent / "nvidia"
        for found in sorted(beside.glob(f"*/lib/{name}")):
            return ctypes.CDLL(str(found))
        raise OSError(f"no CUDA compiler ({name})") from None


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int, call: str) -> None:
    if status == 0:
        return
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(status, ctypes.byref(text))
    reason = (text.value or b"unknown error").decode()
    raise OSError(f"the CUDA driver could not {call}: {reason} ({status})")
