"""The C kernels on weights that are not quantised, beside float64 products."""

import ctypes

import pytest
import torch

from holdfast.kernels.cpu import library
from holdfast.kernels.cpu.matrix import PackedMatrix
from holdfast.kernels.cpu.packing import eight_bit, pack_matrix
from holdfast.kernels.cpu.structures import Form

if library.library() is None:
    pytest.skip("this machine has no C kernels", allow_module_level=True)

FORMS = {torch.bfloat16: Form.BF16, torch.float16: Form.F16, torch.float32: Form.F32}
SHAPES = ((1, 1), (16, 256), (37, 255), (40, 513), (150, 1100))
ROWS = (1, 2, 3, 5, 7, 12, 25, 47, 99)

every_dtype = pytest.mark.parametrize("dtype", FORMS, ids=lambda dtype: str(dtype).removeprefix("torch."))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def packed(dtype: torch.dtype, outputs: int, inputs: int) -> tuple[PackedMatrix, torch.Tensor, torch.Tensor]:
    """A matrix, its weight and its bias."""
    weight, bias = random(outputs, inputs).to(dtype), random(outputs, seed=1)
    matrix = pack_matrix([weight], bias=bias)
    assert [part.form for part in matrix.parts] == [FORMS[dtype]]
    return matrix, weight, bias


@every_dtype
def test_products_are_those_of_the_widened_weights(kernels: ctypes.CDLL, dtype: torch.dtype) -> None:
    """Only the order of additions differs from float32: nothing is rounded to fewer bits."""
    for outputs, inputs in SHAPES:
        matrix, weight, bias = packed(dtype, outputs, inputs)
        wide = weight.double()
        assert torch.equal(matrix.rows(torch.arange(outputs), 0.5), weight.float() * 0.5)
        for rows in ROWS:
            x = random(rows, inputs, seed=rows)
            largest = x.abs().double() @ wide.abs().T + bias.abs()
            error = (matrix(x) - (x.double() @ wide.T + bias)).abs()
            assert (error <= 1e-6 * largest).all(), (outputs, inputs, rows)


@every_dtype
def test_a_row_does_not_depend_on_its_company(kernels: ctypes.CDLL, dtype: torch.dtype) -> None:
    """In no number of rows, tile or slice, nor on the number of threads."""
    matrix, _, _ = packed(dtype, 150, 700)
    x = random(131, 700, seed=2)
    together = matrix(x)
    for threads in (1, 2):
        kernels.hf_threads(threads)
        assert all(
            torch.equal(matrix(x[row : row + 1])[0], together[row]) for row in (0, 11, 12, 96, 107, 130)
        )
        for first, end in ((0, 2), (3, 6), (5, 12), (1, 14), (90, 131), (10, 110)):
            assert torch.equal(matrix(x[first:end]), together[first:end]), (first, end)


@every_dtype
def test_the_whole_range_of_a_type_is_kept(kernels: ctypes.CDLL, dtype: torch.dtype) -> None:
    """Largest, smallest and subnormal numbers, and those that are none; other outputs are untouched."""
    kinds = torch.finfo(dtype)
    least = torch.finfo(torch.float32).tiny if dtype is torch.float32 else kinds.smallest_normal / 2
    weight = torch.zeros(20, 34, dtype=dtype)
    special = torch.tensor([kinds.max, kinds.min, kinds.smallest_normal, least, -0.0, torch.inf, -torch.inf])
    weight[:7, 33] = special.to(dtype)
    weight[7, 5] = torch.nan
    x = torch.zeros(3, 34)
    x[1:, 33] = 1.0
    matrix = pack_matrix([weight])
    assert torch.equal(matrix.rows(torch.arange(20)).nan_to_num(1234.0), weight.float().nan_to_num(1234.0))
    out = matrix(x)
    assert torch.equal(out[1:, :7], weight[:7, 33].float().expand(2, 7))
    assert out[:, 7].isnan().all() and out[0, 5:7].isnan().all()
    assert (out[:, 8:] == 0).all()
    x[0, 3] = torch.nan
    assert matrix(x)[0].isnan().all() and torch.equal(matrix(x)[1:, :7], out[1:, :7])


def test_quantised_parts_stand_beside_others_in_one_matrix(kernels: ctypes.CDLL) -> None:
    """Each is multiplied as if it were alone, whatever it stands beside."""
    weights = [
        random(48, 320, seed=3).bfloat16(),
        eight_bit(random(32, 320, seed=4)),
        random(21, 320, seed=5).half(),
    ]
    matrix = pack_matrix(weights)
    assert [part.form for part in matrix.parts] == [Form.BF16, Form.Q8_0, Form.F16]
    for rows in (1, 9, 40, 100):
        x = random(rows, 320, seed=rows)
        assert torch.equal(matrix(x), torch.cat([pack_matrix([weight])(x) for weight in weights], dim=1))


@pytest.mark.parametrize("case", ["outputs", "order", "types"])
def test_weights_that_cannot_stand_together_keep_their_values(case: str) -> None:
    """Where one ends within 16 outputs or an order mixes them, a type is taken that has the values of all."""
    first = 24 if case == "outputs" else 32
    coarse = eight_bit(random(32, 96, seed=6))
    others = random(first, 96, seed=7).bfloat16()
    half = random(first, 96, seed=8).half()
    order = (
        torch.randperm(first + 32, generator=torch.Generator().manual_seed(9)) if case == "order" else None
    )
    if case == "types":
        matrix = pack_matrix([others[:20], half])
        expected = torch.cat((others[:20].float(), half.float()))
    else:
        matrix = pack_matrix([others, coarse], order)
        expected = torch.cat((others.float(), pack_matrix([coarse]).rows(torch.arange(32))))
        expected = expected if order is None else expected[order]
    assert [part.form for part in matrix.parts] == [Form.F32]
    assert torch.equal(matrix.rows(torch.arange(matrix.outputs)), expected)
    alone = pack_matrix([others, others[:1]], None)
    assert [part.form for part in alone.parts] == [Form.BF16] and alone.outputs == first + 1


def test_weights_of_sixteen_bits_take_sixteen_bits() -> None:
    assert pack_matrix([random(64, 300).half()]).bytes == 64 * 300 * 2
