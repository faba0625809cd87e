"""Recurrent states put to rest in eight bits and woken again, in torch and in Triton's interpreter."""

from importlib import import_module
from types import ModuleType

import pytest
import torch

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:triton"),
]


@pytest.fixture(params=["torch", "triton"])
def ops(request: pytest.FixtureRequest) -> ModuleType:
    if request.param == "triton":
        request.getfixturevalue("interpreter")
    return import_module(f"holdfast.kernels.{request.param}")


def storages(width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four running slots of two layers with three heads of 5 rows, and six places."""
    generator = torch.Generator().manual_seed(3)
    running = torch.randn(4, 2, 3, 5, width, generator=generator)
    running *= 10 ** torch.linspace(-6, 6, 5).view(5, 1)
    codes = torch.full((6, 2, 3, 5, width), 99, dtype=torch.int8)
    return running, codes, torch.full((6, 2, 3, 5), -1.0)


@pytest.mark.parametrize("width", [8, 20])
def test_there_and_back(ops: ModuleType, width: int) -> None:
    running, codes, scales = storages(width)
    before = running.clone()
    slots, places = torch.tensor([3, 0]), torch.tensor([1, 4])
    ops.rest_states(running, slots, codes, scales, places)
    assert torch.equal(running, before)
    for place in (0, 2, 3, 5):
        assert bool((codes[place] == 99).all()) and bool((scales[place] == -1).all())
    peak = before[slots].abs().amax(-1)
    assert torch.allclose(scales[places], peak / 127, rtol=1e-6)
    assert int(codes[places].abs().amax(-1).min()) == 127, "the largest of a row has the largest code"
    ops.wake_states(codes, scales, places, running, torch.tensor([1, 2]))
    assert torch.equal(running[[0, 3]], before[[0, 3]])
    error = (running[[1, 2]] - before[slots]).abs()
    assert bool((error <= peak.unsqueeze(-1) / 127 * 0.5001).all())


def test_both_give_the_same_bytes(interpreter: None) -> None:
    made = []
    for package in ("torch", "triton"):
        running, codes, scales = storages(20)
        running[2, 0, 1, 3] = 0.0
        running[0, 1, 2, 0] = 1e-45  # A scale of zero.
        running[1, 1, 1, 1, 2] = torch.inf
        places = torch.tensor([5, 0, 3])
        kernels = import_module(f"holdfast.kernels.{package}")
        kernels.rest_states(running, torch.tensor([0, 2, 1]), codes, scales, places)
        made.append((codes, scales))
    assert torch.equal(made[0][1].view(torch.int32), made[1][1].view(torch.int32))
    assert int((made[0][0] != made[1][0]).sum()) == 0


def test_a_row_with_nan_wakes_as_nan(ops: ModuleType) -> None:
    """A broken state is noticed by the turn that goes on from it."""
    running, codes, scales = storages(8)
    running[1, 1, 2, 4, 3] = torch.nan
    one = torch.tensor([1])
    ops.rest_states(running, one, codes, scales, one)
    running.zero_()
    ops.wake_states(codes, scales, one, running, one)
    assert bool(running[1, 1, 2, 4].isnan().any())
    assert int(running.isnan().any(-1).sum()) == 1


def test_nothing_to_do(ops: ModuleType) -> None:
    running, codes, scales = storages(8)
    none = torch.tensor([], dtype=torch.int64)
    ops.rest_states(running, none, codes, scales, none)
    ops.wake_states(codes, scales, none, running, none)
    assert bool((codes == 99).all())
