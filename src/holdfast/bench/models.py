"""The models that benchmarks load: a named one, `echo`, or `random-bamba`, which needs no weights.

`random-bamba` is a hybrid model, a Bamba of 8 layers and width 512. Its directory is written here, with a
vocabulary of its own, and is loaded with `--load-format dummy`, which draws random weights: the text that it
generates means nothing, the time that it takes is that of a real model of its size. `write_model` writes such
a directory for any configuration. Each word of the benchmarks' inputs is one token of its vocabulary.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from holdfast.bench.url.load import WORDS
from holdfast.engine.start.pull import ECHO_MODELS, pull

__all__ = ["RANDOM_BAMBA", "BenchModel", "find_model", "write_model", "write_random_bamba"]

RANDOM_BAMBA = "random-bamba"
START, END = "<|start|>", "<|end|>"
VOCABULARY = 32_000
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)

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


@dataclass(frozen=True, slots=True)
class BenchModel:
    """Where a model is, and the load format that it needs (None: the default)."""

    path: Path
    load_format: str | None = None

    def arguments(self) -> tuple[str, ...]:
        """The options of `holdfast serve` that load it."""
        return () if self.load_format is None else ("--load-format", self.load_format)

    def options(self) -> dict[str, Any]:
        """The options of `Engine` that load it."""
        return {} if self.load_format is None else {"load_format": self.load_format}


@contextmanager
def find_model(name: str, cache: str | None = None) -> Iterator[BenchModel]:
    """The model of a path or a name, downloaded into `cache` if need be.

    `random-bamba` exists inside the context only.
    """
    if name == RANDOM_BAMBA:
        with tempfile.TemporaryDirectory() as folder:
            yield BenchModel(write_random_bamba(Path(folder) / name), "dummy")
    elif name in ECHO_MODELS:
        yield BenchModel(Path(name))
    else:
        yield BenchModel(Path(name) if Path(name).exists() else pull(name, cache=cache))


def write_random_bamba(directory: Path) -> Path:
    """Write the model's directory and return it."""
    return write_model(directory, CONFIGURATION)


def write_model(directory: Path, configuration: Mapping[str, object]) -> Path:
    """Write a directory for `--load-format dummy`: a configuration, a vocabulary and a chat template."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(configuration, indent=2))
    size = configuration["vocab_size"]
    assert isinstance(size, int), "a configuration says how large its vocabulary is"
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = [END, *letters, START, *WORDS, *(f"Ġ{word}" for word in WORDS)]
    texts += [f"Ġ{number}" for number in range(size - len(texts))]
    vocabulary = {text: number for number, text in enumerate(texts[:size])}
    encoder = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True) for text in (END, START) if text in vocabulary]
    encoder.add_special_tokens(special)
    encoder.save(str(directory / "tokenizer.json"))
    described = {"eos_token": END, "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(described))
    return directory
