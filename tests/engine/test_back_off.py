"""Back-off of the disk tier: failed writes pause it for longer each time, a removed file ends a shortage."""

import pytest

from holdfast.core.layout import Component, MemoryLayout, Tier
from holdfast.core.ledger import Ledger, Pool
from holdfast.engine.durable.session_log import SessionLog
from holdfast.engine.tiers.back_off import BACK_OFF_MAX, FAULT_SECONDS, FULL_SECONDS, BackOff, Cause


class Disk:
    """A back-off with a clock that stands still, and a pool of three units."""

    def __init__(self) -> None:
        self.now = 100.0
        self.back_off = BackOff(lambda: self.now, SessionLog(None))
        sizes = {(Component.FULL, Tier.DEVICE): 1, (Component.FULL, Tier.DISK): 3}
        self.pool: Pool = Ledger(MemoryLayout(4), sizes).pool(Component.FULL, Tier.DISK)

    @property
    def admits(self) -> tuple[bool, bool]:
        """Whether a spill, and whether a background snapshot, may be written."""
        return self.back_off.admits(self.pool, 3), self.back_off.admits_background


def test_a_pool_without_enough_units_is_shut() -> None:
    disk = Disk()
    assert disk.admits == (True, True)
    assert not disk.back_off.admits(disk.pool, 4)


@pytest.mark.parametrize("full", [False, True], ids=["failed", "full"])
def test_pauses_double_up_to_a_limit_and_begin_anew_after_a_success(full: bool) -> None:
    disk, first = Disk(), FULL_SECONDS if full else FAULT_SECONDS
    for times in [1, 2, 4, 8, 16, 32, BACK_OFF_MAX, BACK_OFF_MAX]:
        disk.back_off.write_failed(full)
        disk.now += times * first - 0.01
        assert disk.admits == (False, False)
        disk.now += 0.02
        assert disk.admits == (True, True)
    disk.back_off.write_succeeded()
    disk.back_off.write_failed(full)
    disk.now += first
    assert disk.admits == (True, True)


@pytest.mark.parametrize("cause", Cause)
def test_no_room_for_a_background_snapshot_does_not_stop_spills(cause: Cause) -> None:
    disk = Disk()
    disk.back_off.out_of_room(cause)
    assert disk.admits == (cause is Cause.BACKGROUND, False)
    disk.back_off.room_freed()
    assert disk.admits == (True, True)
    disk.back_off.out_of_room(cause)
    disk.now += FULL_SECONDS
    assert disk.admits == (True, True)


def test_a_removed_file_does_not_mend_a_disk_that_fails() -> None:
    disk = Disk()
    disk.back_off.write_failed(full=False)
    disk.back_off.room_freed()
    assert disk.admits == (False, False)
