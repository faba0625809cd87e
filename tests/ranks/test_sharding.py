"""Every family on two and three ranks against one: the same greedy tokens, logits within the tolerance."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from holdfast.engine.ranks.group import RankGroup
from holdfast.models.checkpoint import load_model, open_checkpoint
from holdfast.models.ranks import Group
from holdfast.models.weights import Placement
from tests.models.paged import generate
from tests.models.reference import prompts
from tests.ranks.models import NAMES, write_models
from tests.ranks.together import run_ranks

TOLERANCE = 1e-4
COUNT = 6


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("models"))


def answer(path: Path, group: Group | None = None) -> dict[str, Tensor]:
    """Logits and greedy tokens of some prompts in one ragged batch."""
    placement = Placement(torch.device("cpu"), torch.float32)
    model = load_model(open_checkpoint(path), placement, context_length=256, group=group)
    logits, tokens = generate(model, prompts(), page_size=16, chunk=24, count=COUNT)
    return {"logits": torch.cat(logits), "tokens": torch.tensor(tokens)}


@pytest.fixture(scope="module")
def alone(paths: dict[str, Path]) -> dict[str, dict[str, Tensor]]:
    """What one rank answers."""
    return {name: answer(path) for name, path in paths.items()}


@pytest.fixture(scope="module", params=[2, 3])
def together(request: pytest.FixtureRequest, paths: dict[str, Path]) -> list[dict[str, Tensor]]:
    """What each of so many ranks answers for all families, one after the other."""

    def work(group: RankGroup) -> dict[str, Tensor]:
        return {
            f"{name} {kind}": tensor for name in NAMES for kind, tensor in answer(paths[name], group).items()
        }

    return run_ranks(request.param, work)


def test_ranks_compute_what_one_computes(
    alone: dict[str, dict[str, Tensor]], together: list[dict[str, Tensor]]
) -> None:
    for found in together:
        assert {key.rpartition(" ")[0] for key in found} == set(NAMES)
        for name in NAMES:
            expected = alone[name]
            assert torch.equal(found[f"{name} tokens"], expected["tokens"]), name
            error = (found[f"{name} logits"] - expected["logits"]).abs().max()
            assert error / expected["logits"].abs().max() <= TOLERANCE, name
