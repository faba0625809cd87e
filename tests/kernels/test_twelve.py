"""Packed 12-bit weights: the error of packing, tiling, launches against an emulated kernel, compilation."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from holdfast.kernels.cuda import products, twelve
from holdfast.kernels.cuda.driver import Machine
from holdfast.kernels.cuda.twelve import Tiling, cut_of, pack, product, source_of, tiling_of, unpack
from holdfast.kernels.torch.activation import Activation, activate
from tests.kernels import emulated
from tests.kernels.batches import relative_error
from tests.kernels.sources import H200, compiler_report, needs_compiler, said_without_compiler

SHAPES = [
    (24576, 4096, True),
    (28672, 4096, True),
    (18560, 4096, False),
    (21504, 4096, False),
]


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    twelve._kernel.cache_clear()
    yield
    twelve._kernel.cache_clear()


def weight_of(rows: int, depth: int) -> torch.Tensor:
    return (torch.randn(rows, depth, generator=torch.Generator().manual_seed(rows)) * 0.02).bfloat16()


@pytest.mark.parametrize(
    ("rows", "depth", "gated", "tiling"),
    [
        (96, 1024, False, Tiling(4)),
        (200, 1088, False, Tiling(3)),
        (160, 1024, True, Tiling(6)),
        (208, 1024, True, Tiling(4)),
    ],
)
def test_nearly_all_weights_are_kept_as_they_are(rows: int, depth: int, gated: bool, tiling: Tiling) -> None:
    weight = weight_of(rows, depth)
    packed = pack(weight, gated, tiling)
    assert packed is not None
    tiles, blocks, slabs = packed.words.shape[:3]
    assert (tiles, blocks, slabs) == (tiling.tiles(rows), depth // 64, tiling.slabs)
    assert packed.words.nbytes == tiles * slabs * 16 * depth * 3 // 2
    seen, wanted = unpack(packed), weight.float()
    power = torch.exp2(wanted.abs().amax(dim=1).log2().floor())[:, None]
    small = wanted.abs() < power * 2.0**-15
    assert 0 < small.float().mean() < 3e-4
    assert torch.equal(seen[~small], wanted[~small])
    # What is too small is the smallest there is, and keeps its sign.
    assert torch.equal(seen.abs()[small], (power * 2.0**-15).expand_as(seen)[small])
    assert not (seen * wanted < 0).any()


@pytest.mark.parametrize("gated", [False, True])
def test_a_lane_finds_what_the_matrix_instruction_wants_of_it(gated: bool) -> None:
    """As its description has it: pairs of columns of two rows eight apart, then eight columns on."""
    weight, slabs = weight_of(96, 1024), 3
    packed = pack(weight, gated, Tiling(slabs))
    assert packed is not None
    words = [word & 0xFFFFFFFF for word in packed.words.flatten().tolist()]
    for tile, block, slab, step, lane in [
        (0, 0, 0, 0, 0),
        (0, 3, 1, 2, 13),
        (1, 15, 2, 3, 31),
        (1, 7, 0, 1, 6),
    ]:
        begin = (((tile * 16 + block) * slabs + slab) * 4 + step) * 96
        lows, highs = words[begin + 2 * lane : begin + 2 * lane + 2], words[begin + 64 + lane]
        for pair in range(4):
            turned = (highs << 4 * pair | highs >> (32 - 4 * pair)) & 0x87008700
            for neighbour in range(2):
                byte = lows[pair // 2] >> 16 * (pair % 2) + 8 * neighbour & 0xFF
                bits = turned >> 16 * neighbour & 0xFFFF | 0x3800 | byte
                within, column = lane // 4 + 8 * (pair % 2), 2 * (lane % 4) + neighbour + 8 * (pair // 2)
                row = (tile * slabs + slab) * 16 + within
                if gated:
                    row = (tile * slabs + slab) * 8 + within % 8 + 48 * (within // 8)
                seen = torch.tensor([bits - (bits >> 15 << 16)], dtype=torch.int16).view(torch.bfloat16)
                wanted = weight[row, block * 64 + step * 16 + column]
                assert seen.float().item() * packed.scale[row] == pytest.approx(wanted.item(), abs=1e-5)


def test_rows_of_any_size_and_rows_of_nothing() -> None:
    weight = weight_of(64, 1024)
    weight *= torch.exp2(torch.arange(64) * 3 - 90.0)[:, None].bfloat16()
    weight[7] = 0
    packed = pack(weight, False, Tiling(4))
    assert packed is not None
    seen, wanted = unpack(packed), weight.float()
    assert torch.equal(seen[7], wanted[7])
    error = (seen - wanted).norm(dim=1) / wanted.norm(dim=1).clamp(min=1e-38)
    assert error.max() < 2.0**-17


def test_zeros_together_stay_none() -> None:
    weight = weight_of(64, 1024)
    weight[3, 100:200] = 0
    weight[4, 512:] = -0.0
    packed = pack(weight, False, Tiling(4))
    assert packed is not None
    seen = unpack(packed)
    assert seen[3, 100:200].sum() == 0 and seen[4, 512:].sum() == 0
    assert (seen - weight.float()).norm(dim=1).max() < 2.0**-13 * weight.float().norm(dim=1).min()


@pytest.mark.parametrize("harm", ["zeros", "outlier"])
def test_a_weight_that_would_be_changed_stays_as_it_is(harm: str) -> None:
    weight = weight_of(64, 1024)
    if harm == "zeros":
        weight[3, 64:] = 0
    else:
        weight[3, 5] = 1e4
    assert pack(weight, False, Tiling(4)) is None


@pytest.mark.parametrize(("rows", "depth", "gated"), SHAPES)
@pytest.mark.parametrize("tokens", [1, 8, 9, 33, 64])
def test_a_cut_covers_every_row_in_one_wave(rows: int, depth: int, gated: bool, tokens: int) -> None:
    tiling = tiling_of(rows, depth, gated, H200)
    assert tiling is not None
    assert 110 <= tiling.tiles(rows) <= H200.processors
    cut = cut_of(tokens, tiling, H200)
    assert cut is not None
    assert cut.columns >= tokens and cut.shared <= H200.shared_memory
    assert cut.columns * (16 * cut.slabs + 4) * 4 <= cut.stages * cut.stage_bytes, (
        "sums fit where the ring was"
    )


@pytest.mark.parametrize(
    ("rows", "depth", "gated"),
    [
        (24576, 4100, False),
        (24580, 4096, False),
        (24584, 4096, True),
        (24576, 960, False),
        (14_784, 4096, False),
    ],
)
def test_weights_that_are_left_to_others(rows: int, depth: int, gated: bool) -> None:
    assert tiling_of(rows, depth, gated, H200) is None


def test_a_tall_weight_is_taken_in_turns() -> None:
    tiling = tiling_of(151_936, 4096, False, H200)
    assert tiling == Tiling(12, looped=True) and tiling.tiles(151_936) == 6 * 132
    for tokens in (1, 64, 96):
        cut = cut_of(tokens, tiling, H200)
        assert cut is not None and cut.looped and cut.shared <= H200.shared_memory
    assert cut_of(96, tiling, Machine(132, 128 << 10)) is None, "no room for its sums beside the ring"
    assert tiling_of(33_792, 4096, False, H200) == Tiling(16)
    assert tiling_of(33_800, 4096, False, H200) == Tiling(9, looped=True)


def test_many_tokens_are_left_to_others() -> None:
    assert cut_of(96, Tiling(12), H200) is not None
    assert cut_of(97, Tiling(12), H200) is None
    assert cut_of(64, Tiling(13), H200) is not None
    assert cut_of(65, Tiling(13), H200) is None, "four groups have not the registers"
    assert cut_of(0, Tiling(12), H200) is None


@needs_compiler
@pytest.mark.parametrize(
    ("tokens", "tiling", "activation"),
    [
        (64, Tiling(12), "swiglu"),
        (64, Tiling(12, looped=True), None),
        *(
            pytest.param(*rare, marks=pytest.mark.soak)
            for rare in (
                (1, Tiling(8), None),
                (96, Tiling(8), "relu_squared"),
                (96, Tiling(12), "geglu"),
                (64, Tiling(14), "swiglu"),
                (64, Tiling(16), "swiglu_clamped"),
                (96, Tiling(9, looped=True), "swiglu"),
            )
        ),
    ],
)
def test_a_kernel_compiles_and_keeps_its_sums_in_registers(
    tmp_path: Path, tokens: int, tiling: Tiling, activation: Activation | None
) -> None:
    cut = cut_of(tokens, tiling, H200)
    assert cut is not None
    compiler_report(source_of(cut, activation), tmp_path)


def test_kernels_for_all_numbers_of_tokens_are_compiled_in_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    everyone = threading.Barrier(len(twelve.COLUMNS))

    def compile_source(_: str) -> bytes:
        everyone.wait(timeout=60)  # fails unless all compilations run at once
        return b"image"

    monkeypatch.setattr(twelve, "compile_source", compile_source)
    assert twelve._images(Tiling(12), "swiglu", H200) == dict.fromkeys(twelve.COLUMNS, b"image")
    twelve._images.cache_clear()


def test_what_a_weight_takes_is_known_before_it_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weight_of(1048, 1024)
    assert twelve.packed_size(weight, False) == 0, "there is no kernel on this device"
    assert twelve.pack_weight(weight, False) is None
    monkeypatch.setattr(twelve, "machine_of", lambda _: Machine(8, 232_448))
    packed = twelve.pack_weight(weight, False)
    assert packed is not None and packed.tiling == Tiling(9)
    assert twelve.packed_size(weight, False) == packed.nbytes
    assert twelve.packed_size(weight.float(), False) == 0
    assert twelve.pack_weight(weight.float(), False) is None


@pytest.mark.parametrize(
    ("activation", "tiling"),
    [("swiglu", Tiling(6)), ("relu_squared", Tiling(3)), (None, Tiling(2, looped=True))],
)
def test_a_launch_computes_the_product(
    monkeypatch: pytest.MonkeyPatch, activation: Activation | None, tiling: Tiling
) -> None:
    monkeypatch.setattr(twelve, "machine_of", lambda _: Machine(4, 232_448))
    monkeypatch.setattr(products, "map_of", emulated.TensorMap)
    monkeypatch.setattr(twelve, "_kernel", lambda cut, wanted, _: emulated.TwelveBitProduct(cut, wanted))
    gated = activation not in products.PLAIN
    packed = pack(weight_of(160, 1024), gated, tiling)
    assert packed is not None
    x = torch.randn(5, 1024, generator=torch.Generator().manual_seed(1)).bfloat16()
    bias = torch.randn(160, generator=torch.Generator().manual_seed(2)).bfloat16()
    out = product(x, packed, bias, activation)
    exact = torch.nn.functional.linear(x.float(), weight_of(160, 1024).float(), bias.float())
    assert out is not None
    assert relative_error(out, exact if activation is None else activate(exact, activation)) < 5e-3
    other = None if gated else "swiglu"
    assert product(x, packed, None, other) is None, "packed for another layout of the rows"
    assert product(torch.zeros(200, 1024, dtype=torch.bfloat16), packed, None, activation) is None


def test_a_kernel_that_cannot_be_had_leaves_the_dense_weight(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    packed = pack(weight_of(160, 1024), True, Tiling(6))
    assert packed is not None
    x = torch.zeros(5, 1024, dtype=torch.bfloat16)
    said = said_without_compiler(twelve, lambda: product(x, packed, None, "swiglu"), monkeypatch, caplog)
    assert said == ["CUDA kernel unavailable; falling back to the dense weight: no compiler today"]
