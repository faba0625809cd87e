"""Copies between tiers that take as long as a test wants them to."""

import math
from collections.abc import Sequence

from holdfast.engine.engine import Engine
from holdfast.engine.tiers.host import Load, Mark, copy_at_once


class SlowCopy:
    """A copy that reads and writes in its last moment: nothing may have been changed by then."""

    def __init__(self, parcel: Sequence[Load], patience: int) -> None:
        self.parcel = parcel
        self.patience = patience
        self.over = False

    def query(self) -> bool:
        self.patience -= 1
        if self.patience < 0:
            self.synchronize()
        return self.over

    def synchronize(self) -> None:
        if not self.over:
            copy_at_once(self.parcel)
            self.over = True


class SlowWay:
    """Copies that are over after they have been asked about so often; what is under way is no number."""

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.copies: list[SlowCopy] = []
        self.ordered = 0

    def carry(self, parcel: Sequence[Load]) -> Mark:
        for load in parcel:
            load.target[load.targets] = math.nan
        self.copies.append(SlowCopy(parcel, self.patience))
        return self.copies[-1]

    def order(self, mark: Mark) -> None:
        mark.synchronize()
        self.ordered += 1


def slow_down(engine: Engine, patience: int) -> SlowWay:
    """Have an engine's copies take their time."""
    engine.loop.executor.carrier.way = way = SlowWay(patience)
    return way
