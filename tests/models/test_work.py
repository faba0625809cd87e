"""The work of a token: as many multiplications as the matrices that it meets have weights."""

from pathlib import Path

import pytest

from holdfast.engine.draft.gain import Costs
from holdfast.models.checkpoint import open_checkpoint
from holdfast.models.config import ModelConfig
from holdfast.models.work import work_of
from tests.models.reference import VARIANTS

FAMILIES = ["llama-tied-biased", "gemma3", "bamba", "mamba2", "falcon-h1", "nemotron-h", "qwen3.5"]
MIXTURES = ["qwen3-moe", "gpt-oss", "qwen3-next", "granite-hybrid"]


def opened(name: str, folder: Path) -> tuple[ModelConfig, int]:
    """A small model's configuration, and how many weights its matrices have that one token meets."""
    variant = VARIANTS[name]
    model = variant.build()
    model.save_pretrained(folder)
    facts = model.config
    of_token = getattr(facts, "num_experts_per_tok", 1)
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((getattr(facts, each) for each in names if getattr(facts, each, 0)), 1)
    total = facts.vocab_size * facts.hidden_size
    for key, tensor in model.state_dict().items():
        if (
            key.startswith("lm_head")
            or "embed" in key
            or "conv1d" in key
            or "bias" in key
            or tensor.dim() < 2
        ):
            continue
        each = tensor.numel()
        total += each * of_token // experts if ".experts." in key or tensor.dim() == 3 else each
    return open_checkpoint(folder).config, total


@pytest.mark.parametrize("name", [*FAMILIES, *MIXTURES])
def test_a_token_is_multiplied_with_the_weights_that_it_meets(name: str, tmp_path: Path) -> None:
    config, weights = opened(name, tmp_path)
    assert work_of(config) == weights


def test_a_mixture_is_not_as_much_work_as_its_size(tmp_path: Path) -> None:
    dense, _ = opened("llama", tmp_path / "draft")
    mixture, _ = opened("qwen3-moe", tmp_path / "target")
    device = next(iter(VARIANTS["llama"].build().parameters())).device
    assert Costs.of(dense, mixture, device).draft == pytest.approx(work_of(dense) / work_of(mixture))
