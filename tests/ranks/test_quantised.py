"""Quantised checkpoints on two ranks against one: cut between groups, or rejected by name."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from gguf import GGMLQuantizationType
from torch import Tensor
from transformers import PreTrainedModel

from holdfast.engine.ranks.group import RankGroup
from holdfast.models.checkpoint import choose_placement, load_model, open_checkpoint
from holdfast.models.fields import ConfigurationError
from holdfast.models.ranks import Group
from holdfast.models.weights import Placement
from tests.models import test_gguf_hybrids as hybrids
from tests.models.gguf_files import write_gguf
from tests.models.paged import generate
from tests.models.published import FORMS, publish, publish_gpt_oss
from tests.models.reference import VARIANTS
from tests.models.small_published import SIZES, prompt
from tests.ranks.together import Alone, run_ranks

CPU = torch.device("cpu")
TOLERANCE = 1e-4
ORDERED = ("w4a16-act-order", "gptq-act-order")
DENSE = tuple(form for form in FORMS if form not in ORDERED)
EXPERTS = ("w4a16-zeros", "nvfp4", "fp8-channel")
STACKED = ("gpt-oss", "granite-hybrid")
"""Models that have the experts of a layer in one tensor."""
NAMES = (
    *DENSE,
    *(f"{form} experts" for form in EXPERTS),
    "gpt-oss",
    *("Q4_0", "Q8_0", "BF16"),
    *(f"{name} in 16 bits" for name in STACKED),
    "granite experts in Q8_0",
)


def build(kind: str, **changes: object) -> PreTrainedModel:
    """A model whose heads and widths are whole blocks on each of two ranks."""
    torch.manual_seed(5)
    sizes = {**SIZES, "head_dim": 128, "hidden_size": 128, "intermediate_size": 256, **changes}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model: PreTrainedModel = getattr(transformers, f"{kind}ForCausalLM")(config).eval().float()
    return model


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("quantised")
    found = {name: folder / name.replace(" ", "-") for name in NAMES}
    for path in found.values():
        path.mkdir()
    for form in DENSE:
        publish(build("Llama"), found[form], form)
    for form in EXPERTS:
        sparse = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        publish(build("Qwen3Moe", **sparse), found[f"{form} experts"], form)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9}
    publish_gpt_oss(build("GptOss", **experts, intermediate_size=96), found["gpt-oss"])
    for kind in ("Q4_0", "Q8_0", "BF16"):
        found[kind] = found[kind].with_suffix(".gguf")
        plain = build("Llama", hidden_size=128, head_dim=32)
        write_gguf(plain, found[kind], GGMLQuantizationType[kind])
    for name in STACKED:
        variant = replace(VARIANTS[name], dtype=torch.bfloat16)
        variant.save(variant.build(), found[f"{name} in 16 bits"])
    found["granite experts in Q8_0"] = found["granite experts in Q8_0"].with_suffix(".gguf")
    granite = hybrids.build("granite 4 with experts", intermediate_size=64)
    hybrids.write(granite, found["granite experts in Q8_0"], "granitehybrid", GGMLQuantizationType.Q8_0)
    return found


def answer(path: Path, group: Group | None, *, codes: bool) -> dict[str, Tensor]:
    """Logits and greedy tokens, with weights that keep their codes or not."""
    checkpoint = open_checkpoint(path)
    placement = choose_placement(checkpoint, CPU) if codes else Placement(CPU, torch.float32)
    model = load_model(checkpoint, placement, group=group)
    given = [token % model.config.vocabulary for token in prompt()]
    logits, tokens = generate(model, [given], page_size=16, chunk=16, count=4)
    kind = "codes" if codes else "dense"
    return {f"{kind} logits": torch.cat(logits), f"{kind} tokens": torch.tensor(tokens)}


def both(path: Path, group: Group | None) -> dict[str, Tensor]:
    return answer(path, group, codes=False) | answer(path, group, codes=True)


@pytest.fixture(scope="module")
def together(paths: dict[str, Path]) -> list[dict[str, Tensor]]:
    def work(group: RankGroup) -> dict[str, Tensor]:
        return {
            f"{name} {kind}": tensor
            for name, path in paths.items()
            for kind, tensor in both(path, group).items()
        }

    return run_ranks(2, work)


@pytest.mark.parametrize("name", NAMES)
def test_parts_of_quantised_weights_mean_what_the_whole_means(
    name: str, paths: dict[str, Path], together: list[dict[str, Tensor]]
) -> None:
    expected = both(paths[name], None)
    for found in together:
        assert torch.equal(found[f"{name} dense tokens"], expected["dense tokens"])
        for kind in ("dense", "codes"):
            logits = expected[f"{kind} logits"]
            error = (found[f"{name} {kind} logits"] - logits).abs().max() / logits.abs().max()
            # Kernels that keep codes round activations, whose partial sums are rounded once a rank.
            assert error <= (TOLERANCE if kind == "dense" else 0.05), f"{kind} {error}"


@pytest.mark.parametrize("form", ORDERED)
def test_inputs_ordered_by_activation_are_not_divided(tmp_path: Path, form: str) -> None:
    publish(build("Llama"), tmp_path, form)
    with pytest.raises(ConfigurationError, match=r"o_proj\..*g_idx orders inputs by activation"):
        load_model(open_checkpoint(tmp_path), Placement(CPU, torch.float32), group=Alone())


def test_a_cut_through_a_block_is_refused_by_name(tmp_path: Path) -> None:
    publish(build("Llama", head_dim=96), tmp_path, "fp8-block")
    with pytest.raises(ConfigurationError, match=r"q_proj\.weight_scale is quantised in groups of 128"):
        load_model(open_checkpoint(tmp_path), Placement(CPU, torch.float32), group=Alone())
