"""GGUF files of families that differ from llama's, written by the gguf package, mean what was written."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from transformers import PreTrainedModel

from holdfast.kernels.cpu.structures import Form
from holdfast.models.checkpoint import choose_placement, load_model, open_checkpoint
from holdfast.models.fields import ConfigurationError
from holdfast.models.weights import Placement
from tests.models.gguf_files import LAYER_NAMES, WHOLE_NAMES, add_sizes, finish, quantise
from tests.models.paged import PagedRunner, Sequence

CPU = Placement(torch.device("cpu"), torch.float32)
SIZES = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "truncate": False,
}
EXPERTS = {"num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "qwen3moe": (
        "Qwen3Moe",
        {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "gemma3": (
        "Gemma3",
        {
            "num_hidden_layers": 7,
            "sliding_window": 9,
            "query_pre_attn_scalar": 32,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "gpt-oss": (
        "GptOss",
        {**EXPERTS, "num_local_experts": 4, "sliding_window": 9, "rope_parameters": YARN},
    ),
}
LAYER = LAYER_NAMES | {"mlp.gate": "ffn_gate_inp", "mlp.router": "ffn_gate_inp"}
NORMS = {
    "qwen3moe": {"post_attention_layernorm": "ffn_norm"},
    "gemma3": {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    "gpt-oss": {"post_attention_layernorm": "post_attention_norm"},
}


def build(family: str, **more: object) -> PreTrainedModel:
    name, changes = FAMILIES[family]
    torch.manual_seed(2)
    config = getattr(transformers, "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config")
    model: PreTrainedModel = getattr(transformers, f"{name}ForCausalLM")(
        config(**{**SIZES, **changes, **more})
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn(parameter.shape)
    return model.float()


def describe(writer: gguf.GGUFWriter, model: PreTrainedModel, family: str) -> None:
    config = model.config
    add_sizes(writer, config)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if "factor" in rope:
        writer.add_rope_scaling_type(getattr(gguf.RopeScalingType, rope["rope_type"].upper()))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if family != "qwen3moe":
        writer.add_sliding_window(config.sliding_window)
    if family != "gemma3":
        count = config.num_experts if family == "qwen3moe" else config.num_local_experts
        inner = config.moe_intermediate_size if family == "qwen3moe" else config.intermediate_size
        writer.add_expert_count(count)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(inner)


def expert_tensors(stem: str, part: str, tensor: torch.Tensor, family: str) -> dict[str, torch.Tensor]:
    """Views of stacked experts as llama.cpp stores them: gate, up and down apart, [experts, out, in]."""
    layer = stem.split(".")[2]
    ending = "bias" if part.endswith("_bias") else "weight"
    turned = tensor.transpose(1, 2) if family == "gpt-oss" and ending == "weight" else tensor
    if part.startswith("down_proj"):
        return {f"blk.{layer}.ffn_down_exps.{ending}": turned}
    half = turned.shape[1] // 2
    gate, up = (
        (turned[:, :half], turned[:, half:]) if family == "qwen3moe" else (turned[:, 0::2], turned[:, 1::2])
    )
    return {f"blk.{layer}.ffn_gate_exps.{ending}": gate, f"blk.{layer}.ffn_up_exps.{ending}": up}


def file_tensors(name: str, tensor: torch.Tensor, family: str) -> dict[str, torch.Tensor]:
    stem, _, ending = name.rpartition(".")
    if stem in WHOLE_NAMES:
        return {f"{WHOLE_NAMES[stem]}.{ending}": tensor}
    if stem.endswith(".experts"):
        return expert_tensors(stem, ending, tensor, family)
    _, _, layer, part = f"{stem}.{ending}".split(".", 3)
    if part == "self_attn.sinks":
        return {f"blk.{layer}.attn_sinks.weight": tensor}
    return {f"blk.{layer}.{(LAYER | NORMS[family])[part.rpartition('.')[0]]}.{ending}": tensor}


def write(
    model: PreTrainedModel, path: Path, family: str, kind: Kind, experts: Kind | dict[str, Kind]
) -> None:
    """Writes a model, and sets its weights to what the file means; `experts` may name their matrices."""
    if isinstance(experts, Kind):
        experts = dict.fromkeys(("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), experts)
    writer = gguf.GGUFWriter(path, family)
    describe(writer, model, family)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if model.config.tie_word_embeddings and name == "lm_head.weight":
                continue
            for theirs, view in file_tensors(name, tensor, family).items():
                values = view.numpy().astype(np.float32)
                used = experts.get(theirs.split(".")[2], kind) if "_exps" in theirs else kind
                if "norm" in theirs and family == "gemma3":
                    values = values + 1
                if theirs.endswith("bias") or values.ndim == 1 or "gate_inp" in theirs or used is Kind.F32:
                    writer.add_tensor(theirs, np.ascontiguousarray(values))
                    continue
                rows = np.ascontiguousarray(values).reshape(-1, values.shape[-1])
                raw = quantise(rows, used).reshape(*values.shape[:-1], -1)
                writer.add_tensor(theirs, raw, raw_dtype=used)
                view.copy_(torch.from_numpy(gguf.dequantize(raw, used).reshape(values.shape)))
    finish(writer)


def logits(path: Path, placement: Placement, tokens: list[int]) -> torch.Tensor:
    runner = PagedRunner(load_model(open_checkpoint(path), placement), 16)
    return runner.run([(Sequence(), tokens)])[0]


@pytest.mark.parametrize(
    ("family", "kind", "experts"),
    [
        ("qwen3moe", Kind.F32, Kind.F32),
        ("qwen3moe", Kind.Q8_0, Kind.Q4_0),
        ("gemma3", Kind.F32, Kind.F32),
        ("gemma3", Kind.Q4_1, Kind.F32),
        ("gpt-oss", Kind.F32, Kind.F32),
        ("gpt-oss", Kind.Q8_0, Kind.MXFP4),
    ],
    ids=lambda value: value.name if isinstance(value, Kind) else value,
)
def test_a_file_means_the_model_that_was_written(
    tmp_path: Path, family: str, kind: Kind, experts: Kind
) -> None:
    model, path = build(family), tmp_path / "model.gguf"
    write(model, path, family, kind, experts)
    tokens = torch.randint(160, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    assert float((logits(path, CPU, tokens) - expected).abs().max() / expected.abs().max()) <= 1e-4
    if kind is Kind.F32:
        return
    kept = choose_placement(open_checkpoint(path), torch.device("cpu"))
    assert kept.quantised
    near = logits(path, kept, tokens)
    assert float((near - expected).norm() / expected.norm()) < 0.05
    assert not torch.equal(near, expected)


def test_experts_of_a_file_stay_packed(tmp_path: Path) -> None:
    model, path = build("gpt-oss"), tmp_path / "model.gguf"
    write(model, path, "gpt-oss", Kind.Q8_0, Kind.MXFP4)
    checkpoint = open_checkpoint(path)
    loaded = load_model(checkpoint, choose_placement(checkpoint, torch.device("cpu")))
    experts = [vars(block.part)["_weights"] for block in loaded._blocks if "_weights" in vars(block.part)]
    assert len(experts) == 3
    for each in experts:
        forms = {part.form for matrix in (*each.inner, *each.outer) for part in matrix.parts}
        assert forms == {Form.E2M1}
        state = model.state_dict()[f"model.layers.{experts.index(each)}.mlp.experts.down_proj"]
        found = torch.stack([matrix.rows(torch.arange(64)) for matrix in each.outer])
        assert torch.equal(found, state.transpose(1, 2))


def test_experts_in_k_quants_keep_the_form_of_each_matrix(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256}
    model, path = build("qwen3moe", **sizes, initializer_range=0.03), tmp_path / "model.gguf"
    kinds = {"ffn_gate_exps": Kind.Q4_K, "ffn_up_exps": Kind.Q3_K, "ffn_down_exps": Kind.Q6_K}
    write(model, path, "qwen3moe", Kind.Q5_0, kinds)
    checkpoint = open_checkpoint(path)
    loaded = load_model(checkpoint, choose_placement(checkpoint, torch.device("cpu")))
    experts = [vars(block.part)["_weights"] for block in loaded._blocks if "_weights" in vars(block.part)]
    for each in experts:
        assert {tuple(part.form for part in one.parts) for one in each.inner} == {(Form.Q4_K, Form.Q3_K)}
        assert {tuple(part.form for part in one.parts) for one in each.outer} == {(Form.Q6_K,)}
        state = model.state_dict()[f"model.layers.{experts.index(each)}.mlp.experts.gate_up_proj"]
        assert torch.equal(torch.stack([one.rows(torch.arange(512)) for one in each.inner]), state)
    tokens = torch.randint(160, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    found = PagedRunner(loaded, 16).run([(Sequence(), tokens)])[0]
    assert float((found - expected).norm() / expected.norm()) < 0.05


def test_wrong_experts_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = build("qwen3moe")
    model.config.num_experts = 3
    write(model, path, "qwen3moe", Kind.F32, Kind.F32)
    with pytest.raises(ConfigurationError, match=r"experts\.0\.down_proj"):
        load_model(open_checkpoint(path), CPU)
    model.config.num_experts = 5000
    write(model, path, "qwen3moe", Kind.F32, Kind.F32)
    with pytest.raises(ConfigurationError, match="5000 experts are not supported"):
        open_checkpoint(path)


RECURRENT: dict[str, tuple[str, dict[str, object]]] = {
    "mamba2": (
        "Mamba2",
        {"num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 2, "expand": 2, "use_bias": False},
    ),
    "nemotron_h": (
        "NemotronH",
        {
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "ssm_state_size": 16,
            "n_groups": 2,
        },
    ),
}
STATE_LAYER = {
    "norm.weight": "attn_norm.weight",
    "mixer.in_proj.weight": "ssm_in.weight",
    "mixer.conv1d.weight": "ssm_conv1d.weight",
    "mixer.conv1d.bias": "ssm_conv1d.bias",
    "mixer.dt_bias": "ssm_dt.bias",
    "mixer.A_log": "ssm_a",
    "mixer.D": "ssm_d",
    "mixer.norm.weight": "ssm_norm.weight",
    "mixer.out_proj.weight": "ssm_out.weight",
    "mixer.q_proj.weight": "attn_q.weight",
    "mixer.k_proj.weight": "attn_k.weight",
    "mixer.v_proj.weight": "attn_v.weight",
    "mixer.o_proj.weight": "attn_output.weight",
    "mixer.up_proj.weight": "ffn_up.weight",
    "mixer.down_proj.weight": "ffn_down.weight",
}
STATE_WHOLE = {"embeddings.weight": "token_embd", "norm_f.weight": "output_norm", "lm_head.weight": "output"}


def write_recurrent(model: PreTrainedModel, path: Path, family: str) -> None:
    """As llama.cpp writes them: -exp of A_log, A and D with a second dimension, norms by groups."""
    config, writer = model.config, gguf.GGUFWriter(path, family)
    heads, size = (4, 32)
    writer.add_context_length(256)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_inner_size(heads * size)
    writer.add_ssm_state_size(16)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_group_count(config.n_groups)
    if family == "nemotron_h":
        kinds = RECURRENT[family][1]["layers_block_type"]
        assert isinstance(kinds, list)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv([config.num_key_value_heads * (kind == "full_attention") for kind in kinds])
        writer.add_feed_forward_length([config.intermediate_size * (kind == "mlp") for kind in kinds])
        writer.add_key_length(config.head_dim)
    else:
        writer.add_head_count(0)
        writer.add_feed_forward_length(0)
    for name, tensor in model.state_dict().items():
        values = tensor.numpy().astype(np.float32)
        if name.endswith("A_log"):
            values = -np.exp(values)[:, None]
        elif name.endswith(".D"):
            values = values[:, None]
        elif name.endswith("conv1d.weight"):
            values = values.squeeze(1)
        elif name.endswith("mixer.norm.weight"):
            values = values.reshape(config.n_groups, -1)
        stem = name.removeprefix("backbone.").removeprefix("model.")
        if stem in STATE_WHOLE:
            theirs = f"{STATE_WHOLE[stem]}.weight"
        else:
            _, layer, part = stem.split(".", 2)
            theirs = f"blk.{layer}.{STATE_LAYER[part]}"
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        writer.add_tensor(theirs, np.ascontiguousarray(values))
    finish(writer)


@pytest.mark.parametrize("family", RECURRENT)
def test_files_of_models_with_a_state(tmp_path: Path, family: str) -> None:
    name, changes = RECURRENT[family]
    torch.manual_seed(2)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, "rms_norm_eps": 1e-5, **changes})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval().float()
    path = tmp_path / "model.gguf"
    write_recurrent(model, path, family)
    tokens = torch.randint(160, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([tokens]), use_cache=False).logits[0]
    assert float((logits(path, CPU, tokens) - expected).abs().max() / expected.abs().max()) <= 1e-4
