"""A hybrid model to measure where none is at hand: a Bamba of 8 layers and width 512 without weights.

Written as a model directory with a vocabulary of its own, to be loaded with `--load-format dummy`, which
draws the weights. What it says means nothing; what it costs is what such a model costs. Used by benchmarks.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

__all__ = ["RANDOM_BAMBA", "write_random_bamba"]

RANDOM_BAMBA = "random-bamba"
END = "<|end|>"
VOCABULARY = 32_000

CONFIGURATION: dict[str, object] = {
    "architectures": ["BambaForCausalLM"],
    "model_type": "bamba",
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "attn_layer_indices": [3, 7],
    "mamba_n_heads": 16,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 0,
}


def write_random_bamba(directory: Path) -> Path:
    """Write the model's directory and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIGURATION))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġ{number}" for number in range(VOCABULARY - len(letters) - 1)]
    vocabulary = {text: number for number, text in enumerate([END, *letters, *words])}
    encoder = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    encoder.add_special_tokens([AddedToken(END, special=True)])
    encoder.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    return directory
