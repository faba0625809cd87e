"""From a path to a model: format, family and configuration first, then the weights.

`open_checkpoint` reads the description of a Hugging Face directory or a GGUF file, without any weight;
`load_model` reads the weights. Unsupported checkpoints are rejected by name. Called by the engine.
"""

from __future__ import annotations

import importlib
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from holdfast.kernels.cpu.matrix import GROUP
from holdfast.models.available import available_bytes
from holdfast.models.blocks import Family, Team
from holdfast.models.config import ModelConfig
from holdfast.models.families import family_of
from holdfast.models.fields import ConfigurationError, Fields, Json, reading
from holdfast.models.generation import GenerationDefaults, ends_of, read_generation_defaults
from holdfast.models.model import Model
from holdfast.models.quantised.forms import Layout, Quantisation, read_quantisation
from holdfast.models.ranks import Group
from holdfast.models.sharding import Sharding
from holdfast.models.sources import SafetensorsSource, Source
from holdfast.models.weights import Placement, Progress, RankPart, WeightReader

log = logging.getLogger("holdfast.models")

_DENSE_GROWTH = 8
"""Size of float32 relative to four bits."""

_DENSE_SHARE = 0.25
"""Share of the available memory that dense copies of quantised weights may take."""

_PACKED_SHARE = 0.125
"""Share of the free device memory that packed 12-bit weights take by default."""

_PACKING_BYTES = 2 << 30
"""Working memory of packing one weight."""

_LAYERS_MAX = 4096
"""An upper bound far above any model: layers are described before any weight is looked for."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk, described. `metadata` is that of a GGUF file; None for a directory."""

    path: Path
    family: Family
    config: ModelConfig
    generation: GenerationDefaults
    metadata: dict[str, Json] | None
    gguf_source: Source | None
    quantisation: Quantisation | None = None
    """How a directory's weights are quantised."""

    def source(self) -> Source:
        """The tensors of the checkpoint."""
        return SafetensorsSource(self.path) if self.gguf_source is None else self.gguf_source


def open_checkpoint(path: Path) -> Checkpoint:
    """Read the description of a Hugging Face directory or a GGUF file."""
    if path.is_dir():
        return _open_directory(path)
    if path.is_file() and path.suffix == ".gguf":
        return _open_gguf(path)
    raise ConfigurationError(f"{path} is neither a directory with a config.json nor a .gguf file")


def _open_directory(path: Path) -> Checkpoint:
    if not (path / "config.json").exists():
        raise ConfigurationError(f"{path} has no config.json")
    with reading(path / "config.json"):
        fields = Fields.read(path / "config.json")
        quantisation = read_quantisation(fields, path)
        family, config = _configure(fields)
    generation = read_generation_defaults(path, config)
    return Checkpoint(path, family, config, generation, None, None, quantisation)


def _open_gguf(path: Path) -> Checkpoint:
    # Imported here because most runs do not need the gguf package.
    metadata = importlib.import_module("holdfast.models.gguf_metadata")
    with reading(path):
        file = metadata.GgufFile(path)
        fields: Fields = metadata.describe(file)
        family, config = _configure(fields)
        source: Source = metadata.open_source(file, fields)
    generation = GenerationDefaults(ends_of(config, config.eos_tokens))
    return Checkpoint(path, family, config, generation, file.metadata, source)


def _configure(fields: Fields) -> tuple[Family, ModelConfig]:
    architectures = fields.texts("architectures") if fields.has("architectures") else ()
    if len(architectures) != 1:
        raise ConfigurationError(f"{fields.where} must name one architecture, not {list(architectures)}")
    family = family_of(architectures[0])
    if family.text_config and fields.has("text_config"):
        fields = fields.inner("text_config").with_defaults(fields)
    if (layers := fields.optional_integer("num_hidden_layers") or 0) > _LAYERS_MAX:
        raise ConfigurationError(
            f"{fields.where}: 'num_hidden_layers' is {layers}; at most {_LAYERS_MAX} are supported"
        )
    return family, family.configure(fields, architectures[0])


def choose_placement(checkpoint: Checkpoint, device: torch.device, dtype: str = "auto") -> Placement:
    """Device, dtype and weight form, for a device and a dtype by name.

    `auto` is the checkpoint's own dtype on a GPU. On a CPU it is float32, and weights that the checkpoint
    has in 16 bits or fewer stay so where the C kernels multiply them; without these, quantised ones stay
    quantised, with dense copies where memory is plentiful. An explicit dtype applies to all weights.
    """
    if dtype not in _DTYPES and dtype != "auto":
        raise ConfigurationError(
            f"dtype {dtype!r} is not supported; supported are auto, {', '.join(_DTYPES)}"
        )
    if dtype != "auto":
        return Placement(device, _DTYPES[dtype])
    if device.type != "cpu":
        return Placement(device, _DTYPES.get(checkpoint.config.dtype or "bfloat16", torch.bfloat16))
    source, quantisation = checkpoint.gguf_source, checkpoint.quantisation
    if quantisation is not None and all(form.layout is Layout.FP8 for form in quantisation.forms()):
        return Placement(device, torch.float32)
    if source is None or not any(source.quantised(name) for name in source.names()):
        return Placement(device, torch.float32, quantised=True, dense_copies=False)
    dense_bytes = source.total_bytes * _DENSE_GROWTH
    return Placement(
        device,
        torch.float32,
        quantised=True,
        dense_copies=dense_bytes <= available_bytes() * _DENSE_SHARE,
    )


def load_model(
    checkpoint: Checkpoint,
    placement: Placement,
    *,
    load_format: Literal["auto", "dummy"] = "auto",
    context_length: int | None = None,
    pack_weights: bool | None = None,
    progress: Progress | None = None,
    group: Group | None = None,
) -> Model:
    """Load a model for contexts of at most `context_length` tokens (default: its own).

    `pack_weights` adds packed 12-bit copies of the weights on a GPU with kernels for them (default: where the
    copies take at most an eighth of the free memory). With a `group` the model is this rank's part of it.
    """
    length = checkpoint.config.context_length if context_length is None else context_length
    if length < 1:
        raise ConfigurationError(f"context length must be at least 1, not {length}")
    source = None if load_format == "dummy" else checkpoint.source()
    team = None if group is None else Team(Sharding(group.ranks, unit_of(checkpoint)), group)
    part = None if team is None else RankPart(team.sharding.ranks, team.sharding.cuts)
    reader = WeightReader(source, placement, progress, checkpoint.quantisation, part)
    model = Model(checkpoint.family, checkpoint.config, reader, length, team)
    packed = 0
    if placement.device.type == "cuda" and pack_weights is not False:
        free, _ = torch.cuda.mem_get_info(placement.device)
        packed = model.pack_weights(room_to_pack(free, pack_weights))
        log.info("packed 12-bit weights: %.1f GB", packed / 1e9)
    if pack_weights and not packed:
        log.warning("no weights are packed: no kernel for them on this device, or not enough free memory")
    return model


def unit_of(checkpoint: Checkpoint) -> int:
    """The columns that widths are cut between: those that share a scale in quantised weights."""
    if checkpoint.quantisation is not None:
        forms = checkpoint.quantisation.forms()
        return math.lcm(*(max(8, form.group or 1) for form in forms)) if forms else 1
    source = checkpoint.gguf_source
    return GROUP if source is not None and any(map(source.quantised, source.names())) else 1


def room_to_pack(free: int, wanted: bool | None) -> int:
    """Bytes that packed weights may take of the free memory; `wanted`: explicitly requested."""
    return max(0, free - _PACKING_BYTES) if wanted else int(free * _PACKED_SHARE)
