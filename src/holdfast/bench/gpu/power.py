"""The power and the clock of the GPU, read through the driver's management library (NVML).

At its power limit a GPU lowers its clock. Used by `holdfast.bench.gpu.kernels --sustained`.
"""

from __future__ import annotations

import ctypes

MULTIPROCESSORS = 1
"""NVML's number of their clock."""


class Meter:
    """The energy and the clock of the first GPU."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._device = ctypes.c_void_p()
        self._ask("nvmlInit_v2")
        self._ask("nvmlDeviceGetHandleByIndex_v2", 0, ctypes.byref(self._device))

    def joules(self) -> float:
        """Energy since the driver was loaded."""
        counted = ctypes.c_ulonglong()
        self._ask("nvmlDeviceGetTotalEnergyConsumption", self._device, ctypes.byref(counted))
        return counted.value / 1e3

    def megahertz(self) -> int:
        """The current clock of the multiprocessors."""
        clock = ctypes.c_uint()
        self._ask("nvmlDeviceGetClockInfo", self._device, MULTIPROCESSORS, ctypes.byref(clock))
        return clock.value

    def _ask(self, name: str, *given: object) -> None:
        status = getattr(self._library, name)(*given)
        if status != 0:
            raise OSError(
                f"{name} failed with status {status}: the driver does not report the energy of this GPU"
            )
