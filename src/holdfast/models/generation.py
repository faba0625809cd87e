"""The checkpoint's default sampling parameters, from generation_config.json.

They apply to fields that a request omits. A greedy checkpoint (`do_sample` false or missing) sets no
temperature. Read by `checkpoint`, used by the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from holdfast.models.config import ModelConfig
from holdfast.models.fields import Fields, reading


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The recommended parameters, None where unset; every one of `eos_tokens` ends a turn."""

    eos_tokens: tuple[int, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def read_generation_defaults(directory: Path, config: ModelConfig) -> GenerationDefaults:
    """The defaults of a directory; without the file, only the configuration's end tokens."""
    path = directory / "generation_config.json"
    if not path.exists():
        return GenerationDefaults(ends_of(config, config.eos_tokens))
    with reading(path):
        return _defaults(Fields.read(path), config)


def ends_of(config: ModelConfig, tokens: tuple[int, ...]) -> tuple[int, ...]:
    """The end tokens inside the vocabulary."""
    return tuple(token for token in tokens if 0 <= token < config.vocabulary)


def _defaults(fields: Fields, config: ModelConfig) -> GenerationDefaults:
    eos = ends_of(config, fields.integers("eos_token_id") or config.eos_tokens)
    penalty = fields.optional_number("repetition_penalty")
    if not fields.flag("do_sample", False):
        return GenerationDefaults(eos, repetition_penalty=penalty)
    return GenerationDefaults(
        eos_tokens=eos,
        temperature=fields.optional_number("temperature"),
        top_p=fields.optional_number("top_p"),
        top_k=fields.optional_integer("top_k", least=-1),
        min_p=fields.optional_number("min_p"),
        repetition_penalty=penalty,
    )
