"""What rank 0 tells the other ranks of a model: everything that it does on its device, before it does it.

Each rank does the same to its own part of the memory and the model, in the same order. A call whose work has
sums over the ranks in it (a step, a capture, logits) is followed by `done`; if the work fails in between, the
ranks no longer agree, and `require` says so. `ranks.crew` implements it; used by the executor and the tiers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from holdfast.core.plan import TierMove
from holdfast.engine.step.inputs import Limits, Shape, Words
from holdfast.engine.step.tables import TableForm

__all__ = ["Lead", "StepCall"]


class StepCall(NamedTuple):
    """A step, beside its words: its shape, the form of the tables, and its limits; without, it is a graph."""

    shape: Shape
    limits: Limits | None
    tables: TableForm


class Lead(Protocol):
    """Tells the other ranks."""

    def step(self, call: StepCall, words: Words) -> None:
        """The words of a step, with the changes of tables behind them."""

    def logits(self, first: int, count: int) -> None:
        """Logits of some hidden states of the step that ran last are computed."""

    def take(self, tokens: Tensor) -> Tensor:
        """The tokens that were sampled last, for the rows that follow; returns them."""

    def copy(self, name: str, sources: list[int], destinations: list[int]) -> None:
        """Units of a component are copied."""

    def move(self, moves: Sequence[TierMove]) -> None:
        """Units are copied between the device and the host."""

    def fence(self, numbers: Sequence[int]) -> None:
        """Later launches may use the units of these moves."""

    def moved_states(self, wakes: bool, pairs: list[tuple[int, int]]) -> None:
        """States wake, or are put to rest in eight bits."""

    def prepare_graphs(self) -> None:
        """CUDA graphs are going to be captured."""

    def capture(self, shape: Shape) -> None:
        """A CUDA graph is captured."""

    def done(self) -> None:
        """The work of the last call has succeeded."""

    def require(self) -> None:
        """Raise `DeviceLost` if the ranks no longer agree, or one has ended."""

    def close(self) -> None:
        """No more calls follow: the other ranks end."""
