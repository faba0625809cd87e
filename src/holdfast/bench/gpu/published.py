"""Shapes of models as they are published: mixtures of experts, and weights of four and eight bits.

Configurations as in the checkpoints' config.json, with dummy codes in place of the weights.
"""

from __future__ import annotations

__all__ = ["FP8", "MXFP4", "PUBLISHED", "W4A16", "quantised"]

W4A16: dict[str, object] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "strategy": "group",
                "group_size": 128,
                "symmetric": True,
            },
        }
    },
    "ignore": ["lm_head", "re:.*mlp.gate$", "re:.*shared_expert_gate$"],
}
FP8: dict[str, object] = {
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}
MXFP4: dict[str, object] = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}

QWEN3_30B: dict[str, object] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
}

QWEN3_NEXT_80B: dict[str, object] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_hidden_layers": 48,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "partial_rotary_factor": 0.25,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
}

LLAMA_70B: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 128009,
}


def quantised(shape: dict[str, object], how: dict[str, object], **changed: object) -> dict[str, object]:
    """A shape whose checkpoint is quantised, with some fields changed."""
    return {**shape, **changed, "quantization_config": how}


PUBLISHED = {
    "qwen3-30b-a3b": QWEN3_30B,
    "qwen3-30b-a3b-w4a16": quantised(QWEN3_30B, W4A16),
    "qwen3-30b-a3b-fp8": quantised(QWEN3_30B, FP8),
    "qwen3-next-80b-a3b-w4a16": quantised(QWEN3_NEXT_80B, W4A16),
    "llama-3.1-70b-w4a16": quantised(LLAMA_70B, W4A16),
}
"""By name; those of shapes in `shapes` are added there."""
