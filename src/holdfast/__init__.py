"""Holdfast: an LLM inference server for long-lived streaming sessions.

Importing this package is cheap: it imports no torch and none of the packages below it. `Engine` and
`Sampling` are loaded when they are first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.engine.engine import Engine
    from holdfast.engine.sampling import Sampling

__all__ = ["Engine", "Sampling", "__version__"]

__version__ = "0.1.0"

_LAZY = {"Engine": "holdfast.engine.engine", "Sampling": "holdfast.engine.sampling"}


def __getattr__(name: str) -> Any:
    """Load the engine only for those who use it."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
