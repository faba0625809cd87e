"""Products with quantised weights equal those with the same weights in float64, by every implementation."""

from dataclasses import replace
from importlib import import_module
from types import ModuleType

import pytest
import torch

from holdfast.kernels.cpu.experts import PackedExperts
from holdfast.kernels.cpu.matrix import available
from holdfast.kernels.quantised import Codes, QuantisedWeight, joined, stacked
from holdfast.kernels.torch.activation import ExpertForm, activate
from holdfast.kernels.torch.quantised import E2M1
from holdfast.models.quantised.products import packed
from tests.kernels.interpreter import INTERPRETED

CLOSE = 2e-5

FORMS: dict[str, tuple[Codes, int | None, str]] = {
    "int4-32": (Codes.INT4, 32, "float16"),
    "int4-128-zeros": (Codes.INT4, 128, "float16 zeros"),
    "int4-64-zeros-permuted": (Codes.INT4, 64, "bfloat16 zeros permuted"),
    "int4-row": (Codes.INT4, None, "float32"),
    "int4-48": (Codes.INT4, 48, "float32 zeros"),
    "int8-row": (Codes.INT8, None, "bfloat16"),
    "int8-32": (Codes.INT8, 32, "float32 permuted"),
    "mxfp4": (Codes.E2M1, 32, "exponents"),
    "nvfp4": (Codes.E2M1, 16, "bfloat16 factors"),
    "fp8-128": (Codes.E4M3, 128, "float32"),
    "fp8-row": (Codes.E4M3, None, "float32"),
}
INPUTS = {"int4-48": 192}
"""Of a form: 384 unless the group asks for another."""


def weight_of(form: str, outputs: int, seed: int = 1, inputs: int | None = None) -> QuantisedWeight:
    kind, group, notes = FORMS[form]
    inputs = inputs or INPUTS.get(form, 384)
    group = group or inputs
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (outputs, inputs * kind.bits // 8), generator=generator, dtype=torch.uint8)
    if kind is Codes.E4M3:
        codes &= 0xF7
    if kind is Codes.INT8:
        codes = codes.view(torch.int8)
    places = (outputs, inputs // group)
    if "exponents" in notes:
        scales = torch.randint(118, 128, places, generator=generator, dtype=torch.uint8)
    else:
        scales = (torch.rand(places, generator=generator) + 0.5).to(getattr(torch, notes.split()[0]))
    return QuantisedWeight(
        kind,
        codes,
        scales,
        group,
        torch.randint(0, 17, places, generator=generator, dtype=torch.uint8) if "zeros" in notes else None,
        torch.rand(outputs, generator=generator) + 0.5 if "factors" in notes else None,
        torch.randperm(inputs, generator=generator).to(torch.int32) if "permuted" in notes else None,
    )


def meant(weight: QuantisedWeight) -> torch.Tensor:
    """The weight in float64, one element at a time by the words of its description."""
    eight_bits = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().tolist()
    codes, scales = weight.codes.tolist(), weight.scales.double().tolist()
    zeros = None if weight.zeros is None else weight.zeros.tolist()
    factors = [1.0] * weight.outputs if weight.factors is None else weight.factors.tolist()
    order = list(range(weight.inputs)) if weight.permutation is None else weight.permutation.tolist()
    rows = []
    for output in range(weight.outputs):
        row = [0.0] * weight.inputs
        for place in range(weight.inputs):
            group = place // weight.group
            scale = scales[output][group]
            if weight.scales.dtype == torch.uint8:
                scale = 2.0 ** (scale - 127)
            if weight.kind.bits == 4:
                code = codes[output][place // 2] >> (4 * (place % 2)) & 15
                number = E2M1[code] if weight.kind is Codes.E2M1 else float(code)
            else:
                code = codes[output][place]
                number = float(code) if weight.kind is Codes.INT8 else eight_bits[code]
            if weight.kind is Codes.INT4:
                number -= 8.0 if zeros is None else zeros[output][group]
            row[order[place]] = number * scale * factors[output]
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


def implementations() -> list[str]:
    return ["torch", "triton"] if INTERPRETED else ["torch"]


@pytest.fixture(params=implementations())
def ops(request: pytest.FixtureRequest) -> ModuleType:
    return import_module(f"holdfast.kernels.{request.param}")


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("form", FORMS)
def test_a_product_is_that_of_the_weight(ops: ModuleType, form: str) -> None:
    """A few tokens, with outputs that fill no tile; then many, whose weight is dequantised."""
    weight = weight_of(form, 37)
    expected = meant(weight)
    generator = torch.Generator().manual_seed(2)
    bias = torch.randn(37, generator=generator)
    for tokens in (5, 70):
        x = torch.randn(tokens, weight.inputs, generator=generator)
        found = ops.linear_quantised(x, weight, bias)
        assert error(found, x.double() @ expected.T + bias.double()) < CLOSE


def test_nothing_and_pieces(ops: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weight_of("int4-32", 37)
    assert ops.linear_quantised(torch.zeros(0, 384), weight, None).shape == (0, 37)
    whole = ops.linear_quantised(torch.ones(70, 384), weight, None)
    monkeypatch.setattr(import_module(f"{ops.__name__}.quantised"), "PIECE", 384 * 10)
    assert torch.equal(ops.linear_quantised(torch.ones(70, 384), weight, None), whole)


@pytest.mark.parametrize(
    "form",
    [
        "mxfp4",
        "int4-64-zeros-permuted",
        *(pytest.param(form, marks=pytest.mark.soak) for form in ("nvfp4", "int8-row", "fp8-128")),
    ],
)
def test_experts(ops: ModuleType, form: str) -> None:
    """Two of five experts for each token, clamped and gated as in gpt-oss, with biases."""
    hidden, inner, count, tokens = 128, 128, 3, 5
    up = [weight_of(form, 2 * inner, seed, hidden) for seed in range(count)]
    down = [weight_of(form, hidden, 10 + seed, inner) for seed in range(count)]
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(tokens, hidden, generator=generator) * 0.01
    ids = torch.stack([torch.randperm(count, generator=generator)[:2] for _ in range(tokens)])
    shares = torch.rand(tokens, 2, generator=generator)
    biases = (
        torch.randn(count, 2 * inner, generator=generator),
        torch.randn(count, hidden, generator=generator),
    )
    stacks = stacked(up), stacked(down)
    assert stacks[0] is not None and stacks[1] is not None
    form_of_experts = ExpertForm("swiglu_clamped", bias13=biases[0], bias2=biases[1])
    found = ops.experts_quantised(x, ids, shares, *stacks, form_of_experts)
    dense = {index: (meant(up[index]), meant(down[index])) for index in ids.unique().tolist()}
    expected = torch.zeros(tokens, hidden, dtype=torch.float64)
    for token in range(tokens):
        for expert, share in zip(ids[token].tolist(), shares[token].double(), strict=True):
            first = dense[expert][0] @ x[token].double() + biases[0][expert].double()
            middle = activate(first[None].float(), "swiglu_clamped")[0].double()
            expected[token] += share * (dense[expert][1] @ middle + biases[1][expert].double())
    assert error(found, expected) < CLOSE


@pytest.mark.skipif(not available(), reason="no C kernels on this machine")
@pytest.mark.parametrize("form", ["int4-32", "int4-128-zeros", "int8-row", "mxfp4", "nvfp4"])
def test_c_kernels_multiply_rounded_activations(form: str) -> None:
    """Activations that 8 bits hold lose nothing; what differs is scales in half precision."""
    weight = weight_of(form, 37)
    matrix = packed(weight, None)
    assert matrix is not None
    x = torch.randint(-127, 128, (9, weight.inputs), generator=torch.Generator().manual_seed(5)).float()
    x[:, ::32] = 127.0
    assert error(matrix(x), x.double() @ meant(weight).T) < (1e-2 if form == "nvfp4" else 5e-4)


@pytest.mark.skipif(not available(), reason="no C kernels on this machine")
def test_experts_by_c_kernels() -> None:
    up, down = (
        [weight_of("mxfp4", 64, seed, 64 if seed < 5 else 32) for seed in seeds] for seeds in ((1, 2), (5, 6))
    )
    matrices = [
        tuple(found for each in side if (found := packed(each, None)) is not None) for side in (up, down)
    ]
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(6, 64, generator=generator)
    ids = torch.tensor([[0, 1], [1, 0], [1, 0], [0, 1], [0, 1], [1, 0]])
    shares = torch.rand(6, 2, generator=generator)
    bias = torch.randn(2, 64, generator=generator)
    found = PackedExperts(*matrices, ExpertForm(bias13=bias, bias2=bias))(x, ids, shares)
    stacks = stacked(up), stacked(down)
    assert stacks[0] is not None and stacks[1] is not None
    torch_ops = import_module("holdfast.kernels.torch")
    expected = torch_ops.experts_quantised(x, ids, shares, *stacks, ExpertForm(bias13=bias, bias2=bias))
    assert error(found, expected.double()) < 0.02


def test_joined_and_chosen_rows() -> None:
    """Weights are joined where their forms are equal, also if one has no zero points of its own."""
    plain, zeros = weight_of("int4-32", 8), weight_of("int4-32", 8, 2)
    zeros = QuantisedWeight(
        zeros.kind, zeros.codes, zeros.scales, 32, torch.full((8, 12), 5, dtype=torch.uint8)
    )
    whole = joined([plain, zeros])
    assert whole is not None
    assert torch.equal(meant(whole), torch.cat((meant(plain), meant(zeros))))
    order = torch.tensor([9, 0, 4])
    assert torch.equal(meant(whole.rows(order)), meant(whole)[order])
    assert joined([plain, weight_of("int8-32", 8)]) is None
    permuted = [weight_of("int4-64-zeros-permuted", 8, seed) for seed in (1, 2)]
    assert joined(permuted) is None and joined([permuted[0], permuted[0]]) is not None
    ordered = replace(permuted[1], permutation=None)
    assert joined([ordered, permuted[0]]) is None is joined([permuted[0], ordered])
    assert stacked([ordered, permuted[0]]) is None is stacked([permuted[0], ordered])
    assert torch.equal(meant(permuted[0].rows(torch.tensor([3, 3]))), meant(permuted[0])[[3, 3]])
    assert stacked([plain, weight_of("int4-32", 16)]) is None
    assert whole.bytes < 16 * 384 * 0.7
