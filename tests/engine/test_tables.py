"""Block tables take what changed, keep what did not, and give rows back."""

import pytest
import torch

from holdfast.core.plan import TableChange
from holdfast.engine.step.tables import UNUSED_ROW, BlockTables


def tables(window: bool = False) -> BlockTables:
    return BlockTables(torch.device("cpu"), True, window)


def apply(block: BlockTables) -> None:
    block.apply(torch.from_numpy(block.pack()))


def full(block: BlockTables, number: int, width: int) -> list[int]:
    apply(block)
    table = block.step_tables(0, 0).full
    assert table is not None
    found: list[int] = table[block.row(number), :width].tolist()
    return found


def test_a_change_replaces_from_its_first_page_on() -> None:
    block = tables()
    block.change(7, TableChange(0, [11, 12, 13], 0, []))
    block.change(8, TableChange(0, [21], 0, []))
    apply(block)
    block.change(7, TableChange(2, [33, 34], 2, []))
    assert full(block, 7, 4) == [11, 12, 33, 34]
    assert full(block, 8, 1) == [21]


def test_window_pages_stand_at_their_own_numbers() -> None:
    block = tables(window=True)
    block.change(1, TableChange(0, [5, 6, 7], 0, [8, 9, 10]))
    apply(block)
    block.change(1, TableChange(3, [11], 3, [12]))
    apply(block)
    window = block.step_tables(0, 0).window
    assert window is not None
    assert window[block.row(1), :4].tolist() == [8, 9, 10, 12]


def test_changes_are_packed_until_they_are_carried_out() -> None:
    """Nothing is lost where words were packed and never came to the device."""
    block = tables(window=True)
    block.change(1, TableChange(0, [5, 6], 1, [8]))
    block.change(2, TableChange(2, [7], 0, []))
    first, second = 16 * block.row(1), 16 * block.row(2)
    expected = [first, first + 1, second + 2, 5, 6, 7, first + 1, 8]
    assert block.pack().tolist() == expected
    assert block.pack().tolist() == expected
    apply(block)
    assert not block.pack().size
    assert full(block, 1, 2) == [5, 6]


def test_a_component_that_is_not_there_has_no_table() -> None:
    block = tables()
    assert block.step_tables(4, 5).window is None
    assert (block.step_tables(4, 5).reserved_full, block.step_tables(4, 5).reserved_window) == (4, 5)


def test_rows_and_columns_grow_and_nothing_is_lost() -> None:
    block = tables()
    for number in range(100):
        block.change(number, TableChange(0, list(range(number, number + 40)), 0, []))
        if number % 7 == 0:
            apply(block)
    assert all(full(block, number, 40) == list(range(number, number + 40)) for number in range(100))
    assert len({block.row(number) for number in range(100)}) == 100


def test_forgotten_rows_are_used_again() -> None:
    block = tables()
    rows = {block.row(number) for number in range(16)}
    block.forget([3, 5, 999])
    assert {block.row(100), block.row(101)} < rows
    assert len({block.row(number) for number in range(16) if number not in (3, 5)} | {block.row(100)}) == 15


def test_the_place_of_nobodys_tokens_is_no_row() -> None:
    block = tables()
    assert block.sampled.shape[0] == UNUSED_ROW + 1
    assert all(block.row(number) < UNUSED_ROW for number in range(40))


def test_nobody_has_a_row_that_there_was_no_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU would write what changes in it to somebody else's memory."""
    block = tables(window=True)
    for number in range(16):
        block.row(number)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "cat", _no_room)
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                block.change(16, TableChange(0, [5], 0, [6]))
    block.change(16, TableChange(0, [5], 0, [6]))
    assert full(block, 16, 1) == [5]


def _no_room(*given: object) -> torch.Tensor:
    raise torch.OutOfMemoryError("no room")
