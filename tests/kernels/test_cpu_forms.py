"""The C kernels on every quantised format of GGUF, beside the gguf package's dequantisation."""

import ctypes

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from holdfast.kernels.cpu import library
from holdfast.kernels.cpu.matrix import PackedMatrix
from holdfast.kernels.cpu.packing import pack, pack_matrix
from holdfast.kernels.cpu.structures import Form
from holdfast.kernels.quantised import Codes, QuantisedWeight
from holdfast.models.gguf_codes import read_codes
from tests.kernels.rounding import rounded
from tests.models.gguf_files import random_blocks

if library.library() is None:
    pytest.skip("this machine has no C kernels", allow_module_level=True)

PLAIN = (Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.MXFP4, Kind.IQ4_NL)
SUPER = (Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_XS)
FORMS = {kind: Form.E2M1 if kind is Kind.MXFP4 else Form[kind.name] for kind in (*PLAIN, *SUPER)}
ROWS = (1, 2, 3, 5, 8, 16, 64, 512)


def weight_of(kind: Kind, outputs: int, inputs: int, seed: int = 0) -> tuple[QuantisedWeight, torch.Tensor]:
    """A random weight, and its values by the gguf package."""
    raw = random_blocks(outputs, inputs, kind, seed)
    codes = read_codes(torch.from_numpy(raw), kind, outputs, inputs)
    assert codes is not None
    return codes, torch.from_numpy(gguf.dequantize(raw, kind))


def packed_as(kind: Kind, weight: QuantisedWeight) -> PackedMatrix:
    matrix = pack_matrix([weight])
    assert [part.form for part in matrix.parts] == [FORMS[kind]]
    return matrix


def whole_numbers(rows: int, inputs: int) -> torch.Tensor:
    """Activations that eight bits hold: whole numbers to 127, of which each group has one."""
    x = torch.randint(-127, 128, (rows, inputs), generator=torch.Generator().manual_seed(rows)).float()
    x[:, ::32] = 127.0
    x[0] = -127.0
    return x


@pytest.mark.parametrize("kind", FORMS, ids=lambda kind: kind.name)
def test_products_are_those_of_the_dequantised_weights(kernels: ctypes.CDLL, kind: Kind) -> None:
    """With activations that are not rounded only float32 sums differ, whatever the codes and scales."""
    codes, weight = weight_of(kind, 40, 512)
    matrix = packed_as(kind, codes)
    assert torch.equal(matrix.rows(torch.arange(40)), weight)
    for rows in ROWS:
        x = whole_numbers(rows, 512)
        largest = x.abs().double() @ weight.abs().double().T
        assert ((matrix(x) - x.double() @ weight.double().T).abs() <= 2e-6 * largest).all(), rows


@pytest.mark.parametrize("kind", FORMS, ids=lambda kind: kind.name)
def test_float_activations_are_rounded_to_eight_bits(kind: Kind) -> None:
    codes, weight = weight_of(kind, 40, 512)
    x = torch.randn(16, 512, generator=torch.Generator().manual_seed(1))
    found, near = packed_as(kind, codes)(x), rounded(x) @ weight.T
    assert (found - near).norm() / near.norm() < 1e-3  # a value exactly between two codes may go either way
    exact = x @ weight.T
    assert 1e-4 < (found - exact).norm() / exact.norm() < 0.02


@pytest.mark.parametrize("kind", SUPER, ids=lambda kind: kind.name)
def test_a_row_does_not_depend_on_its_company(kernels: ctypes.CDLL, kind: Kind) -> None:
    matrix = packed_as(kind, weight_of(kind, 80, 256)[0])
    x = torch.randn(19, 256, generator=torch.Generator().manual_seed(0))
    together = matrix(x)
    for threads in (1, 2):
        kernels.hf_threads(threads)
        assert all(torch.equal(matrix(x[row : row + 1])[0], together[row]) for row in range(19))
        assert torch.equal(matrix(x[3:14]), together[3:14])


@pytest.mark.parametrize("kind", SUPER, ids=lambda kind: kind.name)
def test_what_is_not_finite_stays_so(kernels: ctypes.CDLL, kind: Kind) -> None:
    matrix = packed_as(kind, weight_of(kind, 32, 256)[0])
    x = torch.ones(3, 256)
    x[1, 77] = torch.nan
    out = matrix(x)
    assert out[[0, 2]].isfinite().all()
    assert out[1].isnan().all()


@pytest.mark.parametrize("kind", FORMS, ids=lambda kind: kind.name)
def test_packed_weights_are_as_large_as_in_the_file(kind: Kind) -> None:
    """Scales of groups take a byte each, in Q3_K to IQ4_XS six bits in the file; those of MXFP4 two."""
    codes, _ = weight_of(kind, 64, 1024)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    stored = 64 * 1024 // block * size
    assert stored <= packed_as(kind, codes).bytes <= (1.06 if kind is Kind.MXFP4 else 1.04) * stored


def test_parts_keep_their_forms_in_one_matrix(kernels: ctypes.CDLL) -> None:
    """As query, key and value of files that store the value in more bits."""
    sizes = ((Kind.Q4_K, 48), (Kind.Q4_K, 16), (Kind.Q6_K, 32), (Kind.Q8_0, 10))
    found = [weight_of(kind, size, 256, seed) for seed, (kind, size) in enumerate(sizes)]
    bias = torch.randn(106, generator=torch.Generator().manual_seed(2))
    matrix = pack_matrix([codes for codes, _ in found], bias=bias)
    assert [(part.form, part.outputs) for part in matrix.parts] == [
        (Form.Q4_K, 64),
        (Form.Q6_K, 32),
        (Form.Q8_0, 10),
    ]
    weight = torch.cat([dense for _, dense in found])
    assert torch.equal(matrix.rows(torch.tensor([0, 63, 64, 95, 96, 105])), weight[[0, 63, 64, 95, 96, 105]])
    with pytest.raises(IndexError, match="the matrix has 106"):
        matrix.rows(torch.tensor([106]))
    for rows in (1, 5, 16):
        x = whole_numbers(rows, 256)
        expected = x.double() @ weight.double().T + bias
        assert (matrix(x) - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_an_order_is_that_of_the_outputs() -> None:
    order = torch.randperm(64, generator=torch.Generator().manual_seed(3))
    one, weight = weight_of(Kind.Q5_K, 64, 256)
    matrix = pack_matrix([one], order)
    assert matrix.parts[0].form is Form.Q5_K
    assert torch.equal(matrix.rows(torch.arange(64)), weight[order])


@pytest.mark.parametrize("case", ["outputs", "order"])
def test_forms_that_cannot_stand_together_become_eight_bits(case: str) -> None:
    """Where one ends within 16 outputs, or an order mixes them."""
    first, others = (40, 24) if case == "outputs" else (32, 32)
    order = torch.arange(63, -1, -1) if case == "order" else None
    one, two = weight_of(Kind.Q4_K, first, 256), weight_of(Kind.Q6_K, others, 256)
    matrix = pack_matrix([one[0], two[0]], order)
    assert [part.form for part in matrix.parts] == [Form.Q8_0]
    weight = torch.cat((one[1], two[1]))
    weight = weight if order is None else weight[order]
    step = weight.unflatten(1, (-1, 32)).abs().amax(-1).repeat_interleave(32, dim=1) / 127
    assert ((matrix.rows(torch.arange(64)) - weight).abs() <= 0.52 * step).all()


def test_scales_that_half_precision_lacks_are_not_packed() -> None:
    ones, groups = torch.ones(16, 256, dtype=torch.int8), torch.ones(16, 8)
    assert pack(QuantisedWeight(Codes.INT8, ones, groups, 32)) is not None
    assert pack(QuantisedWeight(Codes.INT8, ones, 1e6 * groups, 32)) is None


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_1, Kind.Q5_K, Kind.Q6_K], ids=lambda kind: kind.name)
def test_a_scale_that_is_not_finite_makes_its_output_so(kind: Kind) -> None:
    """Damaged files are packed as they are: other outputs keep their values."""
    codes, weight = weight_of(kind, 20, 256)
    scales = codes.scales if codes.super_scales is None else codes.super_scales
    scales[7, 0] = torch.nan
    x = whole_numbers(3, 256)
    found = packed_as(kind, codes)(x)
    assert found[:, 7].isnan().all()
    others = [output for output in range(20) if output != 7]
    expected = x @ weight.T
    assert (found[:, others] - expected[:, others]).abs().max() <= 1e-5 * expected.abs().max()
