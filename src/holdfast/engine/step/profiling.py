"""The cost of a step beside weights and pools, measured.

`measure_step` runs a step on a GPU, over unowned pages, and returns its peak memory and its time. This also
compiles the kernels of large steps. Called by `memory_plan`.
"""

from __future__ import annotations

import gc
import time

import torch

from holdfast.engine.start.tuning import StepCost
from holdfast.kernels import Batch, build_batch
from holdfast.models.memory import MemoryTypes, UnitCounts
from holdfast.models.model import Model


@torch.inference_mode()
def measure_step(
    model: Model, tokens: int, page_size: int, rows_max: int, types: MemoryTypes, *, timed: bool
) -> StepCost:
    """The peak bytes of activations and logits of a step, and its seconds if `timed`.

    It has one decode row, so that both kinds of kernels run, and prefill rows no longer than the context.
    """
    counts = row_counts(tokens, model.context_length)
    pages = sum(-(-count // page_size) for count in counts)
    shape = model.memory_shape
    memory = model.memory(
        UnitCounts(
            pages if shape.full is not None else 0,
            pages if shape.window is not None else 0,
            len(counts) if shape.state is not None else 0,
            len(counts) if shape.state is not None else 0,
        ),
        page_size,
        types,
    )
    torch.cuda.synchronize(model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    batch = _batch(model, page_size, counts)
    hidden = model.forward(batch, memory)
    logits = model.logits(hidden[: min(rows_max, tokens)]).float()
    torch.log_softmax(logits, dim=-1)
    torch.cuda.synchronize(model.device)
    peak = torch.cuda.max_memory_allocated(model.device) - before
    seconds = 0.0
    if timed:
        began = time.perf_counter()
        model.forward(batch, memory)
        torch.cuda.synchronize(model.device)
        seconds = time.perf_counter() - began
    del hidden, logits, memory, batch
    gc.collect()
    torch.cuda.empty_cache()
    return StepCost(tokens, peak, seconds)


def row_counts(tokens: int, context_length: int) -> list[int]:
    """The tokens of each row of a measured step: one, and then as few rows as the context allows."""
    whole, rest = divmod(max(1, tokens - 1), context_length)
    return [1, *[context_length] * whole, *([rest] if rest else [])]


def _batch(model: Model, size: int, counts: list[int]) -> Batch:
    """Rows of these lengths from position 0 on, each in its own pages of `size` tokens."""
    shape = model.memory_shape
    units: list[list[int]] = []
    for count in counts:
        first = sum(len(row) for row in units)
        units.append(list(range(first, first + -(-count // size))))
    return build_batch(
        [[0] * count for count in counts],
        [0] * len(counts),
        full_units=units if shape.full is not None else None,
        full_page_size=size,
        window_units=units if shape.window is not None else None,
        window_page_size=size,
        device=model.device,
    )
