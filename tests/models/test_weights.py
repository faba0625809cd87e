"""Loading: sharded directories, names and shapes that do not match, dummy weights, defaults, refusals."""

import json
import math
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.models.checkpoint import choose_placement, load_model, open_checkpoint
from holdfast.models.families import supported_architectures
from holdfast.models.fields import ConfigurationError
from holdfast.models.sources import SafetensorsSource
from holdfast.models.weights import Placement, WeightMismatch
from tests.models.paged import PagedRunner, Sequence
from tests.models.reference import VARIANTS, Reference

CPU = Placement(torch.device("cpu"), torch.float32)


def copy_of(reference: Reference, tmp_path: Path) -> Path:
    return Path(shutil.copytree(reference.path, tmp_path / "copy"))


def edit_config(path: Path, **changes: object) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


def test_checkpoints_are_sharded_and_progress_is_told(reference_of: Callable[[str], Reference]) -> None:
    path = reference_of("llama").path
    assert len(list(path.glob("*.safetensors"))) > 3
    told: list[tuple[int, int]] = []
    load_model(open_checkpoint(path), CPU, progress=lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert all(done <= total for done, total in told)
    assert len(told) > 10
    done, total = told[-1]
    headers = sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in path.glob("*.safetensors"))
    assert done == total - headers, "all weights were read, and counted at their size"


def test_one_file_without_an_index(reference_of: Callable[[str], Reference], tmp_path: Path) -> None:
    path = copy_of(reference_of("llama"), tmp_path)
    tensors = {
        name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    for file in path.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, path / "model.safetensors")
    load_model(open_checkpoint(path), CPU)
    (path / "model.safetensors").unlink()
    with pytest.raises(ConfigurationError, match=r"no \.safetensors files.*dummy"):
        load_model(open_checkpoint(path), CPU)


def test_all_names_and_shapes_that_do_not_match_are_listed(
    reference_of: Callable[[str], Reference], tmp_path: Path
) -> None:
    path = copy_of(reference_of("llama"), tmp_path)
    edit_config(path, num_hidden_layers=4, intermediate_size=81)
    with pytest.raises(WeightMismatch) as caught:
        load_model(open_checkpoint(path), CPU)
    message = str(caught.value)
    assert "missing (9): model.layers.3.self_attn.q_proj.weight" in message
    assert "of another shape (9): model.layers.0.mlp.gate_proj.weight is [80, 48], not [81, 48]" in message
    edit_config(path, num_hidden_layers=2, intermediate_size=80)
    with pytest.raises(WeightMismatch, match=r"unexpected \(9\): model\.layers\.2\.input_layernorm\.weight"):
        load_model(open_checkpoint(path), CPU)


def test_integers_are_no_weights(reference_of: Callable[[str], Reference], tmp_path: Path) -> None:
    path = copy_of(reference_of("llama"), tmp_path)
    name = "model.layers.0.mlp.down_proj.weight"
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            save_file({**tensors, name: tensors[name].to(torch.int8)}, file)
    with pytest.raises(WeightMismatch, match=rf"not supported \(1\): {name} is int8"):
        load_model(open_checkpoint(path), CPU)


def test_a_missing_shard_is_named(reference_of: Callable[[str], Reference], tmp_path: Path) -> None:
    path = copy_of(reference_of("llama"), tmp_path)
    victim = sorted(path.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(ConfigurationError, match=victim.name):
        load_model(open_checkpoint(path), CPU)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (lambda whole: whole[: len(whole) // 2], "is not a complete safetensors file .*fetch it again"),
        (lambda whole: b"", "is not a complete safetensors file .*fetch it again"),
        (lambda whole: POINTER, "is a Git LFS pointer.*git lfs pull"),
    ],
    ids=["cut-short", "empty", "pointer"],
)
def test_a_damaged_shard_is_named(
    reference_of: Callable[[str], Reference],
    tmp_path: Path,
    content: Callable[[bytes], bytes],
    problem: str,
) -> None:
    path = copy_of(reference_of("llama"), tmp_path)
    victim = sorted(path.glob("*.safetensors"))[1]
    victim.write_bytes(content(victim.read_bytes()))
    with pytest.raises(ConfigurationError, match=f"{victim.name} {problem}"):
        load_model(open_checkpoint(path), CPU)


def test_a_shard_that_is_no_file_is_named(reference_of: Callable[[str], Reference], tmp_path: Path) -> None:
    path = copy_of(reference_of("llama"), tmp_path)
    victim = sorted(path.glob("*.safetensors"))[1]
    victim.unlink()
    victim.mkdir()
    with pytest.raises(ConfigurationError, match=f"{victim.name} is not a regular file"):
        load_model(open_checkpoint(path), CPU)


def test_a_tensor_of_a_type_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    header = json.dumps({"part": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0\0\0")
    source = SafetensorsSource(tmp_path)
    assert source.names() == {"part"}
    with pytest.raises(ConfigurationError, match=r"model\.safetensors has no readable tensor part"):
        source.read("part")


def test_other_files_may_be_pointers_too(reference_of: Callable[[str], Reference], tmp_path: Path) -> None:
    path = copy_of(reference_of("llama"), tmp_path)
    (path / "config.json").write_bytes(POINTER)
    with pytest.raises(ConfigurationError, match=r"config\.json is a Git LFS pointer"):
        open_checkpoint(path)
    (tmp_path / "model.gguf").write_bytes(POINTER)
    with pytest.raises(ConfigurationError, match=r"model\.gguf is a Git LFS pointer"):
        open_checkpoint(tmp_path / "model.gguf")


@pytest.mark.parity
@pytest.mark.parametrize("name", VARIANTS)
def test_dummy_weights_run(reference_of: Callable[[str], Reference], tmp_path: Path, name: str) -> None:
    """With no weights on the disk: finite, the same each time, and not all alike."""
    (tmp_path / "config.json").write_text((reference_of(name).path / "config.json").read_text())
    checkpoint = open_checkpoint(tmp_path)
    tokens = list(range(1, 40))
    logits = [
        PagedRunner(load_model(checkpoint, CPU, load_format="dummy"), 16).run([(Sequence(), tokens)])[0]
        for _ in range(2)
    ]
    assert torch.isfinite(logits[0]).all()
    assert torch.equal(*logits)
    assert logits[0].std(dim=0).max() > 0


@pytest.mark.parametrize("name", ["llama", "bamba", "mistral"])
def test_half_precision_is_close(reference_of: Callable[[str], Reference], name: str) -> None:
    reference = reference_of(name)
    model = load_model(open_checkpoint(reference.path), Placement(torch.device("cpu"), torch.bfloat16))
    logits = PagedRunner(model, 16).run([(Sequence(), reference.prompts[0])])[0]
    expected = reference.logits[0][: len(reference.prompts[0])]
    assert logits.dtype == torch.float32
    assert (logits - expected).abs().max() / expected.abs().max() <= 0.15


@pytest.mark.parity
def test_unsupported_architectures_are_named_with_what_is_supported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(ConfigurationError) as caught:
        open_checkpoint(tmp_path)
    assert "'GPT2LMHeadModel'" in str(caught.value)
    for architecture in supported_architectures():
        assert architecture in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"hidden_size": None}, "has no 'hidden_size'"),
        ({"hidden_size": "many"}, "'hidden_size' should be an integer"),
        ({"hidden_size": 64.5}, "'hidden_size' should be an integer, not 64.5"),
        ({"hidden_size": math.nan}, "'hidden_size' should be an integer, not nan"),
        ({"hidden_size": 10**400}, "'hidden_size' should be an integer"),
        ({"max_position_embeddings": math.inf}, "'max_position_embeddings' should be an integer, not inf"),
        ({"max_position_embeddings": 0}, "'max_position_embeddings' should be at least 1, not 0"),
        ({"num_attention_heads": 0}, "'num_attention_heads' should be at least 1, not 0"),
        ({"num_key_value_heads": 0}, "'num_key_value_heads' should be at least 1, not 0"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' should be at least 1, not 0"),
        ({"head_dim": 0}, "'head_dim' should be at least 1, not 0"),
        ({"head_dim": 15}, "15 of 15 dimensions cannot be rotated"),
        ({"intermediate_size": -3}, "'intermediate_size' should be at least 1, not -3"),
        ({"rms_norm_eps": math.nan}, "'rms_norm_eps' should be a number, not nan"),
        ({"rms_norm_eps": 10**400}, "'rms_norm_eps' should be a number"),
        ({"tie_word_embeddings": 3}, "'tie_word_embeddings' should be true or false"),
        ({"num_key_value_heads": 4}, "6 query heads do not divide over 4"),
        ({"hidden_act": "tanh"}, "activation 'tanh' is not supported"),
        ({"rope_parameters": {"rope_type": "spiral", "factor": 2.0}}, "'spiral' is not supported"),
        ({"rope_parameters": {"rope_type": "longrope", "long_factor": [2.0]}}, "'longrope' is not supported"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 0}},
            "'factor' should be .* above zero, not 0.0",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": math.inf}},
            "'factor' should be a finite number",
        ),
        ({"rope_parameters": {"rope_theta": 1}}, "'rope_theta' must be above 1, not 1.0"),
        ({"rope_parameters": {"partial_rotary_factor": 2.0}}, "dimensions cannot be rotated"),
        ({"rope_parameters": {"rope_type": "factors", "factors": [1.0]}}, "1 rotary factors do not fit"),
        ({"architectures": ["A", "B"]}, "must name one architecture"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantised with hqq"),
    ],
)
def test_wrong_configurations_say_what_is_wrong(
    reference_of: Callable[[str], Reference], tmp_path: Path, changes: dict[str, object], problem: str
) -> None:
    path = copy_of(reference_of("llama"), tmp_path)
    edit_config(path, **changes)
    with pytest.raises(ConfigurationError, match=problem):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("qwen3-moe", {"num_experts_per_tok": 99}, "99 experts per token exceed"),
        ("qwen3-moe", {"decoder_sparse_step": 0}, "'decoder_sparse_step' should be at least 1"),
        ("gemma3", {"layer_types": ["full_attention"]}, "'layer_types' names 1 layers of"),
        ("gemma3", {"query_pre_attn_scalar": 0}, "'query_pre_attn_scalar' should be .* above zero"),
        ("granite-hybrid", {"logits_scaling": 0}, "'logits_scaling' should be .* above zero"),
        ("bamba", {"mamba_n_heads": 0}, "'mamba_n_heads' should be at least 1"),
        ("bamba", {"mamba_n_groups": 4}, "heads of a state do not divide over 4 groups"),
        ("nemotron-h", {"n_group": 3, "topk_group": 4}, "a router cannot keep 4 of 3 groups"),
        ("qwen3-next", {"linear_num_key_heads": 5}, "value heads do not divide over 5 key heads"),
        ("qwen3-next", {"layer_types": ["full_attention"]}, "'layer_types' names 1 layers of"),
    ],
)
def test_wrong_configurations_of_other_families(
    reference_of: Callable[[str], Reference],
    tmp_path: Path,
    name: str,
    changes: dict[str, object],
    problem: str,
) -> None:
    path = copy_of(reference_of(name), tmp_path)
    edit_config(path, **changes)
    with pytest.raises(ConfigurationError, match=problem):
        open_checkpoint(path)


def test_paths_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no config\.json"):
        open_checkpoint(tmp_path)
    with pytest.raises(ConfigurationError, match="neither a directory"):
        open_checkpoint(tmp_path / "nothing")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigurationError, match="not valid JSON"):
        open_checkpoint(tmp_path)


def test_generation_defaults(reference_of: Callable[[str], Reference], tmp_path: Path) -> None:
    path = copy_of(reference_of("llama"), tmp_path)
    edit_config(path, eos_token_id=5)
    (path / "generation_config.json").unlink(missing_ok=True)
    assert open_checkpoint(path).generation.eos_tokens == (5,)
    defaults = {"eos_token_id": [7, 8], "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    (path / "generation_config.json").write_text(json.dumps(defaults))
    generation = open_checkpoint(path).generation
    assert generation.eos_tokens == (7, 8)
    assert (generation.temperature, generation.top_k, generation.top_p) == (0.6, 20, 0.95)
    (path / "generation_config.json").write_text(json.dumps({**defaults, "do_sample": False}))
    assert open_checkpoint(path).generation.temperature is None


def test_older_rope_keys_mean_the_same(reference_of: Callable[[str], Reference], tmp_path: Path) -> None:
    path = copy_of(reference_of("llama3-rope"), tmp_path)
    new = open_checkpoint(path).config
    parameters = json.loads((path / "config.json").read_text())["rope_parameters"]
    theta = parameters.pop("rope_theta")
    edit_config(path, rope_parameters=None, rope_theta=theta, rope_scaling=parameters)
    assert open_checkpoint(path).config == new


def test_placements(reference_of: Callable[[str], Reference]) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    checkpoint = open_checkpoint(reference_of("llama").path)
    assert choose_placement(checkpoint, cpu) == Placement(
        cpu, torch.float32, quantised=True, dense_copies=False
    )
    assert choose_placement(checkpoint, cpu, "bfloat16") == Placement(cpu, torch.bfloat16)
    assert choose_placement(checkpoint, cuda).dtype is torch.float32, "as the checkpoint says"
    half = replace(checkpoint, config=replace(checkpoint.config, dtype="float16"))
    assert choose_placement(half, cuda).dtype is torch.float16
    silent = replace(checkpoint, config=replace(checkpoint.config, dtype=None))
    assert choose_placement(silent, cuda).dtype is torch.bfloat16
    with pytest.raises(ConfigurationError, match="int3"):
        choose_placement(checkpoint, cpu, "int3")


def test_placement_of_a_quantised_file(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept quantised by default, with dense copies only where memory is plentiful; dense when asked."""
    cpu = torch.device("cpu")
    checkpoint = open_checkpoint(smollm2)
    monkeypatch.setattr("holdfast.models.checkpoint.available_bytes", lambda: 64 << 30)
    assert choose_placement(checkpoint, cpu) == Placement(cpu, torch.float32, True, True)
    monkeypatch.setattr("holdfast.models.checkpoint.available_bytes", lambda: 1 << 30)
    assert choose_placement(checkpoint, cpu) == Placement(cpu, torch.float32, True, False)
    assert choose_placement(checkpoint, cpu, "float32") == Placement(cpu, torch.float32)
