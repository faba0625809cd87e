"""Constant kernel arguments: bundles of weights, constants and tables that do not change between steps.

A model builds its own when its weights are loaded, the executor builds the tables; kernels only read them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch


@dataclass(frozen=True, slots=True)
class Rotation:
    """Preparation of queries and keys: a norm over each head, then the rotary embedding.

    `cos_sin` is `[positions, rotary_dim]`, cosines then sines (preferably float32); dimension i is paired
    with dimension `i + rotary_dim / 2`, and dimensions from `rotary_dim` on pass through. None: no rotation.
    `query_norm` and `key_norm` are weights [dim]; None: no norm.
    """

    cos_sin: torch.Tensor | None = None
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None
    eps: float = 1e-6
    norm_offset: float = 0.0  # added to the norm weights


@dataclass(frozen=True, slots=True)
class Mamba2Weights:
    """The constants of a Mamba2 recurrence, one value per head.

    `chunk_size` bounds the chunks of long rows; it does not change the result.
    """

    A: torch.Tensor  # [heads], negative
    D: torch.Tensor | None = None  # [heads]: y gains D * x
    dt_bias: torch.Tensor | None = None  # [heads]: added to dt before the softplus
    dt_limit: tuple[float, float] = (0.0, math.inf)  # bounds of dt after the softplus
    chunk_size: int = 128


@dataclass(frozen=True, slots=True)
class StepTables:
    """Per-sequence state on the device: block tables, and the last sampled token of each sequence.

    `reserved_full` and `reserved_window` are units without an owner: padding rows read and write them.
    """

    sampled: torch.Tensor  # int64 [table rows]
    full: torch.Tensor | None  # int32 [table rows, pages]
    window: torch.Tensor | None  # int32 [table rows, pages]
    reserved_full: int
    reserved_window: int


RouterKind: TypeAlias = Literal["softmax_then_top", "top_then_softmax", "sigmoid_in_groups"]


class RouterForm(NamedTuple):
    """How a router turns logits into picks and their shares.

    `softmax_then_top`: the best of the softmax; `top_then_softmax`: the softmax of the best, of logits plus
    bias; `sigmoid_in_groups`: shares are sigmoids, and the bias takes part in the choice alone, among the
    experts of the best groups (by the sum of a group's two best).
    """

    kind: RouterKind
    picks: int
    normalise: bool = False  # shares add up to 1
    scale: float = 1.0  # of shares
    groups: int = 1
    groups_kept: int = 1


class TokenMasks(NamedTuple):
    """Which tokens may be sampled, as packed bits.

    `words` int32 [n, words]: bit `t % 32` of word `t // 32` of a mask allows token t. `rows` int32 has the
    mask of each row of logits, -1 for none.
    """

    words: torch.Tensor
    rows: torch.Tensor
