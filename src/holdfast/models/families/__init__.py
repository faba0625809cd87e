"""The model families, by the architecture names in checkpoints.

One short file per family. `family_of` finds the family of an architecture; an unsupported one is an error
that lists the supported ones.
"""

from __future__ import annotations

from holdfast.models.blocks import Family
from holdfast.models.families import (
    bamba,
    falcon_h1,
    gemma3,
    gpt_oss,
    granite_hybrid,
    llama,
    mamba2,
    mistral,
    nemotron_h,
    olmo3,
    qwen,
    qwen3_moe,
    qwen3_next,
)
from holdfast.models.fields import ConfigurationError

_FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    mistral.FAMILY,
    qwen.QWEN2,
    qwen.QWEN3,
    qwen3_moe.FAMILY,
    qwen3_next.QWEN3_NEXT,
    qwen3_next.QWEN3_5,
    qwen3_next.QWEN3_5_MULTIMODAL,
    gemma3.TEXT,
    gemma3.MULTIMODAL,
    gpt_oss.FAMILY,
    olmo3.FAMILY,
    mamba2.FAMILY,
    bamba.FAMILY,
    granite_hybrid.FAMILY,
    falcon_h1.FAMILY,
    nemotron_h.FAMILY,
)

_BY_ARCHITECTURE: dict[str, Family] = {
    architecture: family for family in _FAMILIES for architecture in family.architectures
}


class UnsupportedArchitecture(ConfigurationError):
    """No family supports the checkpoint's architecture."""


def supported_architectures() -> tuple[str, ...]:
    """Every architecture name that can be loaded, sorted."""
    return tuple(sorted(_BY_ARCHITECTURE))


def family_of(architecture: str) -> Family:
    """The family of an architecture."""
    family = _BY_ARCHITECTURE.get(architecture)
    if family is None:
        raise UnsupportedArchitecture(
            f"architecture {architecture!r} is not supported; supported are "
            + ", ".join(supported_architectures())
        )
    return family
