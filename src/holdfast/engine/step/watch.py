"""Who is given the hidden states of steps: the proposer of a draft head. Called by the executor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from holdfast.core.plan import Row
from holdfast.core.turn import Turn

__all__ = ["Watch"]


class Watch(Protocol):
    """Receives what a step has computed, when it is launched."""

    def note(self, rows: Sequence[Row[Turn]], features: tuple[Tensor, ...], *, reused: bool) -> None:
        """The tokens of all rows in order, each feature [tokens or more, width].

        With `reused` the next step overwrites the tensors.
        """
