"""How benchmarks measure: clocks, pauses of the garbage collector, medians of interleaved samples.

Thread-CPU time excludes other processes, medians exclude outliers, and samples taken in pairs or in rounds
see the same load on the machine.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from time import perf_counter, thread_time_ns
from typing import TypeVar

__all__ = ["clock", "collector_off", "in_turn", "median_us", "paired_ratio", "seconds_of"]

Item = TypeVar("Item")

clock = thread_time_ns


@contextmanager
def collector_off() -> Iterator[None]:
    """Collect once, then keep the garbage collector off."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def seconds_of(act: Callable[[], object]) -> float:
    """The wall-clock time of one call."""
    began = perf_counter()
    act()
    return perf_counter() - began


def in_turn(items: Sequence[Item], number: int) -> list[Item]:
    """The items in the order of round `number`: each round starts with the next item."""
    shift = number % len(items)
    return [*items[shift:], *items[:shift]]


def median_us(samples: Sequence[int]) -> float:
    """The median of samples in nanoseconds, in microseconds."""
    return median(samples) / 1000


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """The median of the ratios of samples that were taken in pairs; unpaired ones are left out."""
    pairs = zip(numerators, denominators, strict=False)
    return median(above / below for above, below in pairs if below)
