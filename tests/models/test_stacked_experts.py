"""Experts of which one tensor has the weights of all, and their routers, as the C kernels multiply them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from holdfast.kernels.cpu.matrix import PackedMatrix, available
from holdfast.kernels.cpu.structures import Form
from holdfast.models.checkpoint import choose_placement, load_model, open_checkpoint
from holdfast.models.experts import Experts, GatedPart, Stack
from holdfast.models.fields import ConfigurationError
from holdfast.models.linear import PackedLinear
from holdfast.models.model import Model
from holdfast.models.weights import Placement
from tests.models import test_gguf_hybrids as hybrids
from tests.models.paged import PagedRunner, Sequence
from tests.models.reference import VARIANTS, VOCABULARY

pytestmark = pytest.mark.skipif(not available(), reason="this machine has no C kernels")

CPU = torch.device("cpu")
FORMS = {torch.bfloat16: Form.BF16, torch.float16: Form.F16, torch.float32: Form.F32}
STACKS = {
    "gpt-oss": ("experts.gate_up_proj", "experts.down_proj"),
    "gpt-oss-odd": ("experts.gate_up_proj", "experts.down_proj"),
    "granite-hybrid": ("input_linear.weight", "output_linear.weight"),
}
"""The ends of their names, by the variant of a model that stores experts so."""

every_stack = pytest.mark.parametrize("name", [*STACKS])


def save(directory: Path, name: str, dtype: torch.dtype) -> None:
    replace(VARIANTS[name], dtype=dtype).save(VARIANTS[name].build().to(dtype), directory)


def load(directory: Path) -> Model:
    checkpoint = open_checkpoint(directory)
    return load_model(checkpoint, choose_placement(checkpoint, CPU))


def parts_of(model: Model, kind: type) -> list[Any]:
    """The parts of a kind, those within others too."""
    found: list[Any] = []
    waiting: list[object] = [block.part for block in model._blocks]
    while waiting:
        part = waiting.pop(0)
        found += [part] if isinstance(part, kind) else []
        waiting += vars(part).get("_parts", ())
    return found


def tokens_of(count: int, seed: int = 1) -> list[int]:
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def spread(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@every_stack
@pytest.mark.parametrize("dtype", FORMS, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_stacked_experts_are_multiplied_as_they_are_stored(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    save(tmp_path, name, dtype)
    model = load(tmp_path)
    mixtures = parts_of(model, Experts)
    assert len(mixtures) == len([each for each in model.config.layers if each.mlp is not None])
    for mixture in mixtures:
        matrices = (*mixture._weights.inner, *mixture._weights.outer)
        assert {part.form for matrix in matrices for part in matrix.parts} == {FORMS[dtype]}
        numbers = sum(-(-matrix.outputs // 16) * 16 * matrix.inputs for matrix in matrices)
        assert sum(matrix.bytes for matrix in matrices) == numbers * dtype.itemsize
        assert isinstance(mixture._router._weight, PackedMatrix)
    tokens = tokens_of(50)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens]), use_cache=False).logits[0]
    found = PagedRunner(model, 16).run([(Sequence(), tokens)])[0]
    assert spread(found, expected) <= 1e-5


@every_stack
def test_results_are_those_of_float32(tmp_path: Path, name: str) -> None:
    """As they were when the experts were copied to float32."""
    save(tmp_path, name, torch.bfloat16)
    tokens = tokens_of(40)
    copied = load_model(open_checkpoint(tmp_path), Placement(CPU, torch.float32))
    assert all(isinstance(each._weights.inner, Tensor) for each in parts_of(copied, Experts))
    found, expected = (
        PagedRunner(each, 16).run([(Sequence(), tokens)])[0] for each in (load(tmp_path), copied)
    )
    assert spread(found, expected) <= 5e-6


@every_stack
def test_experts_and_their_router_do_not_depend_on_the_batch(tmp_path: Path, name: str) -> None:
    save(tmp_path, name, torch.bfloat16)
    x = torch.randn(37, VARIANTS[name].build().config.hidden_size, generator=torch.Generator().manual_seed(2))
    for mixture in parts_of(load(tmp_path), Experts):
        together = mixture(x, None, None)
        for first, end in ((0, 1), (36, 37), (3, 9), (1, 37)):
            assert torch.equal(mixture(x[first:end], None, None), together[first:end])


def change_stack(directory: Path, ending: str, change: Callable[[Tensor], Tensor]) -> str:
    """Changes the first tensor of an ending in the files; its name."""
    for file in sorted(directory.glob("*.safetensors")):
        tensors = load_file(file)
        for name in sorted(tensors):
            if name.endswith(ending):
                save_file({**tensors, name: change(tensors[name]).contiguous()}, file)
                return name
    raise AssertionError(f"no tensor ends with {ending}")


@every_stack
def test_two_types_stay_two_types(tmp_path: Path, name: str) -> None:
    save(tmp_path, name, torch.bfloat16)
    change_stack(tmp_path, STACKS[name][1], Tensor.float)
    forms = [
        {part.form for matrix in side for part in matrix.parts}
        for mixture in parts_of(load(tmp_path), Experts)
        for side in (mixture._weights.inner, mixture._weights.outer)
    ]
    assert sorted(each.name for form in forms for each in form).count("F32") == 1
    assert all(len(form) == 1 for form in forms)


@every_stack
def test_a_type_that_no_kernel_multiplies_is_copied_to_float32(tmp_path: Path, name: str) -> None:
    """Both matrices of an expert, so that they stay of one kind."""
    save(tmp_path, name, torch.bfloat16)
    tokens = tokens_of(20)
    expected = PagedRunner(load(tmp_path), 16).run([(Sequence(), tokens)])[0]
    change_stack(tmp_path, STACKS[name][1], Tensor.double)
    model = load(tmp_path)
    kinds = [[type(side) for side in mixture._weights[:2]] for mixture in parts_of(model, Experts)]
    assert kinds.count([Tensor, Tensor]) == 1 and kinds.count([tuple, tuple]) == len(kinds) - 1
    assert spread(PagedRunner(model, 16).run([(Sequence(), tokens)])[0], expected) <= 5e-6


@every_stack
@pytest.mark.parametrize("side", [0, 1], ids=["inner", "outer"])
@pytest.mark.parametrize("damage", ["experts", "rows", "columns", "dimensions", "whole numbers", "name"])
def test_damaged_stacks_are_refused_by_name(tmp_path: Path, name: str, side: int, damage: str) -> None:
    save(tmp_path, name, torch.bfloat16)
    changes: dict[str, Callable[[Tensor], Tensor]] = {
        "experts": lambda stack: stack[:-1],
        "rows": lambda stack: stack[:, 1:],
        "columns": lambda stack: stack[..., 1:],
        "dimensions": lambda stack: stack.flatten(0, 1),
        "whole numbers": lambda stack: stack.to(torch.int16),
        "name": lambda stack: stack,
    }
    damaged = change_stack(tmp_path, STACKS[name][side], changes[damage])
    if damage == "name":
        for file in tmp_path.glob("*.safetensors"):
            tensors = load_file(file)
            save_file({each.replace(damaged, "other"): tensors[each] for each in tensors}, file)
        for file in tmp_path.glob("*.index.json"):
            file.write_text(file.read_text().replace(json.dumps(damaged), '"other"'))
    with pytest.raises(ConfigurationError, match=damaged.replace(".", r"\.")):
        load(tmp_path)


def test_stacks_are_turned_and_reordered() -> None:
    weights = torch.arange(24.0).view(2, 3, 4)
    assert Stack("a", 3, 4).shape(2) == (2, 3, 4) and Stack("a", 4, 3, swapped=True).shape(2) == (2, 3, 4)
    assert torch.equal(Stack("a", 3, 4).straight(weights), weights)
    order = torch.tensor([3, 0, 2, 1])
    turned = Stack("a", 4, 3, swapped=True, order=order).straight(weights)
    assert turned.is_contiguous() and torch.equal(turned, weights.transpose(1, 2)[:, order])
    assert torch.equal(Stack("a", 4, 3, swapped=True, order=order).straight(weights[1]), turned[1])


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.BF16, Kind.F32], ids=lambda kind: kind.name)
def test_granite_experts_of_a_gguf_file_stay_packed(tmp_path: Path, kind: Kind) -> None:
    model, path = hybrids.build("granite 4 with experts"), tmp_path / "model.gguf"
    hybrids.write(model, path, "granitehybrid", kind)
    loaded = load(path)
    mixtures = parts_of(loaded, Experts)
    assert len(mixtures) == model.config.num_hidden_layers
    for mixture in mixtures:
        matrices = (*mixture._weights.inner, *mixture._weights.outer)
        assert {part.form.name for matrix in matrices for part in matrix.parts} == {kind.name}
    tokens = torch.randint(160, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([tokens]), use_cache=False).logits[0]
    close = {Kind.Q8_0: 0.05, Kind.BF16: 0.02, Kind.F32: 1e-5}[kind]
    assert spread(PagedRunner(loaded, 16).run([(Sequence(), tokens)])[0], expected) <= close


def test_another_number_of_granite_experts_is_refused_by_name(tmp_path: Path) -> None:
    model, path = hybrids.build("granite 4 with experts"), tmp_path / "model.gguf"
    model.config.num_local_experts = 3
    hybrids.write(model, path, "granitehybrid")
    with pytest.raises(ConfigurationError, match=r"block_sparse_moe\.input_linear\.weight"):
        load(path)


def test_the_gate_of_shared_experts_does_not_depend_on_the_batch(tmp_path: Path) -> None:
    save(tmp_path, "qwen3-next", torch.bfloat16)
    gates = [part._gate for part in parts_of(load(tmp_path), GatedPart)]
    assert gates and all(isinstance(gate, PackedLinear) for gate in gates)
