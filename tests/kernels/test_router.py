"""The choice of experts: both implementations against the definition in float64."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import pytest
import torch
from torch import Tensor

from holdfast.kernels import RouterForm, RouterKind
from tests.kernels import naive

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:triton"),
]

CLOSE = 2e-6


@pytest.fixture(params=["torch", "triton"])
def ops(request: pytest.FixtureRequest) -> ModuleType:
    if request.param == "triton":
        request.getfixturevalue("interpreter")
    return import_module(f"holdfast.kernels.{request.param}")


def given(tokens: int, experts: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(tokens, width, generator=generator)
    weight = torch.randn(experts, width, generator=generator) * width**-0.5
    return x, weight, torch.randn(experts, generator=generator)


def check(ops: ModuleType, x: Tensor, weight: Tensor, bias: Tensor | None, form: RouterForm) -> None:
    ids, shares = ops.route(x, weight, bias, form)
    expected_ids, expected = naive.route(x, weight, bias, form)
    assert ids.dtype == torch.int64 and shares.dtype == torch.float32
    assert ids.tolist() == expected_ids
    assert torch.allclose(shares.double(), expected, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize(
    ("kind", "normalise"),
    [
        ("softmax_then_top", False),
        ("softmax_then_top", True),
        ("top_then_softmax", False),
        ("sigmoid_in_groups", True),
        ("sigmoid_in_groups", False),
    ],
)
@pytest.mark.parametrize(("tokens", "experts", "picks"), [(1, 32, 4), (19, 20, 3), (70, 5, 5)])
def test_picks_and_shares(
    ops: ModuleType, kind: RouterKind, normalise: bool, tokens: int, experts: int, picks: int
) -> None:
    """One token; some blocks of tokens and parts of the depth; more tokens than the small kernel takes."""
    x, weight, bias = given(tokens, experts, 300)
    for offset in (None, bias):
        if kind != "softmax_then_top" or offset is None:
            check(ops, x, weight, offset, RouterForm(kind, picks, normalise, scale=2.5))


def test_groups(ops: ModuleType) -> None:
    x, weight, bias = given(9, 24, 40)
    check(ops, x, weight, bias, RouterForm("sigmoid_in_groups", 4, True, groups=6, groups_kept=2))


def test_inputs_in_sixteen_bits(ops: ModuleType) -> None:
    """Weights that were rounded to the type of the inputs give the products of the rounded numbers."""
    x, weight, _ = given(7, 16, 520)
    narrow, rounded = x.half(), weight.half()
    form = RouterForm("top_then_softmax", 4)
    ids, shares = ops.route(narrow, rounded, None, form)
    expected_ids, expected = naive.route(narrow, rounded, None, form)
    assert ids.tolist() == expected_ids
    assert torch.allclose(shares.double(), expected, rtol=1e-5, atol=1e-5)


def test_rows_apart(ops: ModuleType) -> None:
    """Inputs may be columns of a wider tensor."""
    x, weight, _ = given(5, 8, 64)
    wide = torch.full((5, 100), torch.nan)
    wide[:, 20:84] = x
    check(ops, wide[:, 20:84], weight, None, RouterForm("softmax_then_top", 2))


def test_no_tokens(ops: ModuleType) -> None:
    x, weight, _ = given(0, 8, 64)
    ids, shares = ops.route(x, weight, None, RouterForm("softmax_then_top", 2))
    assert ids.shape == shares.shape == (0, 2)


@pytest.mark.parametrize("experts", [8, 6])
@pytest.mark.parametrize("kind", ["softmax_then_top", "top_then_softmax", "sigmoid_in_groups"])
def test_logits_that_are_no_numbers_pick_experts_that_exist(
    ops: ModuleType, kind: RouterKind, experts: int
) -> None:
    """Different ones, whatever the sign of the NaN; the row beside them is not affected."""
    x, weight, _ = given(4, experts, 32)
    x[1] = torch.nan
    x[2] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)
    x[3] = torch.inf
    ids, shares = ops.route(x, weight, None, RouterForm(kind, experts))
    for row in range(4):
        assert sorted(ids[row].tolist()) == list(range(experts))
    assert shares[1].isnan().all() and shares[2].isnan().all() and shares[0].isfinite().all()


def test_equals_go_to_the_first(ops: ModuleType) -> None:
    """Of Triton alone: torch promises no order."""
    if not ops.__name__.endswith("triton"):
        pytest.skip("torch orders equal numbers as it likes")
    ids, _ = ops.route(torch.ones(2, 16), torch.zeros(8, 16), None, RouterForm("top_then_softmax", 3))
    assert ids.tolist() == [[0, 1, 2]] * 2
