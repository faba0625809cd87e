"""What models compute over several ranks: sums, norms whose channels several ranks have, and the vocabulary.

A model in tensor parallelism is one model per rank, each with a part of every layer (`sharding`). Parts give
partial sums, which `Model.forward` adds up over the ranks after each block. The rest of what crosses ranks
is here. Built by `blocks` and `model`; a `Group` comes from the engine.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from holdfast.models.linear import Embedding

__all__ = ["CutEmbedding", "Group", "Ranks", "SpreadNorm", "Vocabulary"]


class Ranks(NamedTuple):
    """Which rank this is, of how many."""

    rank: int = 0
    size: int = 1


class Group(Protocol):
    """The ranks of one model; every call is made by all of them, in the same order."""

    @property
    def ranks(self) -> Ranks: ...

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in place where x is contiguous."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """The tensors of all ranks, which have one shape, along a new first dimension."""
        ...

    def broadcast(self, x: Tensor) -> None:
        """Overwrite x, which is contiguous, with that of rank 0."""
        ...


class SpreadNorm:
    """RMS norms over sets of channels of which each rank has some.

    `share` [channels, sets] has, for each channel of this rank, its part of the mean of its set: one over the
    set's size, and less where several ranks have a copy of the channel.
    """

    def __init__(self, group: Group, share: Tensor, weight: Tensor, epsilon: float) -> None:
        self._group = group
        self._share = share
        self._members = (share > 0).to(share.dtype).T.contiguous()
        self._weight = weight
        self._epsilon = epsilon

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, channels] normed, in float32."""
        values = x.float()
        means = self._group.sum(values.square() @ self._share)
        return values * (torch.rsqrt(means + self._epsilon) @ self._members) * self._weight


class Vocabulary(NamedTuple):
    """The part of the vocabulary whose embeddings and logits a rank has: `each` tokens but for the last."""

    total: int
    each: int
    first: int
    size: int

    def logits(self, part: Tensor, group: Group) -> Tensor:
        """All logits [rows, total] from the parts of all ranks."""
        if self.size < self.each:
            part = torch.nn.functional.pad(part, (0, self.each - self.size))
        parts = group.gather(part.contiguous())
        return parts.transpose(0, 1).reshape(part.shape[0], -1)[:, : self.total]


class CutEmbedding:
    """A token embedding of which each rank has some rows."""

    def __init__(self, rows: Embedding, vocabulary: Vocabulary, group: Group) -> None:
        self._rows = rows
        self._vocabulary = vocabulary
        self._group = group

    def __call__(self, tokens: Tensor) -> Tensor:
        first, size = self._vocabulary.first, self._vocabulary.size
        own = (tokens >= first) & (tokens < first + size)
        rows = self._rows((tokens - first).clamp(0, size - 1))
        return self._group.sum(rows.masked_fill(~own[:, None], 0.0))
