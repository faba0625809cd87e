"""Where kernels are kept that were compiled on this machine. Used by the packages of C and CUDA kernels."""

from __future__ import annotations

import os
from pathlib import Path


def kernel_directory() -> Path:
    """`kernels` in $HOLDFAST_CACHE, or in the user's cache directory: beside the models that are fetched."""
    chosen = os.environ.get("HOLDFAST_CACHE")
    if chosen:
        return Path(chosen).expanduser() / "kernels"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "holdfast" / "kernels"
