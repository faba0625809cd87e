"""Logits and greedy tokens equal those of transformers, for every family, page size and chunk size."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from holdfast.models.checkpoint import load_model, open_checkpoint
from holdfast.models.config import AttentionConfig
from holdfast.models.model import Model
from holdfast.models.weights import Placement
from tests.models.paged import PagedRunner, Sequence, generate
from tests.models.reference import (
    GENERATED,
    VARIANTS,
    VOCABULARY,
    Reference,
    double_logits,
    drafts,
    make_reference,
)

SETTINGS = tuple((page_size, chunk) for page_size in (1, 16, 64) for chunk in (1, 7, 64))
LONG = 500
RECURRENT = ("bamba", "mamba2", "qwen3-next", "qwen3.5")
CPU = Placement(torch.device("cpu"), torch.float32, quantised=True)


def usual_settings(name: str) -> tuple[tuple[int, int], ...]:
    """The page and chunk size of a variant in `make test`: one of two in turn."""
    return (((1, 7), (16, 64))[tuple(VARIANTS).index(name) % 2],)


def load(reference: Reference) -> Model:
    return load_model(open_checkpoint(reference.path), CPU)


@pytest.mark.parametrize("name", ["llama", "bamba"])
def test_a_reference_takes_no_token_that_transformers_does_not(
    reference_of: Callable[[str], Reference], tmp_path: Path, name: str
) -> None:
    """Wrong drafts, of which one is right but for its last token, do not change what is expected."""

    def wrong(path: Path) -> list[list[int]]:
        first, second, third = drafts(path)
        return [[*first[:-1], (first[-1] + 1) % VOCABULARY], [0] * len(second), third]

    reference, made = reference_of(name), make_reference(VARIANTS[name], tmp_path, wrong)
    assert made.generated == reference.generated
    for ours, theirs in zip(made.logits, reference.logits, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param(name, settings, marks=mark, id=f"{name}-{word}")
        for name in VARIANTS
        for settings, mark, word in (
            (usual_settings(name), pytest.mark.parity, "usual"),
            (
                tuple(each for each in SETTINGS if each not in usual_settings(name)),
                pytest.mark.soak,
                "others",
            ),
        )
    ],
)
def test_parity(
    reference_of: Callable[[str], Reference], name: str, settings: tuple[tuple[int, int], ...]
) -> None:
    """A ragged batch of prompts, decoding while others prefill, for all page and chunk sizes."""
    reference = reference_of(name)
    for expected in reference.generated:
        assert len(expected) == GENERATED
        assert len(set(expected)) >= 20, "a model that repeats itself would agree with almost anything"
    assert (reference.path / "model.safetensors.index.json").exists(), "the checkpoint is in shards"
    model = load(reference)
    for page_size, chunk in settings:
        logits, generated = generate(
            model, reference.prompts, page_size=page_size, chunk=chunk, count=GENERATED
        )
        for ours, theirs in zip(logits, reference.logits, strict=True):
            error = (ours - theirs).abs().max() / theirs.abs().max()
            assert error <= 1e-4, f"page size {page_size}, chunk {chunk}: {error:.2e}"
        assert generated == reference.generated, f"page size {page_size}, chunk {chunk}"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.parity if name in RECURRENT else pytest.mark.soak)
        for name in VARIANTS
    ],
)
def test_distance_from_float64(name: str, tmp_path: Path) -> None:
    """Over a long prompt, whatever its chunks, float32 stays near float64: no sum loses digits on the way."""
    theirs = VARIANTS[name].build()
    VARIANTS[name].save(theirs, tmp_path)
    model = load_model(open_checkpoint(tmp_path), CPU)
    tokens = torch.randint(VOCABULARY, (LONG,), generator=torch.Generator().manual_seed(5)).tolist()
    expected = double_logits(theirs, tokens)
    for chunk in (LONG, 100, 7):
        runner, sequence = PagedRunner(model, 16), Sequence()
        pieces = [runner.run([(sequence, tokens[at : at + chunk])])[0] for at in range(0, LONG, chunk)]
        error = ((torch.cat(pieces) - expected).abs().max() / expected.abs().max()).item()
        assert error <= 1e-4, f"chunk {chunk}: {error:.2e}"


TEXT_SIZES = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "eos_token_id": None,
}
MULTIMODAL = {
    "gemma3": lambda: Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config={
                **TEXT_SIZES,
                "sliding_window": 20,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            vision_config={
                "hidden_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "intermediate_size": 16,
                "image_size": 28,
                "patch_size": 14,
            },
            mm_tokens_per_image=4,
        )
    ),
    "qwen3.5": lambda: Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(
            text_config={
                **TEXT_SIZES,
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 12,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 6,
                "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            },
            vision_config={
                "depth": 1,
                "hidden_size": 16,
                "num_heads": 2,
                "intermediate_size": 16,
                "out_hidden_size": 48,
            },
        )
    ),
}


@pytest.mark.parity
@pytest.mark.parametrize("name", MULTIMODAL)
def test_text_part_of_multimodal_checkpoints(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    theirs = MULTIMODAL[name]().eval()
    theirs.save_pretrained(tmp_path)
    model = load_model(open_checkpoint(tmp_path), CPU)
    tokens = list(range(3, 90))
    ours = PagedRunner(model, 16).run([(Sequence(), tokens)])[0]
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0]
    assert (ours - expected).abs().max() / expected.abs().max() <= 1e-4


WINDOWS = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
WINDOWED = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}, (None, 9, 9)),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}, (None, 9, 9)),
    "qwen3-moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, EXPERTS, (9, 9, 9)),
}


def windows_of(path: Path) -> tuple[int | None, ...]:
    """The window of every layer, as the configuration is understood."""
    mixers = [mixer for layer in open_checkpoint(path).config.layers for mixer in layer.mixers]
    assert all(isinstance(mixer, AttentionConfig) for mixer in mixers)
    return tuple(mixer.window for mixer in mixers)


@pytest.mark.parity
@pytest.mark.parametrize("name", WINDOWED)
def test_windows_of_qwen(tmp_path: Path, name: str) -> None:
    """Upper layers of Qwen2 and Qwen3 have a window, and every layer of Qwen3-MoE."""
    config, model, changes, windows = WINDOWED[name]
    torch.manual_seed(0)
    theirs = model(config(**{**TEXT_SIZES, **WINDOWS, **changes})).eval()
    theirs.save_pretrained(tmp_path)
    assert windows_of(tmp_path) == windows
    tokens = list(range(3, 90))
    ours = PagedRunner(load_model(open_checkpoint(tmp_path), CPU), 16).run([(Sequence(), tokens)])[0]
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0]
    assert (ours - expected).abs().max() / expected.abs().max() <= 1e-4


@pytest.mark.parametrize(
    "stated",
    [
        {"use_sliding_window": True},
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": True, "sliding_window": 33, "max_window_layers": 0},
        {"use_sliding_window": True, "max_window_layers": 40},
        {"use_sliding_window": False, "sliding_window": 33},
        {},
    ],
)
def test_what_configurations_of_qwen_leave_open(tmp_path: Path, stated: dict[str, object]) -> None:
    """A size or a layer that is not stated is the one that transformers takes."""
    theirs = Qwen2Config(**{**TEXT_SIZES, "num_hidden_layers": 30, **stated})
    written = {**TEXT_SIZES, "num_hidden_layers": 30, "architectures": ["Qwen2ForCausalLM"], **stated}
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert windows_of(tmp_path) == tuple(
        theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types
    )
