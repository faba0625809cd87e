"""The models that `gpu.py` measures, by their shapes alone: weights are dummies.

`SHAPES` are configurations as their checkpoints state them; `small_models` are a few layers of each memory
layout for the checks of tokens.
"""

from __future__ import annotations

import transformers

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
}

NEMOTRON_H_8B = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "num_hidden_layers": 52,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "mlp_hidden_act": "relu2",
    "max_position_embeddings": 40960,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}

GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "attention_bias": True,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 200002,
}

SHAPES = {"qwen3-8b": QWEN3_8B, "nemotron-h-8b": NEMOTRON_H_8B, "gpt-oss-20b": GPT_OSS_20B}


def small_models() -> dict[str, transformers.PretrainedConfig]:
    """A few layers of each layout, with weights large enough that tokens differ."""
    shared = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "initializer_range": 0.3,
    }
    return {
        "dense": transformers.LlamaConfig(**shared),
        "window": transformers.MistralConfig(**shared, sliding_window=24),
        "hybrid": transformers.BambaConfig(
            **shared,
            attn_layer_indices=[1, 3],
            mamba_n_heads=8,
            mamba_d_head=16,
            mamba_d_state=16,
            mamba_expand=2,
        ),
    }
