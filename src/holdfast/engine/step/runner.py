"""What runs plans, and how the loop tells an error of one step from the loss of the device.

`Executor` runs plans with a model's weights, `echo` without any. Used by the loop and by `capturing`.
"""

from __future__ import annotations

from typing import Protocol

import torch

from holdfast.core.plan import StepResult
from holdfast.core.registry import Plan
from holdfast.core.turn import Turn
from holdfast.engine.step.flight import Flight
from holdfast.engine.step.graph_order import GraphCounts
from holdfast.engine.step.lead import Lead
from holdfast.engine.tiers.host import HostTier

__all__ = ["DeviceGuard", "DeviceLost", "PlanRunner", "require_device"]


class DeviceLost(RuntimeError):
    """The CUDA context of this process is lost; only a new process can use the GPU again."""


def require_device(device: torch.device) -> None:
    """Raise `DeviceLost` if no later step can succeed, rather than fail every turn from now on.

    After a kernel error every CUDA call of the process fails. The loop's owner exits; sessions are restored
    from the journal by another process.
    """
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except Exception as error:
        raise DeviceLost(f"{device}: the CUDA context is lost") from error


class DeviceGuard:
    """The device of a model and, if it is divided, its other ranks: whether they can go on, and their end."""

    __slots__ = ("device", "lead")

    def __init__(self, device: torch.device, lead: Lead | None = None) -> None:
        self.device = device
        self.lead = lead

    def require(self) -> None:
        """After an error: raise `DeviceLost` if no later step can succeed."""
        if self.lead is not None:
            self.lead.require()
        require_device(self.device)

    def close(self) -> None:
        """No step follows: the other ranks end."""
        if self.lead is not None:
            self.lead.close()


class PlanRunner(Protocol):
    """Runs plans in order; `Executor` does so with a model's weights."""

    host_tier: HostTier
    guard: DeviceGuard

    def start(self, plan: Plan) -> Flight:
        """Launch a step."""

    def sample(self, flight: Flight) -> None:
        """Sample a launched step, if that was left; all steps before it are settled."""

    def finish(self, flight: Flight) -> StepResult:
        """Wait for the step's result."""

    def capture_next(self, missed: bool) -> bool:
        """Capture one more graph, with `missed` one that a step has lacked; False if there is none."""

    def abandon_graphs(self) -> None:
        """Capture no more graphs."""

    @property
    def graphs(self) -> GraphCounts | None:
        """How many graphs are captured, of how many; None without graphs."""

    def release(self, turn: Turn) -> None:
        """Release the resources of a finished turn."""
