"""The CUDA driver and its compiler, as far as kernels of our own need them: compile, load, describe, launch.

torch brings the compiler along (NVRTC); the driver is the machine's. Every failure is an OSError that says
what was asked for. Used by `products`, `twelve` and `attention`.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple, cast

import torch

from holdfast.kernels.compiled import keep, kept, kernel_directory

log = logging.getLogger("holdfast.kernels")

COMPILER_OPTIONS = ("--gpu-architecture=sm_90a", "--std=c++17")

BFLOAT16 = 9
SWIZZLE_128_BYTES = 3
PROMOTE_TO_256_BYTES = 3
SHARED_MEMORY_OF_A_PROGRAM = 8
SHARED_MEMORY_AT_MOST = 97
CLUSTER_SIZE = 4
OVERLAPS_THE_KERNEL_BEFORE = 6
MAPS_KEPT = 8192


HOPPER = Path(__file__).parent / "source" / "hopper.cu"
"""What all sources for Hopper begin with."""

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
    """How the copy engine finds blocks of a tensor in bfloat16, swizzled in lines of 128 bytes.

    Sizes and the block are in elements, the innermost dimension first; its elements are adjacent, and
    `strides` has those of the others.
    """

    __slots__ = ("_storage", "address")

    def __init__(
        self, data: int, sizes: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...]
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
                SWIZZLE_128_BYTES,
                PROMOTE_TO_256_BYTES,
                0,
            ),
            "describe a tensor",
        )


@lru_cache(maxsize=MAPS_KEPT)
def map_of(data: int, sizes: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...]) -> Map:
    """The same map for the same place and shape: it says nothing about what lies there."""
    return Map(data, sizes, strides, block)


class Kernel:
    """A kernel on the current device, and how all its launches look."""

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
        """On the current stream; the arguments are maps, then pointers and numbers."""
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
    """The kernels of a source, from the cache if they are there, and whole."""
    compiler = _compiler()
    version = (ctypes.c_int(), ctypes.c_int())
    compiler.nvrtcVersion(ctypes.byref(version[0]), ctypes.byref(version[1]))
    said = repr((source, COMPILER_OPTIONS, version[0].value, version[1].value))
    target = kernel_directory() / f"cuda-{hashlib.sha256(said.encode()).hexdigest()[:24]}.cubin"
    image = kept(target)
    if image is not None:
        return image
    image = _compiled(compiler, source)
    try:
        keep(target, image)
    except OSError as error:
        log.info("a compiled kernel is not kept for the next start: %s", error)
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
        raise OSError(f"a CUDA kernel does not compile: {text.value.decode(errors='replace').strip()}")
    return text.raw


class Machine(NamedTuple):
    """What of a GPU decides how work is cut."""

    processors: int
    shared_memory: int


@contextmanager
def had_or_said(instead: str) -> Iterator[None]:
    """Where a kernel cannot be had the reason is logged, and what serves instead."""
    try:
        yield
    except OSError as error:
        log.warning("a CUDA kernel cannot be had; %s serves: %s", instead, error)


def index_of(device: torch.device) -> int | None:
    """The number of a GPU: of the current one where the device does not say."""
    if device.type != "cuda":
        return None
    index = cast("int | None", device.index)  # torch's annotation leaves out devices without a number
    return torch.cuda.current_device() if index is None else index


@cache
def machine_of(index: int | None) -> Machine | None:
    """What the device is; None where it is no Hopper, or kernels in CUDA are not wanted."""
    if index is None or os.environ.get("HOLDFAST_CUDA_KERNELS", "on") == "off":
        return None
    if torch.cuda.get_device_capability(index) != (9, 0):
        return None
    # The driver's calls want a context; torch makes one when it first allocates something.
    torch.empty(1, device=torch.device("cuda", index))
    return Machine(torch.cuda.get_device_properties(index).multi_processor_count, _shared_memory(index))


def _shared_memory(index: int) -> int:
    """Bytes that a program on a device may have at most."""
    driver, device, most = _driver(), ctypes.c_int(), ctypes.c_int()
    _check(driver.cuDeviceGet(ctypes.byref(device), index), f"find device {index}")
    told = driver.cuDeviceGetAttribute(ctypes.byref(most), SHARED_MEMORY_AT_MOST, device)
    _check(told, "tell how much shared memory a program may have")
    return most.value


@cache
def _compiler() -> ctypes.CDLL:
    """NVRTC: the one that torch has loaded or brings along."""
    major = (torch.version.cuda or "").partition(".")[0]
    name = f"libnvrtc.so.{major}"
    try:
        return ctypes.CDLL(name)
    except OSError:
        beside = Path(torch.__file__).parent.parent / "nvidia"
        for found in sorted(beside.glob(f"*/lib/{name}")):
            return ctypes.CDLL(str(found))
        raise OSError(f"there is no CUDA compiler ({name})") from None


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int, asked: str) -> None:
    if status == 0:
        return
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(status, ctypes.byref(text))
    reason = (text.value or b"unknown error").decode()
    raise OSError(f"the CUDA driver could not {asked}: {reason} ({status})")
