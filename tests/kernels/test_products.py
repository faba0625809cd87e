"""The CUDA products without a GPU: tiling, launches against an emulated kernel, compilation, fallback."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.kernels import configure
from holdfast.kernels.cuda import driver, products
from holdfast.kernels.cuda.driver import Machine
from holdfast.kernels.cuda.products import ACTIVATIONS, PLAIN, Cut, cut_of, product, source_of, takes_products
from holdfast.kernels.settings import KernelSettings
from holdfast.kernels.torch.activation import Activation, activate
from tests.kernels import emulated
from tests.kernels.batches import relative_error
from tests.kernels.sources import H200, compiler_report, needs_compiler, said_without_compiler

SMALL = Machine(60, 232_448)

SHAPES = [
    (6144, 4096),
    (4096, 4096),
    (4096, 12288),
    (12288, 4096),
    (18560, 4096),
    (21504, 4096),
    (9224, 2560),
]


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    cached = (products._kernel, driver.machine_of, driver._compiler)
    for function in cached:
        function.cache_clear()
    yield
    configure(KernelSettings())
    for function in cached:
        function.cache_clear()


@pytest.mark.parametrize("machine", [H200, SMALL])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("tokens", [2, 64, 65, 128, 129, 192])
def test_a_cut_covers_every_output_in_one_wave(machine: Machine, gated: bool, tokens: int) -> None:
    taken = 0
    for outputs, depth in SHAPES:
        cut = cut_of(tokens, outputs, depth, gated, machine)
        if cut is None:
            continue
        taken += 1
        tile = cut.rows // 2 if gated else cut.rows
        tiles = -(-outputs // tile)
        assert tile % 8 == 0
        assert tiles * tile >= outputs > (tiles - 1) * tile, "no program without work"
        assert tiles * cut.splits <= machine.processors
        assert cut.tokens >= tokens > cut.tokens - 64
        assert cut.shared <= machine.shared_memory
        assert cut.splits == 1 or cut.tokens * (cut.rows + 8) * 4 <= cut.stages * cut.stage_bytes
    assert taken >= 2


@pytest.mark.parametrize(
    ("tokens", "outputs", "depth", "gated"),
    [
        (0, 4096, 4096, False),
        (1, 12288, 4096, False),  # of a tall weight one token has a kernel of its own
        (193, 4096, 4096, False),
        (64, 151_936, 4096, False),  # more than a wave
        (64, 2048, 4096, False),  # less than a wave of tiles worth a ring
        (64, 4100, 4096, False),
        (64, 4096, 4100, False),
        (64, 4096, 512, False),
        (192, 16_384, 4096, True),  # sums that do not fit the registers
    ],
)
def test_what_is_left_to_others(tokens: int, outputs: int, depth: int, gated: bool) -> None:
    assert cut_of(tokens, outputs, depth, gated, H200) is None


def test_one_token_by_tiles_that_are_shared() -> None:
    assert cut_of(1, 4096, 12288, False, H200) == cut_of(2, 4096, 12288, False, H200)


def test_a_little_shared_memory_is_not_enough() -> None:
    assert cut_of(64, 4096, 4096, False, Machine(132, 99 << 10)) is not None
    assert cut_of(192, 12288, 4096, True, Machine(132, 99 << 10)) is None


@needs_compiler
@pytest.mark.parametrize(
    ("tokens", "outputs", "activation"),
    [
        (64, 6144, None),
        (128, 12288, "swiglu"),
        (192, 4096, None),
        *(
            pytest.param(*rare, marks=pytest.mark.soak)
            for rare in (
                (192, 12288, "geglu"),
                (128, 16_896, "swiglu_clamped"),
                (192, 21504, "relu_squared"),
                (64, 3072, "swiglu"),
                (192, 6144, None),
                (128, 2048, "swiglu"),
                (129, 3072, "swiglu_clamped"),
            )
        ),
    ],
)
def test_a_kernel_compiles_and_keeps_its_sums_in_registers(
    tmp_path: Path, tokens: int, outputs: int, activation: Activation | None
) -> None:
    cut = cut_of(tokens, outputs, 4096, activation not in PLAIN, H200)
    assert cut is not None
    compiler_report(source_of(cut, activation), tmp_path)


def tensors(tokens: int = 64, outputs: int = 4096, depth: int = 4096) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.zeros(tokens, depth, dtype=torch.bfloat16)
    return x, torch.zeros(1, dtype=torch.bfloat16).expand(outputs, depth).contiguous()


def test_a_kernel_that_cannot_be_had_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said = said_without_compiler(products, lambda: product(*tensors(), None, None), monkeypatch, caplog)
    assert said == ["CUDA kernel unavailable; falling back to Triton or cuBLAS: no compiler today"]


@pytest.mark.parametrize(("rows", "splits"), [(256, 2), (528, 1)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_launch_computes_the_product(
    monkeypatch: pytest.MonkeyPatch, activation: Activation | None, rows: int, splits: int
) -> None:
    """Programs that share the depth of a tile, and programs that do not; the last tile is not full."""
    launched: list[emulated.Product] = []

    def compiled(cut: Cut, wanted: Activation | None, _: int | None) -> emulated.Product:
        launched.append(emulated.Product(cut, wanted))
        return launched[-1]

    monkeypatch.setattr(products, "machine_of", lambda _: Machine(8, 232_448))
    monkeypatch.setattr(products, "map_of", emulated.TensorMap)
    monkeypatch.setattr(products, "_kernel", compiled)
    generator = torch.Generator().manual_seed(rows)
    x, weight, bias = (
        torch.randn(*shape, generator=generator).bfloat16() for shape in ((9, 1032), (rows, 1024), (rows,))
    )
    x = x[:, :1024]
    out = product(x, weight, bias, activation)
    assert out is not None and [kernel.cut.splits for kernel in launched] == [splits]
    exact = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
    expected = exact if activation is None else activate(exact, activation)
    assert relative_error(out, expected) < 5e-3


@pytest.mark.parametrize("what", ["dtype", "stride", "offset", "rows"])
def test_what_the_copy_engine_cannot_read(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr(products, "_kernel", lambda *_: pytest.fail("launched"))
    monkeypatch.setattr(products, "machine_of", lambda _: H200)
    x, weight = tensors()
    match what:
        case "dtype":
            x = x.half()
        case "stride":
            x = torch.zeros(64, 4100, dtype=torch.bfloat16)[:, :4096]
        case "offset":
            x = torch.zeros(64, 4104, dtype=torch.bfloat16)[:, 1:4097]
        case _:
            weight = weight.T
    assert product(x, weight, None, None) is None


def test_there_are_products_for_one_type_on_one_kind_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "machine_of", lambda index: H200 if index == 1 else None)
    assert takes_products(torch.bfloat16, torch.device("cuda", 1))
    assert not takes_products(torch.bfloat16, torch.device("cuda", 0))
    assert not takes_products(torch.float16, torch.device("cuda", 1))
    assert not takes_products(torch.bfloat16, torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert takes_products(torch.bfloat16, torch.device("cuda"))


def test_cuda_kernels_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    configure(KernelSettings(cuda=False))
    assert driver.machine_of(0) is None
    configure(KernelSettings())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert driver.machine_of(0) is None, "no Hopper"


def test_what_the_driver_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}

    def describe(place: Any, kind: int, rank: int, data: Any, *rest: Any) -> int:
        told["map"] = (
            place.value % 64,
            kind,
            rank,
            data.value,
            *(tuple(each) for each in rest[:4]),
            *rest[4:],
        )
        return 0

    def launch(how: Any, function: Any, arguments: Any, _: None) -> int:
        how = how._obj
        attributes = (driver._Attribute * how.count).from_address(how.attributes)
        told["launch"] = (tuple(how.grid), tuple(how.block), how.shared, how.stream)
        told["attributes"] = [(each.kind, each.value[0]) for each in attributes]
        told["numbers"] = [ctypes.c_int.from_address(each).value for each in arguments[1:]]
        told["first"] = arguments[0]
        return told.get("fails", 0)

    def explain(_: int, text: Any) -> None:
        text._obj.value = b"no room"

    monkeypatch.setattr(
        driver,
        "_driver",
        lambda: SimpleNamespace(
            cuModuleLoadData=lambda *_: 0,
            cuModuleGetFunction=lambda *_: 0,
            cuFuncSetAttribute=lambda *_: 0,
            cuTensorMapEncodeTiled=describe,
            cuLaunchKernelEx=launch,
            cuGetErrorString=explain,
        ),
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=77))
    pages = driver.Map(512, (64, 16, 2, 8, 99), (1024, 64, 128, 65536), (64, 16, 1, 1, 1))
    assert told["map"][:4] == (0, 9, 5, 512) and told["map"][8:] == (0, 3, 3, 0)
    assert told["map"][4:6] == ((64, 16, 2, 8, 99), (2048, 128, 256, 131072)), "strides are in bytes"
    assert told["map"][6:8] == ((64, 16, 1, 1, 1), (1,) * 5)
    matrix = driver.Map(4096, (128, 20), (256,), (64, 24))
    assert told["map"] == (0, 9, 2, 4096, (128, 20), (512,), (64, 24), (1, 1), 0, 3, 3, 0)
    assert matrix.address != pages.address
    for cluster, attributes in ((1, [(6, 1)]), (2, [(6, 1), (4, 2)])):
        kernel = driver.Kernel(b"image", "product", 160, 1 << 17, cluster)
        kernel.launch(128, (matrix,), ctypes.c_int(5), ctypes.c_int(6))
        assert told["launch"] == ((128, 1, 1), (160, 1, 1), 1 << 17, 77)
        assert told["attributes"] == attributes
        assert told["first"] == matrix.address
        assert told["numbers"] == [5, 6]
    told["fails"] = 701
    with pytest.raises(OSError, match=r"could not launch a kernel: no room \(701\)"):
        kernel.launch(128, (matrix,), ctypes.c_int(5))


def compiler(fails: bool, compiled: list[bytes]) -> SimpleNamespace:
    """NVRTC, as far as it is called; `compiled` gets the sources."""

    def create(_: object, source: bytes, *rest: object) -> None:
        compiled.append(source)

    def tell_size(_: object, size: Any) -> None:
        size._obj.value = 5

    def give(text: bytes) -> Callable[[object, Any], None]:
        return lambda _, buffer: setattr(buffer, "raw", text)

    return SimpleNamespace(
        nvrtcVersion=lambda *_: 0,
        nvrtcCreateProgram=create,
        nvrtcCompileProgram=lambda *_: int(fails),
        nvrtcDestroyProgram=lambda *_: 0,
        nvrtcGetCUBINSize=tell_size,
        nvrtcGetProgramLogSize=tell_size,
        nvrtcGetCUBIN=give(b"image"),
        nvrtcGetProgramLog=give(b"oops\0"),
    )


def test_a_kernel_is_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    configure(KernelSettings(cache=tmp_path))
    compiled: list[bytes] = []
    monkeypatch.setattr(driver, "_compiler", lambda: compiler(False, compiled))
    assert driver.compile_source("a") == driver.compile_source("a") == b"image"
    assert compiled == [b"a"]
    driver.compile_source("b")
    assert compiled == [b"a", b"b"]
    assert len(list((tmp_path / "kernels").iterdir())) == 2, "whole files and nothing else"


@pytest.mark.parametrize("left", [0, 3, 5, 36])
def test_a_kernel_that_was_half_written_is_compiled_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, left: int
) -> None:
    configure(KernelSettings(cache=tmp_path))
    compiled: list[bytes] = []
    monkeypatch.setattr(driver, "_compiler", lambda: compiler(False, compiled))
    driver.compile_source("a")
    (file,) = (tmp_path / "kernels").iterdir()
    file.write_bytes(file.read_bytes()[:left])
    assert driver.compile_source("a") == driver.compile_source("a") == b"image"
    assert compiled == [b"a", b"a"]


def test_a_cache_that_cannot_be_written_costs_only_the_next_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    configure(KernelSettings(cache=in_the_way))
    monkeypatch.setattr(driver, "_compiler", lambda: compiler(False, []))
    assert driver.compile_source("a") == b"image"


def test_a_source_that_does_not_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    configure(KernelSettings(cache=tmp_path))
    monkeypatch.setattr(driver, "_compiler", lambda: compiler(True, []))
    with pytest.raises(OSError, match="does not compile: oops"):
        driver.compile_source("a")


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "99.1")
    with pytest.raises(OSError, match=r"no CUDA compiler \(libnvrtc.so.99\)"):
        driver.compile_source("a")
