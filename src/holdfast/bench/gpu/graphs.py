"""Timing on the GPU with CUDA graphs, and the ceilings that rooflines are computed from.

A timing captures several calls in one graph, which also shows that the call never waits for the host, and
takes the median of replays.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch

__all__ = ["REPLAYS", "Ceilings", "graph_of", "measure_ceilings", "require_gpu", "seconds"]

REPEATS = 20
REPLAYS = 5


def require_gpu() -> None:
    """End the process if there is no CUDA device."""
    if not torch.cuda.is_available():
        sys.exit("no CUDA device found: this benchmark needs an NVIDIA GPU")


def graph_of(call: Callable[[], object], repeats: int) -> torch.cuda.CUDAGraph:
    """A CUDA graph of `repeats` calls, captured after a warm-up."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    return graph


def seconds(call: Callable[[], object], repeats: int = REPEATS) -> float:
    """The median time of one call in a graph of several."""
    graph = graph_of(call, repeats)
    graph.replay()
    times: list[float] = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / repeats)
    return statistics.median(times)


class Ceilings(NamedTuple):
    """What the GPU reaches at most: bytes per second of a copy, operations per second of a matrix product."""

    bandwidth: float
    rate: float


def measure_ceilings() -> Ceilings:
    """Measure a large copy (read and written) and a large bfloat16 matrix product."""
    source = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    bandwidth = 4 * source.numel() / seconds(lambda: torch.neg(source, out=target), 5)
    left = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    right = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    rate = 2 * 8192**3 / seconds(lambda: torch.mm(left, right), 5)
    return Ceilings(bandwidth, rate)
