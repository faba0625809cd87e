"""Block tables take what changed, keep what did not, and give rows back."""

import torch

from holdfast.core.plan import TableChange
from holdfast.engine.tables import BlockTables


def tables(window: bool = False) -> BlockTables:
    return BlockTables(torch.device("cpu"), True, window)


def full(block: BlockTables, number: int, width: int) -> list[int]:
    found: list[int] = block.full(torch.tensor([block.row(number)]), width)[0].tolist()
    return found


def test_a_change_replaces_from_its_first_page_on() -> None:
    block = tables()
    block.change(7, TableChange(0, [11, 12, 13], 0, []))
    block.change(8, TableChange(0, [21], 0, []))
    block.change(7, TableChange(2, [33, 34], 2, []))
    assert full(block, 7, 4) == [11, 12, 33, 34]
    assert full(block, 8, 1) == [21]


def test_window_pages_stand_at_their_own_numbers() -> None:
    block = tables(window=True)
    block.change(1, TableChange(0, [5, 6, 7], 0, [8, 9, 10]))
    block.change(1, TableChange(3, [11], 3, [12]))
    assert block.window(torch.tensor([block.row(1)]), 4)[0].tolist() == [8, 9, 10, 12]


def test_rows_and_columns_grow_and_nothing_is_lost() -> None:
    block = tables()
    for number in range(100):
        block.change(number, TableChange(0, list(range(number, number + 40)), 0, []))
    assert all(full(block, number, 40) == list(range(number, number + 40)) for number in range(100))
    assert len({block.row(number) for number in range(100)}) == 100


def test_forgotten_rows_are_used_again() -> None:
    block = tables()
    rows = {block.row(number) for number in range(16)}
    block.forget([3, 5, 999])
    assert {block.row(100), block.row(101)} < rows
    assert len({block.row(number) for number in range(16) if number not in (3, 5)} | {block.row(100)}) == 15


def test_the_last_sampled_token_stays_with_its_row() -> None:
    block = tables()
    rows = torch.tensor([block.row(4), block.row(9)])
    block.note_sampled(rows, torch.tensor([44, 99]))
    block.note_sampled(rows[1:], torch.tensor([98]))
    assert block.sampled(torch.tensor([block.row(9), block.row(4)])).tolist() == [98, 44]
