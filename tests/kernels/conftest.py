"""Fixtures of the kernel tests: Triton's interpreter, one thread for small tensors, the C kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch

from holdfast.kernels.cpu import attention, experts, library, matrix, packing, sampling
from tests.kernels.interpreter import INTERPRETED

FLAGS = {
    "native": (),
    "avx512": ("-march=skylake-avx512",),
    "avx2": ("-march=haswell",),
    "portable": ("-DHOLDFAST_PORTABLE",),
}
FEATURES = {"avx512": {"avx512bw", "avx512vl"}, "avx2": {"avx2"}}


@pytest.fixture(
    params=[*(name for name in FLAGS if name != "avx512"), pytest.param("avx512", marks=pytest.mark.soak)]
)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """The C kernels as compiled for one kind of processor; one that runs AVX-512 does so as `native` too."""
    name = request.param
    if not library.processor_features() >= FEATURES.get(name, set()):
        pytest.skip(f"this processor cannot run {name}")
    loaded = library.library() if name == "native" else library.load(library.compiled(FLAGS[name]))
    assert loaded is not None
    loaded.hf_threads(2)
    for module in (matrix, packing, attention, sampling, experts):
        monkeypatch.setattr(module, "library", lambda: loaded)
    return loaded


@pytest.fixture
def interpreter() -> None:
    """What a test needs that runs Triton kernels on CPU tensors."""
    if not INTERPRETED:
        pytest.skip("Triton compiles for the device here; python3 -m tests.gpu checks its kernels")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
