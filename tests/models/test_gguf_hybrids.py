"""GGUF files of hybrid models and of Olmo, in the form that llama.cpp writes, mean what was written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from torch import Tensor
from transformers import PreTrainedModel

from holdfast.kernels.torch.quantised import values
from holdfast.models.checkpoint import choose_placement, load_model, open_checkpoint
from holdfast.models.fields import ConfigurationError
from holdfast.models.gguf_metadata import GgufFile, open_source
from holdfast.models.gguf_metadata import describe as describe_file
from holdfast.models.weights import Placement
from tests.models.gguf_files import finish, interleave
from tests.models.paged import PagedRunner, Sequence

CPU = Placement(torch.device("cpu"), torch.float32)
SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
GRANITE: dict[str, Any] = {
    **MAMBA,
    "shared_intermediate_size": 96,
    "layer_types": ["mamba", "attention", "mamba", "attention"],
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.5,
    "position_embedding_type": "nope",
}
SCAN = {
    "in_proj.weight": "ssm_in.weight",
    "conv1d.weight": "ssm_conv1d.weight",
    "conv1d.bias": "ssm_conv1d.bias",
    "dt_bias": "ssm_dt.bias",
    "A_log": "ssm_a",
    "D": "ssm_d",
    "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight",
}
ATTENTION = {
    "q_proj.weight": "attn_q.weight",
    "k_proj.weight": "attn_k.weight",
    "v_proj.weight": "attn_v.weight",
    "o_proj.weight": "attn_output.weight",
    "q_norm.weight": "attn_q_norm.weight",
    "k_norm.weight": "attn_k_norm.weight",
}
WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "model.final_layernorm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
FILES: dict[str, dict[str, str]] = {
    "granite": {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"},
    "falcon-h1": {"input_layernorm": "attn_norm", "pre_ff_layernorm": "ffn_norm"},
    "qwen3next": {"input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm"},
    "olmo2": {
        "post_attention_layernorm": "post_attention_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
}
FILES["granitehybrid"] = FILES["granite"]
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "granite": ("granite", "Granite", {key: GRANITE[key] for key in GRANITE if "multiplier" in key}),
    "granite 4": ("granitehybrid", "GraniteMoeHybrid", {**GRANITE, "num_local_experts": 0}),
    "granite 4 with experts": (
        "granitehybrid",
        "GraniteMoeHybrid",
        {**GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32},
    ),
    "falcon-h1": (
        "falcon-h1",
        "FalconH1",
        {
            **MAMBA,
            "mamba_d_ssm": 128,
            "head_dim": 32,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "ssm_multipliers": [0.5, 1.5, 0.8, 1.2, 0.9],
            "ssm_in_multiplier": 1.3,
            "ssm_out_multiplier": 0.7,
            "attention_in_multiplier": 0.9,
            "attention_out_multiplier": 1.1,
            "key_multiplier": 0.6,
            "mlp_multipliers": [0.8, 1.4],
            "embedding_multiplier": 2.0,
            "lm_head_multiplier": 0.5,
        },
    ),
    "falcon-h1 without a norm": (
        "falcon-h1",
        "FalconH1",
        {**MAMBA, "mamba_d_ssm": 128, "head_dim": 32, "mamba_rms_norm": False},
    ),
    "qwen3-next": (
        "qwen3next",
        "Qwen3Next",
        {
            "head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
            "norm_topk_prob": True,
        },
    ),
    "olmo 2": ("olmo2", "Olmo2", {}),
    "olmo 3": (
        "olmo2",
        "Olmo3",
        {
            "sliding_window": 9,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 5000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
        },
    ),
}


def build(case: str, **more: object) -> PreTrainedModel:
    _, name, changes = CASES[case]
    torch.manual_seed(2)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **changes, **more})
    model: PreTrainedModel = getattr(transformers, f"{name}ForCausalLM")(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn(parameter.shape)
    return model


def describe(writer: gguf.GGUFWriter, model: PreTrainedModel, kind: str) -> None:
    config: Any = model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters or {"rope_theta": 10_000.0}
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if kind == "granitehybrid":
        writer.add_head_count_kv(
            [config.num_key_value_heads * (each == "attention") for each in GRANITE["layer_types"]]
        )
        writer.add_rope_scaling_finetuned(False)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
    if kind in ("falcon-h1", "qwen3next"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if kind.startswith("granite"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if kind in ("granitehybrid", "falcon-h1"):
        writer.add_ssm_conv_kernel(4)
        writer.add_ssm_inner_size(128)
        writer.add_ssm_state_size(16)
        writer.add_ssm_time_step_rank(4)
        writer.add_ssm_group_count(2)
    if kind == "granitehybrid" and config.num_local_experts:
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    if kind == "qwen3next":
        writer.add_ssm_conv_kernel(4)
        writer.add_ssm_inner_size(64)
        writer.add_ssm_state_size(16)
        writer.add_ssm_time_step_rank(4)
        writer.add_ssm_group_count(2)
        writer.add_full_attention_interval(4)
        writer.add_rope_dimension_count(int(config.head_dim * 0.25))
        writer.add_expert_count(4)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(32)
        writer.add_expert_shared_feed_forward_length(64)
    if config.model_type == "olmo3":
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([each == "sliding_attention" for each in config.layer_types])
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def scan_tensor(part: str, tensor: Tensor, groups: int) -> Tensor:
    """A tensor of a Mamba2 layer as files have it."""
    if part == "A_log":
        return -tensor.exp()[:, None]
    if part == "D":
        return tensor[:, None]
    if part == "conv1d.weight":
        return tensor.squeeze(1)
    return tensor.reshape(groups, -1) if part == "norm.weight" else tensor


def granite_tensors(part: str, tensor: Tensor, config: Any) -> dict[str, Tensor]:
    if part.startswith("mamba."):
        inner = part.removeprefix("mamba.")
        return {SCAN[inner]: scan_tensor(inner, tensor, 2)}
    if part.startswith("self_attn."):
        name = part.removeprefix("self_attn.")
        heads = {"q_proj.weight": 4, "k_proj.weight": 2}.get(name)
        turned = tensor if heads is None else torch.from_numpy(interleave(tensor.numpy(), heads))
        return {ATTENTION[name]: turned}
    ending = "_shexp" if "num_local_experts" in config.to_dict() and config.num_local_experts else ""
    gate_up = {"shared_mlp.input_linear.weight": ending, "block_sparse_moe.experts.gate_up_proj": "_exps"}
    if part in gate_up:
        gate, up = tensor.chunk(2, dim=-2)
        return {f"ffn_gate{gate_up[part]}.weight": gate, f"ffn_up{gate_up[part]}.weight": up}
    others = {
        "shared_mlp.output_linear.weight": f"ffn_down{ending}.weight",
        "block_sparse_moe.experts.down_proj": "ffn_down_exps.weight",
        "block_sparse_moe.router.weight": "ffn_gate_inp.weight",
        "mlp.gate_proj.weight": "ffn_gate.weight",
        "mlp.up_proj.weight": "ffn_up.weight",
        "mlp.down_proj.weight": "ffn_down.weight",
    }
    return {others[part]: tensor}


def falcon_tensors(part: str, tensor: Tensor, config: Any) -> dict[str, Tensor]:
    """With the multipliers in the weights."""
    if part.startswith("mamba."):
        inner = part.removeprefix("mamba.")
        if inner == "in_proj.weight":
            sizes = [128, 128, 32, 32, 4]
            rows = zip(tensor.split(sizes), config.ssm_multipliers, strict=True)
            tensor = config.ssm_in_multiplier * torch.cat([each * factor for each, factor in rows])
        elif inner == "out_proj.weight":
            tensor = config.ssm_out_multiplier * tensor
        return {SCAN[inner]: scan_tensor(inner, tensor, 2)}
    name = part.removeprefix("self_attn.")
    gate, down = config.mlp_multipliers
    factors = {
        "q_proj.weight": config.attention_in_multiplier,
        "k_proj.weight": config.attention_in_multiplier * config.key_multiplier,
        "v_proj.weight": config.attention_in_multiplier,
        "o_proj.weight": config.attention_out_multiplier,
        "feed_forward.gate_proj.weight": gate,
        "feed_forward.down_proj.weight": down,
    }
    mlp = {f"feed_forward.{each}_proj.weight": f"ffn_{each}.weight" for each in ("gate", "up", "down")}
    return {(ATTENTION | mlp)[name]: tensor * factors.get(name, 1.0)}


def next_tensors(part: str, tensor: Tensor, config: Any) -> dict[str, Tensor]:
    if part.startswith("linear_attn."):
        inner = part.removeprefix("linear_attn.")
        if inner == "in_proj_qkvz.weight":
            heads = tensor.view(2, -1, tensor.shape[1])
            query, key, value, gate = heads.split([16, 16, 32, 32], dim=1)
            flat = [each.reshape(-1, tensor.shape[1]) for each in (query, key, value)]
            return {"attn_qkv.weight": torch.cat(flat), "attn_gate.weight": gate.reshape(-1, tensor.shape[1])}
        if inner == "in_proj_ba.weight":
            return {"ssm_ba.weight": tensor}
        made = scan_tensor(inner, tensor, 1)
        return {SCAN[inner]: made.reshape(-1) if inner in ("A_log", "norm.weight") else made}
    if part.startswith("self_attn."):
        return {ATTENTION[part.removeprefix("self_attn.")]: tensor}
    if part == "mlp.experts.gate_up_proj":
        gate, up = tensor.chunk(2, dim=1)
        return {"ffn_gate_exps.weight": gate, "ffn_up_exps.weight": up}
    others = {
        "mlp.experts.down_proj": "ffn_down_exps.weight",
        "mlp.gate.weight": "ffn_gate_inp.weight",
        "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    } | {
        f"mlp.shared_expert.{each}_proj.weight": f"ffn_{each}_shexp.weight" for each in ("gate", "up", "down")
    }
    return {others[part]: tensor.reshape(-1) if part == "mlp.shared_expert_gate.weight" else tensor}


def olmo_tensors(part: str, tensor: Tensor, _config: Any) -> dict[str, Tensor]:
    mlp = {f"mlp.{each}_proj.weight": f"ffn_{each}.weight" for each in ("gate", "up", "down")}
    return {(mlp | ATTENTION)[part.removeprefix("self_attn.")]: tensor}


LAYERS: dict[str, Callable[[str, Tensor, Any], dict[str, Tensor]]] = {
    "granite": granite_tensors,
    "granitehybrid": granite_tensors,
    "falcon-h1": falcon_tensors,
    "qwen3next": next_tensors,
    "olmo2": olmo_tensors,
}


def file_tensors(name: str, tensor: Tensor, model: PreTrainedModel, kind: str) -> dict[str, Tensor]:
    config: Any = model.config
    if name in WHOLE:
        if kind == "falcon-h1":
            factors = {"model.embed_tokens.weight": config.embedding_multiplier}
            factors["lm_head.weight"] = config.lm_head_multiplier
            tensor = tensor * factors.get(name, 1.0)
        made = {WHOLE[name]: tensor}
    else:
        _, _, layer, part = name.split(".", 3)
        norm = FILES[kind].get(part.removesuffix(".weight"))
        found = {f"{norm}.weight": tensor} if norm else LAYERS[kind](part, tensor, config)
        made = {f"blk.{layer}.{theirs}": each for theirs, each in found.items()}
    if kind == "qwen3next":
        return {
            theirs: each + 1 if "norm" in theirs and "ssm_norm" not in theirs else each
            for theirs, each in made.items()
        }
    return made


def write(
    model: PreTrainedModel, path: Path, kind: str, matrices: Kind = Kind.F32, without: str = ""
) -> None:
    writer = gguf.GGUFWriter(path, kind)
    describe(writer, model, kind)
    for name, tensor in model.state_dict().items():
        for theirs, each in file_tensors(name, tensor, model, kind).items():
            values = np.ascontiguousarray(each.numpy().astype(np.float32))
            if without and without in theirs:
                continue
            if matrices is Kind.F32 or values.ndim < 2 or values.shape[-1] % 32 or "ffn_gate_inp" in theirs:
                writer.add_tensor(theirs, values)
            else:
                writer.add_tensor(theirs, gguf.quantize(values, matrices), raw_dtype=matrices)
    finish(writer)


def logits(path: Path, placement: Placement, tokens: list[int]) -> Tensor:
    runner = PagedRunner(load_model(open_checkpoint(path), placement), 16)
    return runner.run([(Sequence(), tokens)])[0]


@pytest.mark.parametrize("case", CASES)
def test_a_file_means_the_model_that_was_written(tmp_path: Path, case: str) -> None:
    model, path, kind = build(case), tmp_path / "model.gguf", CASES[case][0]
    write(model, path, kind)
    tokens = torch.randint(160, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([tokens]), use_cache=False).logits[0]
    assert float((logits(path, CPU, tokens) - expected).abs().max() / expected.abs().max()) <= 1e-4


@pytest.mark.parametrize("case", CASES)
def test_codes_of_joined_and_reordered_matrices_mean_the_dense_ones(tmp_path: Path, case: str) -> None:
    path = tmp_path / "model.gguf"
    write(build(case), path, CASES[case][0], Kind.Q4_0)
    file = GgufFile(path)
    source = open_source(file, describe_file(file))
    packed = {name: codes for name in source.names() if (codes := source.codes(name)) is not None}
    assert packed
    for name, codes in packed.items():
        assert torch.equal(values(codes), source.read(name)), name
    assert choose_placement(open_checkpoint(path), torch.device("cpu")).quantised


def test_a_missing_part_of_a_joined_tensor_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(build("granite 4"), path, "granitehybrid", without="blk.1.ffn_up")
    with pytest.raises(ConfigurationError, match=r"layers\.1\.shared_mlp\.input_linear"):
        load_model(open_checkpoint(path), CPU)


def test_experts_without_a_shared_mlp_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(build("granite 4 with experts"), path, "granitehybrid", without="ffn_gate_shexp")
    with pytest.raises(ConfigurationError, match="without a shared MLP"):
        open_checkpoint(path)
