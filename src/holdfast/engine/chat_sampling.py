"""How answers for people to read are sampled where neither they nor the checkpoint say anything.

`holdfast chat` samples so, and servers tell it to pages (`chat_sampling` of `/v1/models`). Requests that
leave their sampling open are sampled plainly, as by other servers.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

__all__ = ["CHAT_DEFAULTS", "SUGGESTIONS", "chat_defaults"]

CHAT_DEFAULTS: Mapping[str, Any] = MappingProxyType({"temperature": 0.2, "top_p": 0.9})
"""As the makers of SmolLM2 recommend for it."""

SUGGESTIONS = ("temperature", "top_p", "top_k", "min_p")
"""A checkpoint that suggests any of these is sampled as it suggests."""


def chat_defaults(suggested: Mapping[str, Any]) -> dict[str, Any]:
    """What to add to a request, for a checkpoint with these defaults."""
    return {} if any(suggested.get(name) is not None for name in SUGGESTIONS) else dict(CHAT_DEFAULTS)
