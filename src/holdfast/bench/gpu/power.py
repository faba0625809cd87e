"""What a GPU draws, as its driver counts it. A loaded one is held at a limit, and then joules are time.

`gpu_kernels.py --sustained` times kernels in a loop that is long enough for that.
"""

from __future__ import annotations

import ctypes

MULTIPROCESSORS = 1
"""The driver's number for their clock."""


class Meter:
    """The energy and the clock of the first GPU."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._device = ctypes.c_void_p()
        self._ask("nvmlInit_v2")
        self._ask("nvmlDeviceGetHandleByIndex_v2", 0, ctypes.byref(self._device))

    def joules(self) -> float:
        """Since the driver was loaded."""
        counted = ctypes.c_ulonglong()
        self._ask("nvmlDeviceGetTotalEnergyConsumption", self._device, ctypes.byref(counted))
        return counted.value / 1e3

    def megahertz(self) -> int:
        """The multiprocessors' clock, now."""
        clock = ctypes.c_uint()
        self._ask("nvmlDeviceGetClockInfo", self._device, MULTIPROCESSORS, ctypes.byref(clock))
        return clock.value

    def _ask(self, name: str, *given: object) -> None:
        status = getattr(self._library, name)(*given)
        if status != 0:
            raise OSError(f"{name} answers {status}: the driver does not count this GPU's energy")
