"""From a path to a model: which format, which family, which configuration, then the weights.

`open_checkpoint` looks at a Hugging Face directory or a GGUF file and reads its description, cheaply and
before any weight; `load_model` reads the weights. What cannot be loaded is refused by name. Called by the
engine.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from holdfast.models.blocks import Family
from holdfast.models.config import ModelConfig
from holdfast.models.families import family_of
from holdfast.models.fields import ConfigurationError, Fields, Json
from holdfast.models.generation import GenerationDefaults, read_generation_defaults
from holdfast.models.model import Model
from holdfast.models.weights import Placement, Progress, SafetensorsSource, Source, WeightReader

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk, described. `metadata` is that of a GGUF file, and None for a directory."""

    path: Path
    family: Family
    config: ModelConfig
    generation: GenerationDefaults
    metadata: dict[str, Json] | None
    gguf_source: Source | None

    def source(self) -> Source:
        """Its tensors."""
        return SafetensorsSource(self.path) if self.gguf_source is None else self.gguf_source


def open_checkpoint(path: Path) -> Checkpoint:
    """The description of the model in a Hugging Face directory or a GGUF file."""
    if path.is_dir():
        return _open_directory(path)
    if path.is_file() and path.suffix == ".gguf":
        return _open_gguf(path)
    raise ConfigurationError(f"{path} is neither a directory with a config.json nor a .gguf file")


def _open_directory(path: Path) -> Checkpoint:
    if not (path / "config.json").exists():
        raise ConfigurationError(f"{path} has no config.json")
    fields = Fields.read(path / "config.json")
    if fields.has("quantization_config"):
        method = fields.inner("quantization_config").text("quant_method", "unknown")
        raise ConfigurationError(
            f"{path} is quantised with {method}, which is not supported; "
            "give an unquantised checkpoint or a GGUF file"
        )
    family, config = _configure(fields)
    return Checkpoint(path, family, config, read_generation_defaults(path, config), None, None)


def _open_gguf(path: Path) -> Checkpoint:
    # The gguf package is imported only here: most runs do without it.
    reading = importlib.import_module("holdfast.models.gguf_metadata")
    file = reading.open_file(path)
    fields: Fields = reading.describe(file)
    family, config = _configure(fields)
    source: Source = reading.open_source(file, fields)
    return Checkpoint(path, family, config, GenerationDefaults(config.eos_tokens), file.metadata, source)


def _configure(fields: Fields) -> tuple[Family, ModelConfig]:
    architectures = fields.texts("architectures") if fields.has("architectures") else ()
    if len(architectures) != 1:
        raise ConfigurationError(f"{fields.where} should name one architecture, not {list(architectures)}")
    family = family_of(architectures[0])
    if family.text_config and fields.has("text_config"):
        fields = fields.inner("text_config").with_defaults(fields)
    return family, family.configure(fields, architectures[0])


def choose_dtype(config: ModelConfig, name: str, device: torch.device) -> torch.dtype:
    """The dtype that a name means; `auto` is the checkpoint's own on a GPU and float32 on a CPU."""
    if name == "auto":
        name = "float32" if device.type == "cpu" else (config.dtype or "bfloat16")
    if name not in _DTYPES:
        raise ConfigurationError(f"dtype {name!r} is not supported; supported are auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def load_model(
    checkpoint: Checkpoint,
    placement: Placement,
    *,
    load_format: Literal["auto", "dummy"] = "auto",
    context_length: int | None = None,
    progress: Progress | None = None,
) -> Model:
    """The model with its weights, for contexts of at most `context_length` tokens (default: its own)."""
    length = checkpoint.config.context_length if context_length is None else context_length
    if length < 1:
        raise ConfigurationError(f"a context length of {length} tokens is not possible")
    source = None if load_format == "dummy" else checkpoint.source()
    reader = WeightReader(source, placement, progress)
    return Model(checkpoint.family, checkpoint.config, reader, length)
