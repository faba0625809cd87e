"""Attention over a queue of pieces of eight-bit keys without a GPU: compilation, shapes and launches.

`python3 -m tests.gpu` checks its results on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from holdfast.kernels import Batch, ScaledCache, build_queue, configure, takes_scaled_queue
from holdfast.kernels.cuda import attention, driver, scaled_attention
from holdfast.kernels.cuda.driver import Machine
from holdfast.kernels.cuda.scaled_attention import ScaledShape, scaled_source
from holdfast.kernels.settings import KernelSettings
from holdfast.models.layout import PageShape
from tests.kernels import emulated
from tests.kernels.batches import fill_cache, paged_batch, relative_error
from tests.kernels.sources import H200, compiler_report, needs_compiler, said_without_compiler

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:triton"),
]

GPU = torch.device("cuda", 0)
HEADS = {"heads": 32, "kv_heads": 8, "dim": 128, "page_size": 64, "dtype": torch.bfloat16, "device": GPU}


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    cached = (scaled_attention.scaled_queue_kernel, driver.machine_of)
    for function in cached:
        function.cache_clear()
    yield
    configure(KernelSettings())
    for function in cached:
        function.cache_clear()


@needs_compiler
@pytest.mark.parametrize(
    "shape",
    [
        (128, 4, 8, 64),
        *(pytest.param(each, marks=pytest.mark.soak) for each in ((64, 8, 8, 16), (128, 1, 2, 32))),
    ],
)
def test_a_kernel_compiles_and_fits(tmp_path: Path, shape: tuple[int, int, int, int]) -> None:
    wanted = ScaledShape(*shape)
    stages = wanted.stages(H200)
    assert stages >= 8, "enough to keep the memory busy"
    report = compiler_report(scaled_source(wanted, stages), tmp_path)
    own = int(report.split(" bytes smem")[0].split()[-1])
    assert wanted.shared(stages) + own <= H200.shared_memory


@pytest.mark.parametrize(
    "given",
    [
        {"dtype": torch.float16},
        {"dim": 80},
        {"dim": 256},
        {"heads": 34},
        {"heads": 72},
        {"page_size": 8},
        {"device": torch.device("cpu")},
    ],
    ids=str,
)
def test_what_is_left_to_triton(monkeypatch: pytest.MonkeyPatch, given: dict[str, object]) -> None:
    monkeypatch.setattr(attention, "machine_of", lambda index: None if index is None else H200)
    monkeypatch.setattr(attention, "compile_source", lambda _: b"image")
    monkeypatch.setattr(attention, "Kernel", lambda *_: "kernel")
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    assert takes_scaled_queue(**HEADS)
    assert not takes_scaled_queue(**{**HEADS, **given})


def test_a_device_with_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "machine_of", lambda _: Machine(132, 64 << 10))
    monkeypatch.setattr(attention, "compile_source", lambda _: pytest.fail("compiled"))
    assert not takes_scaled_queue(**HEADS)


def test_a_kernel_that_cannot_be_had_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said = said_without_compiler(attention, lambda: takes_scaled_queue(**HEADS), monkeypatch, caplog)
    assert said == ["CUDA kernel unavailable; falling back to Triton: no compiler today"]


# --- launches -------------------------------------------------------------------------------------


class Call(NamedTuple):
    """A batch of one-token rows with a queue, its caches, and the kernel that is launched."""

    query: torch.Tensor
    caches: tuple[ScaledCache, ScaledCache]
    batch: Batch
    kernel: emulated.ScaledAttention

    def __call__(self, sinks: torch.Tensor | None = None) -> torch.Tensor:
        triton = import_module("holdfast.kernels.triton")
        out: torch.Tensor = triton.attend(
            self.query, *self.caches, self.batch.full, self.batch, scale=0.5, sinks=sinks
        )
        return out

    def expected(self, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """The attention in torch."""
        plain = import_module("holdfast.kernels.torch")
        out: torch.Tensor = plain.attend(
            self.query, *self.caches, self.batch.full, self.batch, scale=0.5, sinks=sinks
        )
        return out


@pytest.fixture(params=[64, 128])
def call(interpreter: None, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Call:
    """Three rows, one with a long history, in layer 1 of a memory of two layers; 4 query and 2 key heads."""
    dim = request.param
    kernel = emulated.ScaledAttention(ScaledShape(dim, 2, 2, 32))
    machine = Machine(12, H200.shared_memory)
    monkeypatch.setattr(attention, "machine_of", lambda _: machine)
    monkeypatch.setattr(scaled_attention, "map_of", emulated.TensorMap)
    monkeypatch.setattr(
        scaled_attention, "scaled_queue_kernel", lambda shape, _: kernel if shape == kernel.shape else None
    )
    batch, total = paged_batch([1, 1, 1], [5, 700, 40], 32)
    generator = torch.Generator().manual_seed(5)
    storage, _, _ = fill_cache(batch, total, 2, dim, generator=generator)
    codes, scales = import_module("holdfast.kernels.torch.scaled").encode(torch.nan_to_num(storage))
    scales = scales.transpose(-1, -2).contiguous()
    caches = [ScaledCache(codes[:, 1, part], scales[:, 1, part]) for part in (0, 1)]
    assert codes[0].nbytes + scales[0].nbytes == PageShape(2, 2, dim).bytes_per_page(32, 1, 1)
    query = torch.randn(3, 4, dim, generator=generator).bfloat16()
    batch.queue = build_queue(3, 3, 4, 2, dim, torch.device("cpu"))
    import_module("holdfast.kernels.triton").list_pieces(batch)
    return Call(query, (caches[0], caches[1]), batch, kernel)


@pytest.mark.parametrize("sunk", [False, True])
def test_a_launch_computes_attention(call: Call, sunk: bool) -> None:
    sinks = torch.linspace(-1, 3, 4) if sunk else None
    assert call.batch.queue is not None
    assert int(call.batch.queue.listed[:, 7].max()) > 1, "the keys of the long row are split"
    assert relative_error(call(sinks), call.expected(sinks)) < 5e-3
    assert call.kernel.launches == 1


def test_rows_of_several_tokens_are_refused(call: Call) -> None:
    call.batch.rows_of_one = 2
    with pytest.raises(AssertionError):
        call()


def test_scales_that_the_copy_engine_cannot_fetch_are_refused(call: Call) -> None:
    key, value = call.caches
    scales = torch.zeros(4 * key.scales.numel() + 1, dtype=torch.uint8)[1:]
    shifted = ScaledCache(key.codes, scales.as_strided(key.scales.shape, key.scales.stride()))
    with pytest.raises(AssertionError):
        call._replace(caches=(shifted, value))()
