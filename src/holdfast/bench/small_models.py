"""Models of a few small layers, one of each memory layout, made with transformers.

Used by `cpu.host_step` and by the GPU's checks of tokens (`tests/gpu`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

__all__ = ["SMALL_MODELS", "saved_small_model"]

SHARED: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    # Large enough that tokens differ.
    "initializer_range": 0.3,
}
SMALL_MODELS: dict[str, transformers.PretrainedConfig] = {
    "dense": transformers.LlamaConfig(**SHARED),
    "window": transformers.MistralConfig(**SHARED, sliding_window=24),
    "hybrid": transformers.BambaConfig(
        **SHARED,
        attn_layer_indices=[1, 3],
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_d_state=16,
        mamba_expand=2,
    ),
}


@contextmanager
def saved_small_model(name: str) -> Iterator[Path]:
    """A directory with one of them, with the same random weights each time."""
    torch.manual_seed(3)
    with tempfile.TemporaryDirectory() as folder:
        transformers.AutoModelForCausalLM.from_config(SMALL_MODELS[name]).save_pretrained(folder)
        yield Path(folder)
