"""Copies between tiers that take as long as a test wants them to."""

import math
from collections.abc import Sequence

from holdfast.engine.engine import Engine
from holdfast.engine.tiers.host import CopyEvent, StorageCopy, copy_units


class SlowCopy:
    """A copy that reads and writes in its last moment: nothing may have been changed by then."""

    def __init__(self, copies: Sequence[StorageCopy], patience: int) -> None:
        self.copies = copies
        self.patience = patience
        self.over = False

    def query(self) -> bool:
        self.patience -= 1
        if self.patience < 0:
            self.synchronize()
        return self.over

    def synchronize(self) -> None:
        if not self.over:
            copy_units(self.copies)
            self.over = True


class SlowCopier:
    """Copies that finish after so many queries; until then their destination is not a number."""

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.copies: list[SlowCopy] = []
        self.fenced = 0

    def copy(self, copies: Sequence[StorageCopy]) -> CopyEvent:
        for each in copies:
            each.target[each.targets] = math.nan
        self.copies.append(SlowCopy(copies, self.patience))
        return self.copies[-1]

    def fence(self, event: CopyEvent) -> None:
        event.synchronize()
        self.fenced += 1


class Queued(SlowCopier):
    """As a GPU has it: what is launched later waits for a copy, whoever launches it does not."""

    def fence(self, event: CopyEvent) -> None:
        self.fenced += 1


def slow_down(engine: Engine, patience: int) -> SlowCopier:
    """Have an engine's copies take their time."""
    engine.loop.executor.host_tier.copier = copier = SlowCopier(patience)
    return copier
