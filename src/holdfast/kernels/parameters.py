"""What is handed to the kernels unchanged in every step: small bundles of weights, constants and tables.

A model builds its own once, when its weights are loaded, the executor the tables; the kernels only read them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Rotation:
    """How queries and keys are prepared: norms over each head, then the rotary embedding.

    `cos_sin` is `[positions, rotary_dim]`, cosines first, then sines (float32 is best); dimension i turns
    with dimension `i + rotary_dim / 2`, and what lies past `rotary_dim` passes through. None: no rotation.
    `query_norm` and `key_norm` are weights [dim]; None: no norm.
    """

    cos_sin: torch.Tensor | None = None
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None
    eps: float = 1e-6
    norm_offset: float = 0.0  # added to the weights of the norms


@dataclass(frozen=True, slots=True)
class Mamba2Weights:
    """The constants of a Mamba2 recurrence, one value a head.

    `chunk_size` bounds the chunks in which long rows are computed; it does not change the result.
    """

    A: torch.Tensor  # [heads], negative
    D: torch.Tensor | None = None  # [heads]: y gains D * x
    dt_bias: torch.Tensor | None = None  # [heads]: added to dt before the softplus
    dt_limit: tuple[float, float] = (0.0, math.inf)  # bounds of dt after the softplus
    chunk_size: int = 128


@dataclass(frozen=True, slots=True)
class StepTables:
    """What outlives a step on the device: block tables, and the token that each sequence sampled last.

    `reserved_full` and `reserved_window` are units that belong to nobody: rows that only fill up a batch
    write and read there.
    """

    sampled: torch.Tensor  # int64 [table rows]
    full: torch.Tensor | None  # int32 [table rows, pages]
    window: torch.Tensor | None  # int32 [table rows, pages]
    reserved_full: int
    reserved_window: int
