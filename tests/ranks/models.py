"""Models of every family whose heads two and three ranks divide, as directories of random weights."""

from dataclasses import replace
from pathlib import Path

from tests.engine.tiny import write_model
from tests.models.reference import VARIANTS, Variant
from tests.parity.families import FAMILIES

CHANGES: dict[str, dict[str, object]] = {
    "qwen3": {"num_attention_heads": 6, "num_key_value_heads": 1},
    "llama-tied-biased": {},
    "bamba-one-group": {"mamba_n_groups": 1},
    "nemotron-h-latent": {"mamba_num_heads": 6, "mamba_head_dim": 16, "n_groups": 3},
}
OTHERS = {"bamba-one-group": "bamba", "nemotron-h-latent": "nemotron-h-groups"}
"""Further variants: one group of B and C for all ranks, and latent experts with biases."""

NAMES = (*FAMILIES, "llama-tied-biased", *OTHERS)


def variant_of(name: str) -> Variant:
    """The variant of a name, changed so that ranks divide it."""
    found = VARIANTS[OTHERS.get(name, name)]
    return replace(found, arguments={**found.arguments, **CHANGES.get(name, {})})


def write_talking_models(folder: Path) -> dict[str, Path]:
    """A directory for each name, with a tokenizer."""
    paths = write_models(folder)
    for path in paths.values():
        described = (path / "config.json").read_text()
        write_model(path)
        (path / "config.json").write_text(described)
    return paths


def write_models(folder: Path) -> dict[str, Path]:
    """A directory for each name."""
    paths = {name: folder / name for name in NAMES}
    for name, path in paths.items():
        variant_of(name).build().save_pretrained(path, max_shard_size="60KB")
    return paths
