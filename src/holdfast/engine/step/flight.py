"""A launched step, from its start to its result. Used by the executor and by what samples for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from holdfast.core.registry import Plan
from holdfast.engine.step.inputs import Sample, Views
from holdfast.engine.step.masks import StepMasks
from holdfast.engine.step.sampler import Sampled
from holdfast.engine.step.staging import Arrival

__all__ = ["Flight", "Forwarded", "Unsampled"]


class Forwarded(NamedTuple):
    """A step's inputs and hidden states on the device; from a graph also logits and tokens of its samples.

    `features` are the residual streams that the model was asked for, if any.
    """

    given: Views
    hidden: Tensor
    logits: Tensor | None = None
    tokens: Tensor | None = None
    features: tuple[Tensor, ...] = ()


class Unsampled(NamedTuple):
    """A launched step that is still to be sampled. `plain` if its rows need only their parameters."""

    samples: list[Sample]
    given: Views
    logits: Tensor
    tokens: Tensor | None
    """What a graph has sampled, without masks."""
    plain: bool


@dataclass(slots=True)
class Flight:
    """A launched step: its samples, on their way to the host."""

    plan: Plan
    sampled: Sampled | None
    tokens: Arrival | None
    places: list[tuple[int, int, int]]
    """For each sampling row: its index in the plan, and the first and end index of its samples."""
    unsampled: Unsampled | None = None
    masks: StepMasks | None = None
    """Of a step with constrained turns."""
