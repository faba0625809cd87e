"""Packed weights of 4 and 8 bits: what packing keeps, launches against emulated kernels, compilation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.kernels.cuda import codes, packing, wide
from holdfast.kernels.cuda.codes import Cut, source_of
from holdfast.kernels.cuda.packing import Form, PackedCodes, arranged, packable, unpack
from holdfast.kernels.cuda.wide import TILINGS, Tiling, WideCut, tiling_of
from holdfast.kernels.quantised import Codes, QuantisedWeight, stacked
from holdfast.kernels.torch.activation import Activation, activate
from holdfast.kernels.torch.quantised import dequantise
from tests.kernels.batches import relative_error
from tests.kernels.emulated import Kernel, memory
from tests.kernels.on_host import HostKernel, host_map, needs_host_compiler
from tests.kernels.sources import H200, compiler_report, needs_compiler, said_without_compiler
from tests.kernels.test_quantised import FORMS, weight_of

PACKED_FORMS = [form for form in FORMS if form != "int4-48"]
TOKENS = [1, 8, 9, 16, 17, 40, 64]


def dense_of(weight: QuantisedWeight) -> torch.Tensor:
    """The weight in float32, its columns in the order of the codes."""
    return dequantise(replace(weight, permutation=None), torch.float32)


# --- packing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("form", PACKED_FORMS)
def test_packing_keeps_every_number(form: str, gated: bool) -> None:
    weight = weight_of(form, 208)
    packed = arranged(weight, gated=gated)
    assert torch.equal(unpack(packed)[0], dense_of(weight))
    tall = 2 * -(-208 // 128) * packing.SIDE
    assert packed.words.nbytes == tall * weight.inputs * weight.kind.bits // 8, "no byte more but padding"
    assert packed.outputs == (104 if gated else 208) and packed.tiles == tall // packing.SIDE


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4", "int4-128-zeros", "fp8-128"])
def test_experts_are_packed_one_by_one(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "PACKED_AT_ONCE", 1)
    parts = [weight_of(form, 160, seed) for seed in range(3)]
    together = stacked(parts)
    assert together is not None
    found = unpack(arranged(together, gated=True))
    for index, part in enumerate(parts):
        assert torch.equal(found[index], dense_of(part))


@pytest.mark.parametrize(
    ("changed", "gated"),
    [
        ({"inputs": 352}, False),  # 64 columns are a block
        ({"form": "int4-48"}, False),  # groups cross blocks
        ({"outputs": 100}, False),  # eight outputs are stored at once
        ({"outputs": 104}, True),  # of each half
    ],
)
def test_weights_that_are_left_to_others(changed: dict[str, Any], gated: bool) -> None:
    fine = {"form": "int4-32", "outputs": 112}
    given = {**fine, **changed}
    assert packable(weight_of(**fine), gated=gated)
    assert not packable(weight_of(**given), gated=gated)
    assert codes.pack(weight_of(**fine)) is None, "no such device"


def test_without_a_compiler_the_codes_stay(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    codes._kernel.cache_clear()
    said = said_without_compiler(codes, lambda: codes.pack(weight_of("mxfp4", 64)), monkeypatch, caplog)
    codes._kernel.cache_clear()
    assert said == ["CUDA kernel unavailable; falling back to Triton: no compiler today"]


# --- launches -----------------------------------------------------------------------------------------------


def read_weight(
    cut: Cut | WideCut, values: Sequence[Any], outputs: int, depth: int, tiles: int, experts: int
) -> Any:
    """The weight [experts, rows, depth] that four pointers mean."""
    words, scales, zeros, factors = values
    gated = cut.activation not in (None, "relu_squared")
    kind = [Codes.INT4, Codes.E2M1, Codes.INT8, Codes.E4M3][cut.form.kind]
    dtype = [torch.bfloat16, torch.float16, torch.float32, torch.uint8][cut.form.scales]
    group = min(cut.form.group, depth)
    slabs, runs, parts = 4 * tiles, -(-depth // max(group, 64)), max(1, 64 // group)
    size = slabs * packing.SLAB * depth * kind.bits // 32
    shape = (experts, slabs, runs, 8, parts, 2)
    count = experts * slabs * runs * 16 * parts
    rows = 2 * outputs if gated else outputs
    assert (zeros is not None) == cut.form.zeros
    packed = PackedCodes(
        kind,
        memory(words, experts * size, torch.int32).view(experts, slabs, depth // 64, -1),
        memory(scales, count, dtype).view(shape),
        group,
        rows,
        depth,
        gated,
        experts,
        None if zeros is None else memory(zeros, count, torch.uint8).view(shape),
        None if factors is None else memory(factors, experts * rows, torch.float32).view(experts, rows),
    )
    return unpack(packed)


class Product(Kernel):
    """`codes_few.cu` or `codes_picks.cu`: rows that no program takes stay NaN."""

    def __init__(self, cut: Cut, experts: int = 1, blocks: int = 1) -> None:
        super().__init__()
        self.cut, self.experts, self.blocks = cut, experts, blocks

    def run(self, programs: int, maps: tuple[Any, ...], values: Sequence[Any]) -> None:
        assert not maps
        cut = self.cut
        x, *weight, bias, out, order, block_expert, shares = values[:10]
        tokens, outputs, depth, stride, divide, tiles, *more = values[10:]
        if cut.streams:
            assert programs == min(more[0], H200.processors * cut.shape.beside)
        dense = read_weight(cut, weight, outputs, depth, tiles, self.experts)
        gated = dense.shape[1] != outputs
        rows = (
            tokens
            if divide > 1 or not cut.experts
            else memory(order, self.blocks * cut.tokens, torch.int32).max() + 1
        )
        inputs = memory(x, (rows - 1) * stride + depth, torch.bfloat16).as_strided((rows, depth), (stride, 1))
        if not cut.experts:
            assert tokens <= cut.tokens <= 16
            of_program = 32 if gated or cut.tokens > 8 else 16
            of_program //= 2 if gated else 1
            assert programs == -(-outputs // of_program), "each takes its rows"
            write(inputs.float() @ dense[0].T, bias, out, cut.activation)
            return
        picks = memory(order, self.blocks * cut.tokens, torch.int32).view(self.blocks, cut.tokens)
        chosen = memory(block_expert, self.blocks, torch.int32)
        for block in range(self.blocks):
            expert = int(chosen[block])
            for pick in picks[block][picks[block] >= 0].tolist() if expert >= 0 else []:
                sums = inputs[pick // divide].float() @ dense[expert].T
                rows = dense.shape[1]
                if bias is not None:
                    sums += memory(bias, self.experts * rows, torch.bfloat16).view(-1, rows)[expert].float()
                if cut.shared:
                    share = memory(shares, pick + 1, torch.float32)[pick]
                    memory(out + 4 * pick * outputs, outputs, torch.float32).copy_(sums * share)
                else:
                    assert cut.activation is not None
                    done = activate(sums[None], cut.activation)[0]
                    memory(out + 2 * pick * outputs, outputs, torch.bfloat16).copy_(done.bfloat16())


class WideProduct(Kernel):
    """`codes_wide.cu`, which finds the weight by maps."""

    def __init__(self, cut: WideCut) -> None:
        super().__init__()
        self.cut = cut

    def run(self, programs: int, maps: tuple[Any, ...], values: Sequence[Any]) -> None:
        x, factors, bias, out, tokens, outputs, depth, stride = values
        words, scales, zeros = maps
        assert words.third == scales.third and words.thirds == self.cut.slabs <= scales.thirds
        found = (words.data, scales.data, zeros.data if self.cut.form.zeros else None, factors)
        dense = read_weight(self.cut, found, outputs, depth, words.third // 4, 1)[0]
        of_program = 16 * self.cut.slabs * outputs // dense.shape[0]
        assert programs == -(-outputs // of_program) * self.cut.cluster, "each takes its rows"
        size = (tokens - 1) * stride + depth
        inputs = memory(x, size, torch.bfloat16).as_strided((tokens, depth), (stride, 1))
        write(inputs.float() @ dense.T, bias, out, self.cut.activation)


def write(sums: torch.Tensor, bias: int | None, out: int, activation: Activation | None) -> None:
    if bias is not None:
        sums += memory(bias, sums.shape[1], torch.bfloat16).float()
    result = sums if activation is None else activate(sums, activation)
    memory(out, result.numel(), torch.bfloat16).copy_(result.bfloat16().flatten())


class Expansion(Kernel):
    """`expand`, some tiles of some experts."""

    def __init__(self, cut: Cut, experts: int = 1) -> None:
        super().__init__()
        self.cut, self.experts = cut, experts

    def run(self, programs: int, maps: tuple[Any, ...], values: Sequence[Any]) -> None:
        assert not maps
        *weight, out, first, count, experts, outputs, depth, tiles = values
        assert programs * (self.cut.threads // 32) >= experts * count * (depth // 64)
        dense = read_weight(self.cut, weight, outputs, depth, tiles, experts)
        of_tile = 64 * outputs // dense.shape[1]
        begin, end = first * of_tile, min((first + count) * of_tile, outputs)
        halves = dense.view(experts, -1, outputs, depth)[:, :, begin:end]
        memory(out, halves.numel(), torch.bfloat16).copy_(halves.bfloat16().flatten())


@pytest.fixture
def emulation(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Kernels that are emulated: how many experts a weight has, how many blocks of picks there are."""
    sizes = {"experts": 1, "blocks": 1}
    monkeypatch.setattr(codes, "machine_of", lambda _: H200)
    monkeypatch.setattr(codes, "index_of", lambda _: 0)

    monkeypatch.setattr(wide, "map_of", host_map)

    def kernel(cut: Cut | WideCut, name: str, index: int | None) -> Kernel:
        if name == "expand":
            assert isinstance(cut, Cut)
            return Expansion(cut, sizes["experts"])
        assert name == cut.name
        if isinstance(cut, WideCut):
            return WideProduct(cut)
        return Product(cut, sizes["experts"], sizes["blocks"])

    monkeypatch.setattr(codes, "_kernel", kernel)
    return sizes


@pytest.mark.usefixtures("emulation")
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(
    ("form", "gated"), [("mxfp4", True), ("nvfp4", False), ("int4-64-zeros-permuted", False)]
)
def test_a_product_is_that_of_the_weight(form: str, gated: bool, tokens: int) -> None:
    weight = weight_of(form, 208)
    packed = codes.pack(weight, gated=gated)
    assert packed is not None
    x = torch.randn(tokens, weight.inputs).bfloat16()
    bias = torch.randn(208).bfloat16()
    order = slice(None) if weight.permutation is None else weight.permutation
    sums = x[:, order].float() @ dense_of(weight).T + bias.float()
    found = codes.product(x, packed, bias, "swiglu" if gated else None)
    assert relative_error(found, activate(sums, "swiglu") if gated else sums) < 5e-3


@pytest.mark.usefixtures("emulation")
def test_inputs_that_the_kernel_cannot_read_are_copied() -> None:
    weight = weight_of("int8-row", 64)
    packed = codes.pack(weight)
    assert packed is not None
    x = torch.randn(weight.inputs, 5).bfloat16().T
    found = codes.product(x, packed, None)
    assert relative_error(found, x.float() @ dense_of(weight).T) < 5e-3
    assert codes.product(x[:0], packed, None).shape == (0, 64)


@pytest.mark.usefixtures("emulation")
@pytest.mark.parametrize("gated", [False, True])
def test_some_rows_of_a_weight_are_expanded(gated: bool) -> None:
    weight = weight_of("int4-32", 336)
    packed = codes.pack(weight, gated=gated)
    assert packed is not None
    dense, of_tile = dense_of(weight).bfloat16(), 32 if gated else 64
    for first, count in ((0, 2), (2, 2), (4, 2)):
        begin, end = first * of_tile, min((first + count) * of_tile, packed.outputs)
        wanted = dense.view(-1, packed.outputs, weight.inputs)[:, begin:end].flatten(0, 1)
        assert torch.equal(codes.expanded(packed, first, count), wanted)


@pytest.mark.parametrize("block", [8, 16, 32])
def test_the_products_of_experts(block: int, emulation: dict[str, int]) -> None:
    check_experts(block, 384, 128, emulation)


@pytest.mark.parametrize(("most", "name"), [(14, "stream"), (13, "narrow")])
def test_a_few_picks_in_all_stream(
    most: int, name: str, emulation: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, asked = codes._kernel, []
    monkeypatch.setattr(codes, "STREAM_PICKS", most)
    monkeypatch.setattr(codes, "_kernel", lambda cut, *rest: asked.append(rest[0]) or made(cut, *rest))
    check_experts(8, 384, 128, emulation)
    assert asked[2:4] == [name, name], "after those with which both weights were packed"


def check_experts(block: int, hidden: int, inner: int, emulation: dict[str, int] | None = None) -> None:
    """Both products of sorted picks; an emulation is told the sizes."""
    count, of_token, tokens = 3, 2, 7
    first = stacked([weight_of("mxfp4", 2 * inner, seed, inputs=hidden) for seed in range(count)])
    second = stacked([weight_of("nvfp4", hidden, seed, inputs=inner) for seed in range(count)])
    assert first is not None and second is not None
    p13, p2 = codes.pack(first, gated=True), codes.pack(second)
    assert p13 is not None and p2 is not None
    ids = torch.rand(tokens, count).argsort(-1)[:, :of_token]
    order, experts = [], []
    for expert in range(count):
        mine = (ids.flatten() == expert).nonzero().flatten().tolist()
        for begin in range(0, len(mine), block):
            part = mine[begin : begin + block]
            order += part + [-1] * (block - len(part))
            experts.append(expert)
    experts.append(-1)  # a block that nobody needs
    order += [-1] * block
    if emulation is not None:
        emulation |= {"experts": count, "blocks": len(experts)}
    x, shares = torch.randn(tokens, hidden).bfloat16(), torch.rand(tokens, of_token)
    bias13, bias2 = torch.randn(count, 2 * inner).bfloat16(), torch.randn(count, hidden).bfloat16()
    listed = (torch.tensor(each, dtype=torch.int32) for each in (order, experts))
    picks = codes.SortedPicks(*listed, shares, of_token)
    middle = torch.full((tokens * of_token, inner), torch.nan).bfloat16()
    parts = torch.full((tokens * of_token, hidden), torch.nan)
    codes.expert_product(x, p13, bias13, "swiglu_clamped", middle, picks)
    codes.expert_product(middle, p2, bias2, None, parts, picks._replace(divide=1))
    for pick, expert in enumerate(ids.flatten().tolist()):
        up = x[pick // of_token].float() @ dense_of(first.expert(expert)).T + bias13[expert].float()
        made = activate(up[None], "swiglu_clamped")[0].bfloat16()
        assert relative_error(middle[pick], made) < 6e-3
        wanted = middle[pick].float() @ dense_of(second.expert(expert)).T + bias2[expert].float()
        # More picks are multiplied by weights that are rounded to bfloat16 with their scales.
        limit = 1e-3 if block <= codes.NARROW else 4e-3
        assert relative_error(parts[pick], wanted * shares.flatten()[pick]) < limit
    assert torch.equal(codes.expanded_experts(p2, range(1, 3)), dense_of_all(second)[1:].bfloat16())


def dense_of_all(weight: QuantisedWeight) -> torch.Tensor:
    return torch.stack([dense_of(weight.expert(index)) for index in range(weight.codes.shape[0])])


# --- the sources --------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def compiled_for_host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where sources are compiled for the CPU, each once."""
    return tmp_path_factory.mktemp("compiled_for_host")


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch, compiled_for_host: Path) -> None:
    """Kernels whose own source runs on the CPU."""
    small = H200._replace(processors=1)  # so that programs take several tiles
    monkeypatch.setattr(codes, "machine_of", lambda _: small)
    monkeypatch.setattr(codes, "index_of", lambda _: 0)
    monkeypatch.setattr(wide, "map_of", host_map)

    def kernel(cut: Cut | WideCut, name: str, _: int | None) -> HostKernel:
        return HostKernel(source_of(cut), name, compiled_for_host, cut.cluster if name == cut.name else 1)

    monkeypatch.setattr(codes, "_kernel", kernel)


SEEN = [("mxfp4", True, 8), ("int4-128-zeros", False, 11)]
OTHERS = [(form, gated, tokens) for form in PACKED_FORMS for gated in (False, True) for tokens in (1, 11)]


@needs_host_compiler
@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize(
    ("form", "gated", "tokens"), [*SEEN, *(pytest.param(*each, marks=pytest.mark.soak) for each in OTHERS)]
)
def test_the_source_multiplies_few_tokens(form: str, gated: bool, tokens: int) -> None:
    weight = weight_of(form, 48, inputs=640)
    packed = codes.pack(weight, gated=gated)
    assert packed is not None
    x, bias = torch.randn(tokens, 640).bfloat16(), torch.randn(48).bfloat16()
    order = slice(None) if weight.permutation is None else weight.permutation
    sums = x[:, order].float() @ dense_of(weight).T + bias.float()
    found = codes.product(x, packed, bias, "swiglu" if gated else None)
    assert relative_error(found, activate(sums, "swiglu") if gated else sums) < 6e-3
    wanted = dense_of(weight).view(-1, packed.outputs, 640)[:, : 32 if gated else 48].flatten(0, 1)
    assert relative_error(codes.expanded(packed, 0, 1), wanted) < 3e-3


@needs_host_compiler
@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize(
    ("block", "hidden", "inner", "streamed"),
    [
        (
            8,
            640,
            192,
            32,
        ),  # programs take several tiles of two experts, and use each place of their ring again
        (8, 128, 64, 0),
        (32, 640, 64, 0),
        *(
            pytest.param(block, 640, 320, streamed, marks=pytest.mark.soak)
            for block, streamed in ((8, 32), (8, 0), (16, 0), (64, 0))
        ),
    ],
)
def test_the_source_multiplies_the_picks_of_experts(
    block: int, hidden: int, inner: int, streamed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codes, "STREAM_PICKS", streamed)
    check_experts(block, hidden, inner)


WIDE = [
    ("mxfp4", True, 17, 1088, Tiling(2, 1, 1)),  # the last block of columns is alone; the ring begins again
    ("int4-128-zeros", False, 40, 384, Tiling(3, 1, 2)),  # zero points of a program's slabs do not fill a box
]
OTHER_WIDE = [
    (form, gated, tokens, 640 if form == "fp8-128" else 384, tiling)
    for form in PACKED_FORMS
    for gated, tokens, tiling in (
        (True, 64, Tiling(3, 2, 2)),
        (False, 9, Tiling(2, 2, 1)),
        (False, 33, Tiling(4, 1, 2)),
    )
]


@needs_host_compiler
@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize(
    ("form", "gated", "tokens", "depth", "tiling"),
    [*WIDE, *(pytest.param(*each, marks=pytest.mark.soak) for each in OTHER_WIDE)],
)
def test_the_source_multiplies_more_tokens(
    form: str, gated: bool, tokens: int, depth: int, tiling: Tiling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wide, "tiling_of", lambda *_: tiling)
    monkeypatch.setattr(codes, "NARROW", 8)
    weight = weight_of(form, 208, inputs=depth)
    packed = codes.pack(weight, gated=gated)
    assert packed is not None
    x, bias = torch.randn(tokens, depth).bfloat16(), torch.randn(208).bfloat16()
    order = slice(None) if weight.permutation is None else weight.permutation
    sums = x[:, order].float() @ dense_of(weight).T + bias.float()
    found = codes.product(x, packed, bias, "swiglu" if gated else None)
    assert relative_error(found, activate(sums, "swiglu") if gated else sums) < 8e-3


@pytest.mark.parametrize("tokens", codes.COLUMNS)
def test_a_cut_fits_the_device(tokens: int) -> None:
    cuts = [Cut(Form(0, 0, False, 128), tokens, None, True)]
    if tokens <= codes.NARROW:
        cuts.append(cuts[0]._replace(experts=False))
    if tokens == codes.COLUMNS[0]:
        cuts.append(cuts[0]._replace(streams=True, activation="swiglu"))
        # Codes of 8 bits of two slabs, four scales of 4 bytes and zero points a brick, inputs of eight picks.
        assert cuts[-1].room >= 2 * (16_384 + 4_096 + 1_024 + 8 * 1_088), "places for two turns"
    for cut in cuts:
        assert cut.shared_bytes * cut.shape.beside <= H200.shared_memory
        assert cut.threads * cut.shape.beside <= 1024
    largest = Form(3, 2, True, 16)
    for tiling in TILINGS:
        for form in (Form(0, 0, False, 128), largest):
            of_wide = WideCut(form, tokens, None, tiling)
            assert of_wide.shared_bytes <= H200.shared_memory and of_wide.threads <= 512
            assert of_wide.ring >= 2 and 64 % of_wide.cluster == 0


@pytest.mark.parametrize(
    ("tiles", "depth"), [(96, 4096), (64, 4096), (384, 4096), (64, 12288), (2, 64), (4, 128)]
)
def test_a_tiling_covers_a_weight_in_one_wave(tiles: int, depth: int) -> None:
    tiling = tiling_of(tiles, depth, H200.processors)
    programs = -(-tiles // (tiling.groups * tiling.stacked)) * tiling.splits
    assert programs <= H200.processors
    assert tiling.splits <= -(-depth // 128), "each part of the depth has columns"


def test_few_tokens_of_a_large_weight_take_the_wide_kernel() -> None:
    def kernels_of(rows: int) -> list[str]:
        empty = torch.empty(1, rows // 16, 64, 1)
        weight = PackedCodes(Codes.INT4, empty, torch.empty(1, dtype=torch.bfloat16), 128, rows, 4096, False)
        return [codes.cut_of(weight, tokens, None, H200.processors).name for tokens in (1, 8, 9, 16, 17, 64)]

    assert kernels_of(4096) == ["narrow"] * 4 + ["wide"] * 2
    assert kernels_of(8192) == ["narrow"] * 2 + ["wide"] * 4


INT4, MXFP4 = Form(0, 0, False, 128), Form(1, 3, False, 32)


@needs_compiler
@pytest.mark.parametrize(
    "cut",
    [
        Cut(INT4, 8, "swiglu"),
        Cut(MXFP4, 16, "swiglu_clamped", experts=True),
        Cut(MXFP4, 32, "swiglu_clamped", experts=True),
        Cut(MXFP4, 8, "swiglu_clamped", experts=True, streams=True),
        WideCut(INT4, 64, "swiglu", Tiling(3, 2, 2)),
        pytest.param(Cut(MXFP4, 8, None, experts=True, shared=True), marks=pytest.mark.soak),
        pytest.param(Cut(Form(3, 2, True, 16), 8, None, True, True, True), marks=pytest.mark.soak),
        pytest.param(Cut(Form(0, 1, True, 128), 8, None), marks=pytest.mark.soak),
        pytest.param(Cut(Form(2, 0, False, packing.WHOLE_ROW), 8, None), marks=pytest.mark.soak),
        pytest.param(Cut(Form(3, 2, False, 128), 16, "swiglu"), marks=pytest.mark.soak),
        pytest.param(WideCut(Form(0, 1, True, 128), 16, None, Tiling(4, 1, 4)), marks=pytest.mark.soak),
        pytest.param(WideCut(Form(3, 2, False, 128), 32, None, Tiling(2, 1, 8)), marks=pytest.mark.soak),
    ],
)
def test_the_sources_compile(cut: Cut | WideCut, tmp_path: Path) -> None:
    said = compiler_report(source_of(cut), tmp_path)
    assert "expand" in said and "serialized" not in said
