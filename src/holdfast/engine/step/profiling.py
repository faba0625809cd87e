"""The memory of a step beside weights and pools, measured.

`step_bytes` runs the largest step that the options allow on a GPU, over unowned pages, and returns its peak
memory. This also compiles the kernels of large steps. Called by `memory_plan`.
"""

from __future__ import annotations

import gc

import torch

from holdfast.engine.options import EngineOptions
from holdfast.kernels import Batch, build_batch
from holdfast.models.memory import UnitCounts
from holdfast.models.model import Model


@torch.inference_mode()
def step_bytes(model: Model, options: EngineOptions) -> int:
    """Peak bytes of activations and logits of the largest step; 0 on a device without a memory pool."""
    if model.device.type != "cuda":
        return 0
    tokens = max(2, min(options.step_tokens, model.context_length))
    pages = -(-tokens // options.page_size) + 1
    shape = model.memory_shape
    memory = model.memory(
        UnitCounts(
            pages if shape.full is not None else 0,
            pages if shape.window is not None else 0,
            2 if shape.state is not None else 0,
        ),
        options.page_size,
    )
    torch.cuda.synchronize(model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    # One decode row and one prefill row: both kinds of kernels run.
    hidden = model.forward(_batch(model, options, [1, tokens - 1]), memory)
    rows = min(options.max_running, tokens)
    logits = model.logits(hidden[:rows]).float()
    torch.log_softmax(logits, dim=-1)
    torch.cuda.synchronize(model.device)
    peak = torch.cuda.max_memory_allocated(model.device) - before
    del hidden, logits, memory
    gc.collect()
    torch.cuda.empty_cache()
    return peak


def _batch(model: Model, options: EngineOptions, counts: list[int]) -> Batch:
    """Rows of these lengths from position 0 on, each in its own pages."""
    shape, size = model.memory_shape, options.page_size
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
