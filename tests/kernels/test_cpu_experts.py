"""Mixtures of experts by the C kernels, beside each token's own products in float64."""

import ctypes

import pytest
import torch
from torch import Tensor

from holdfast.kernels.cpu import library
from holdfast.kernels.cpu.experts import PackedExperts
from holdfast.kernels.cpu.packing import eight_bit, pack_matrix
from holdfast.kernels.torch.activation import Activation, Clamp, ExpertForm, activate
from holdfast.kernels.torch.experts import experts

if library.library() is None:
    pytest.skip("this machine has no C kernels", allow_module_level=True)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES = ((1, 1), (14, 9), (40, 33), (257, 80), (96, 300))
"""Hidden and inner sizes."""

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Mixture:
    """Random experts, packed and as tensors."""

    def __init__(
        self,
        count: int,
        hidden: int,
        inner: int,
        dtype: torch.dtype = torch.float32,
        form: ExpertForm | None = None,
    ) -> None:
        self.form = form or ExpertForm()
        wide = inner if self.form.activation == "relu_squared" else 2 * inner
        self.inner = (random(count, wide, hidden, seed=1) * hidden**-0.5).to(dtype)
        self.outer = (random(count, hidden, inner, seed=2) * inner**-0.5).to(dtype)
        sides = (tuple(pack_matrix([each]) for each in side) for side in (self.inner, self.outer))
        self.packed = PackedExperts(*sides, self.form)

    def expected(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        """In float64, by torch's experts."""
        biases = {
            name: None if bias is None else bias.double()
            for name, bias in (("bias13", self.form.bias13), ("bias2", self.form.bias2))
        }
        form = self.form._replace(**biases)
        return experts(x.double(), ids, shares, self.inner.double(), self.outer.double(), form)


def routed(tokens: int, count: int, picks: int, seed: int = 3) -> tuple[Tensor, Tensor]:
    """Different experts for each token, and shares."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(count, generator=generator)[:picks] for _ in range(tokens)])
    return ids, torch.rand(tokens, picks, generator=generator)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@every_dtype
@pytest.mark.parametrize("activation", ["swiglu", "geglu", "swiglu_clamped", "relu_squared"])
def test_products_are_those_of_the_widened_weights(
    kernels: ctypes.CDLL, dtype: torch.dtype, activation: Activation
) -> None:
    """In sizes that no vector divides, with biases, and with experts that get no token."""
    for hidden, inner in SIZES:
        wide = inner if activation == "relu_squared" else 2 * inner
        biases = {"bias13": random(6, wide, seed=4), "bias2": random(6, hidden, seed=5)}
        for form in (ExpertForm(activation), ExpertForm(activation, Clamp(1.2, 0.9), **biases)):
            mixture = Mixture(6, hidden, inner, dtype, form)
            for tokens in (1, 2, 5, 37):
                x, (ids, shares) = random(tokens, hidden, seed=tokens), routed(tokens, 5, 3)
                ids[ids == 2] = 5  # experts 2 gets no token, and the last one many
                found = mixture.packed(x, ids, shares)
                assert error(found, mixture.expected(x, ids, shares)) <= 2e-6, (hidden, inner, tokens)


@every_dtype
def test_a_token_does_not_depend_on_its_company(kernels: ctypes.CDLL, dtype: torch.dtype) -> None:
    """Nor on the order of its picks, nor on the number of threads."""
    mixture = Mixture(5, 150, 77, dtype, ExpertForm("swiglu_clamped"))
    x, (ids, shares) = random(61, 150, seed=6), routed(61, 5, 3)
    together = mixture.packed(x, ids, shares)
    for threads in (1, 2):
        kernels.hf_threads(threads)
        for first, end in ((0, 1), (60, 61), (3, 5), (7, 20), (0, 60)):
            span = slice(first, end)
            assert torch.equal(mixture.packed(x[span], ids[span], shares[span]), together[span])
        assert torch.equal(mixture.packed(x, ids.flip(1), shares.flip(1)), together)


def test_one_expert_may_have_all_tokens(kernels: ctypes.CDLL) -> None:
    mixture = Mixture(4, 48, 40)
    x, ids = random(130, 48, seed=7), torch.full((130, 1), 2)
    shares = random(130, 1, seed=8)
    assert error(mixture.packed(x, ids, shares), mixture.expected(x, ids, shares)) <= 2e-6


def test_an_expert_that_is_picked_twice_counts_twice(kernels: ctypes.CDLL) -> None:
    mixture = Mixture(3, 1100, 16)
    x, ids = random(9, 1100, seed=9), torch.tensor([[1, 1]] * 9)
    once = mixture.packed(x, ids[:, :1], torch.full((9, 1), 1.0))
    assert error(mixture.packed(x, ids, torch.full((9, 2), 0.5)), once.double()) <= 1e-6


def test_no_tokens_are_no_results(kernels: ctypes.CDLL) -> None:
    found = Mixture(3, 24, 16).packed(
        torch.zeros(0, 24), torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2)
    )
    assert found.shape == (0, 24)


def test_numbers_that_are_none_stay_with_their_token(kernels: ctypes.CDLL) -> None:
    for activation in ("swiglu", "geglu", "swiglu_clamped", "relu_squared"):
        mixture = Mixture(3, 24, 16, form=ExpertForm(activation))
        x, (ids, shares) = random(4, 24, seed=10), routed(4, 3, 2)
        usual = mixture.packed(x, ids, shares)
        x[1, 5] = torch.nan
        found = mixture.packed(x, ids, shares)
        assert found[1].isnan().all()
        assert torch.equal(found[[0, 2, 3]], usual[[0, 2, 3]])


def test_strides_and_types_of_activations(kernels: ctypes.CDLL) -> None:
    mixture = Mixture(3, 24, 16)
    wide, (ids, shares) = random(5, 60, seed=11), routed(5, 3, 2)
    expected = mixture.packed(wide[:, 7:31].contiguous(), ids, shares)
    assert torch.equal(mixture.packed(wide[:, 7:31], ids, shares), expected)
    assert torch.equal(mixture.packed(wide[:, 7:31].T.contiguous().T, ids.int(), shares.double()), expected)
    halves = mixture.packed(wide[:, 7:31].bfloat16(), ids, shares)
    assert halves.dtype is torch.bfloat16 and error(halves, expected.double()) < 0.02


@pytest.mark.parametrize("wrong", [-1, 3, 2**33])
def test_an_expert_out_of_range_is_an_error(kernels: ctypes.CDLL, wrong: int) -> None:
    mixture = Mixture(3, 24, 16)
    ids, shares = routed(5, 3, 2)
    ids[4, 1] = wrong
    with pytest.raises(IndexError, match="an expert is out of range: there are 3"):
        mixture.packed(random(5, 24), ids, shares)


def test_matrices_that_do_not_follow_each_other_are_refused() -> None:
    one, other = pack_matrix([random(32, 24)]), pack_matrix([random(24, 16)])
    PackedExperts([one], [other])
    for inner, outer in (([one], [one]), ([one, one], [other]), ([], [])):
        with pytest.raises((AssertionError, ValueError)):
            PackedExperts(inner, outer)
    with pytest.raises(AssertionError):
        PackedExperts([one], [other], ExpertForm(bias2=torch.zeros(1, 23)))


def test_experts_may_have_different_forms(kernels: ctypes.CDLL) -> None:
    """Each is multiplied as if it were alone, quantised or not."""
    weights = [random(64, 96, seed=12).half(), eight_bit(random(64, 96, seed=13)), random(64, 96, seed=14)]
    inner = [pack_matrix([weight]) for weight in weights]
    outer = [pack_matrix([random(96, 32, seed=seed).bfloat16()]) for seed in (15, 16, 17)]
    mixture, x = PackedExperts(inner, outer), random(30, 96, seed=18)
    ids, shares = torch.arange(30)[:, None] % 3, torch.ones(30, 1)
    found = mixture(x, ids, shares)
    for expert in range(3):
        own = outer[expert](activate(inner[expert](x[expert::3]), "swiglu"))
        assert error(found[expert::3], own.double()) <= 2e-6
