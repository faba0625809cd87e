"""The models that `python -m holdfast.bench.gpu` measures: real shapes with dummy weights.

`SHAPES` are configurations as in the checkpoints' config.json.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.bench.gpu.published import FP8, MXFP4, PUBLISHED, W4A16, quantised
from holdfast.bench.loops import open_model
from holdfast.models.model import Model

__all__ = ["DENSE", "SHAPES", "dense_only", "shaped_model"]

QWEN3_8B: dict[str, object] = {
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

NEMOTRON_H_8B: dict[str, object] = {
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

GPT_OSS_20B: dict[str, object] = {
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

DENSE = {"qwen3-8b": QWEN3_8B, "nemotron-h-8b": NEMOTRON_H_8B, "gpt-oss-20b": GPT_OSS_20B}
"""With weights of 16 bits: those that are measured where none is named."""

SHAPES = {
    **DENSE,
    "qwen3-8b-w4a16": quantised(QWEN3_8B, W4A16),
    "qwen3-8b-fp8": quantised(QWEN3_8B, FP8),
    "gpt-oss-20b-mxfp4": quantised(GPT_OSS_20B, MXFP4),
    "gpt-oss-120b-mxfp4": quantised(GPT_OSS_20B, MXFP4, num_hidden_layers=36, num_local_experts=128),
    **PUBLISHED,
}
"""All, by the name that `--model` takes."""


def shaped_model(config: dict[str, object]) -> Model:
    """A model with dummy weights, in bfloat16 on the GPU."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return open_model(Path(folder), "cuda", "bfloat16", dummy=True)


@contextmanager
def dense_only(model: Model) -> Iterator[None]:
    """Inside the context no weight is read in twelve bits."""
    kept = [linear.twelve for linear in model._dense]
    for linear in model._dense:
        linear.twelve = None
    try:
        yield
    finally:
        for linear, twelve in zip(model._dense, kept, strict=True):
            linear.twelve = twelve
