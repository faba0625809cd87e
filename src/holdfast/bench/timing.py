"""How the benchmark measures: thread-CPU time, garbage collector off, medians of interleaved samples.

Thread-CPU time leaves out what other processes take of the machine, medians leave out what an interrupt
adds to a sample, and pairs of samples taken one after the other share whatever the machine does meanwhile.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from time import thread_time_ns

__all__ = ["clock", "collector_off", "median_us", "paired_ratio"]

clock = thread_time_ns


@contextmanager
def collector_off() -> Iterator[None]:
    """Collect once, then keep the garbage collector from running inside the samples."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def median_us(samples: Sequence[int]) -> float:
    """The median of samples in nanoseconds, in microseconds."""
    return median(samples) / 1000


def paired_ratio(numerators: Sequence[int], denominators: Sequence[int]) -> float:
    """The median of the ratios of samples that were taken in pairs."""
    pairs = zip(numerators, denominators, strict=True)
    return median(above / below for above, below in pairs)
