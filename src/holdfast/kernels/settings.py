"""The kernel settings of this process: which of our own kernels run, and where compiled ones are cached.

Kernels are compiled and loaded once per process, so the settings are process-wide too: the engine passes its
options to `holdfast.kernels.configure` before it loads a model. Read by the C and CUDA packages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["KernelSettings", "choose", "chosen"]


@dataclass(frozen=True, slots=True)
class KernelSettings:
    """Switches for the C and CUDA kernels, the C compiler, and the cache that compiled kernels lie in."""

    cpu: bool = True
    cuda: bool = True
    c_compiler: str = "cc"
    cache: Path = field(default_factory=lambda: Path.home() / ".cache" / "holdfast")

    @property
    def kernel_directory(self) -> Path:
        return self.cache / "kernels"


_chosen: KernelSettings | None = None


def chosen() -> KernelSettings:
    """The settings in force."""
    return _chosen or KernelSettings()


def choose(settings: KernelSettings) -> None:
    """Replace the settings; kernels that are already loaded stay."""
    global _chosen  # noqa: PLW0603
    _chosen = settings
