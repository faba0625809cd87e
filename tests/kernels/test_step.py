"""A step's inputs out of block tables, from both implementations, and what attention makes of them."""

from __future__ import annotations

import random
from importlib import import_module
from types import ModuleType

import pytest
import torch

from holdfast.kernels import Batch, Pages, Pieces, StepTables, tile_count
from holdfast.kernels.batch import PIECE_FIELDS
from tests.kernels import naive
from tests.kernels.batches import NAN, relative_error

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:triton"),
]

UNTOUCHED = -7


@pytest.fixture(params=["torch", "triton"])
def ops(request: pytest.FixtureRequest) -> ModuleType:
    if request.param == "triton":
        request.getfixturevalue("interpreter")
    return import_module(f"holdfast.kernels.{request.param}")


def empty_batch(counts: list[int], contexts: list[int], tokens: int, page: int) -> Batch:
    """A batch with its rows and contexts, and everything else still to be filled in."""
    rows = len(counts)
    width = max(1, *(-(-context // page) for context in contexts))

    def pages() -> Pages:
        table = torch.full((rows, width), UNTOUCHED, dtype=torch.int32)
        return Pages(table, torch.full((tokens,), UNTOUCHED, dtype=torch.int64), page)

    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).to(torch.int32)
    return Batch(
        tokens=torch.full((tokens,), UNTOUCHED, dtype=torch.int64),
        positions=torch.full((tokens,), UNTOUCHED, dtype=torch.int64),
        row_start=starts,
        context=torch.tensor(contexts, dtype=torch.int32),
        state_source=torch.full((rows,), -1, dtype=torch.int32),
        state_destination=torch.zeros(rows, dtype=torch.int32),
        full=pages(),
        window=pages(),
        rows=rows,
        count_max=max(counts),
        context_max=max(contexts),
        rows_of_one=counts.count(1),
    )


def random_tables(seed: int, rows: int, width: int) -> StepTables:
    generator = torch.Generator().manual_seed(seed)
    full = torch.randint(0, 900, (rows, width), dtype=torch.int32, generator=generator)
    window = torch.randint(0, 900, (rows, width), dtype=torch.int32, generator=generator)
    sampled = torch.randint(1000, 2000, (rows,), generator=generator)
    return StepTables(sampled, full, window, 901, 902)


@pytest.mark.parametrize("page", [1, 3, 64])
def test_rows_of_all_lengths_find_their_inputs(ops: ModuleType, page: int) -> None:
    counts, contexts = [3, 1, 0, 130, 1, 0], [10, 77, 0, 130, 1, 0]
    tables = random_tables(3, 9, 150)
    row_table = [4, 0, -1, 7, 8, -1]
    total = sum(counts)
    inputs = torch.arange(total + 5, dtype=torch.int32)
    inputs[3] = inputs[2] = -1
    batch = empty_batch(counts, contexts, total + 5, page)
    ops.prepare_step(inputs, torch.tensor(row_table, dtype=torch.int32), tables, batch)
    assert batch.full is not None and batch.window is not None
    assert tables.full is not None and tables.window is not None
    place = 0
    for row, (count, context) in enumerate(zip(counts, contexts, strict=True)):
        for position in range(context - count, context):
            expected = int(inputs[place]) if inputs[place] >= 0 else int(tables.sampled[row_table[row]])
            assert int(batch.tokens[place]) == expected
            assert int(batch.positions[place]) == position
            for pages, table in ((batch.full, tables.full), (batch.window, tables.window)):
                unit = int(table[row_table[row], position // page])
                assert int(pages.slots[place]) == unit * page + position % page
            place += 1
        used = -(-context // page)
        if row_table[row] >= 0:
            assert torch.equal(batch.full.table[row, :used], tables.full[row_table[row], :used])
            assert torch.equal(batch.window.table[row, :used], tables.window[row_table[row], :used])
    assert batch.tokens[total:].tolist() == batch.positions[total:].tolist() == [0] * 5
    assert batch.full.slots[total:].tolist() == [901 * page] * 5
    assert batch.window.slots[total:].tolist() == [902 * page] * 5


def test_rows_that_only_fill_up_stay_in_the_reserved_unit(ops: ModuleType) -> None:
    tables = random_tables(5, 4, 8)
    batch = empty_batch([1, 1, 1], [20, 1, 1], 3, 4)
    inputs = torch.tensor([-1, 0, 0], dtype=torch.int32)
    ops.prepare_step(inputs, torch.tensor([2, -1, -1], dtype=torch.int32), tables, batch)
    assert batch.full is not None
    assert batch.tokens.tolist() == [int(tables.sampled[2]), 0, 0]
    assert batch.positions.tolist() == [19, 0, 0]
    assert batch.full.slots[1:].tolist() == [901 * 4, 901 * 4]
    assert batch.full.table[1:, 0].tolist() == [901, 901]


def test_tables_change_where_they_are_told(ops: ModuleType) -> None:
    table = torch.zeros(5, 7, dtype=torch.int32)
    places = torch.tensor([0, 8, 9, 34], dtype=torch.int32)
    ops.change_tables(torch.stack((places, torch.tensor([1, 2, 3, 4], dtype=torch.int32))), table)
    assert table.view(-1)[places.long()].tolist() == [1, 2, 3, 4]
    assert int(table.sum()) == 10


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_words_are_carried_and_nothing_beside_them(ops: ModuleType, kind: torch.dtype) -> None:
    for count in (0, 1, 3, 2048, 4099):
        words, target = torch.arange(1, count + 3, dtype=kind), torch.zeros(count + 5, dtype=kind)
        ops.carry(words[1 : 1 + count], target[3 : 3 + count])
        assert target.tolist() == [0, 0, 0, *range(2, count + 2), 0, 0]


def test_sampled_tokens_are_noted_and_broken_ones_are_zero(ops: ModuleType) -> None:
    sampled = torch.full((9,), 5)
    rows = torch.tensor([3, 8, 0], dtype=torch.int32)
    ops.note_sampled(sampled, rows, torch.tensor([77, -1, 2]))
    assert sampled.tolist() == [2, 5, 5, 77, 5, 5, 5, 5, 0]


def pieces_of(batch: Batch, queries: int, wanted: int, above: int = 0, most: int = 1 << 30) -> Pieces:
    lines = tile_count(batch.tokens.shape[0], batch.rows, queries) + wanted
    listed = torch.full((lines, PIECE_FIELDS), UNTOUCHED, dtype=torch.int32)
    return Pieces(listed, torch.zeros(lines * 2, dtype=torch.int32), queries, wanted, above, most)


def test_pieces_cover_the_keys_of_every_tile(interpreter: None) -> None:
    """The tiles of each kind of row, and of each tile every key once; the rest of the list is empty."""
    triton = import_module("holdfast.kernels.triton")
    counts, contexts = [1, 7, 0, 1, 3, 4], [64, 700, 0, 2000, 3, 4]
    batch = empty_batch(counts, contexts, 20, 16)
    batch.pieces = (pieces_of(batch, 2, 5, most=3), pieces_of(batch, 3, 9, above=3))
    triton.list_pieces(batch)
    # Row, first token and tokens of each tile, and the position of its first token.
    tiles = (
        [(0, 0, 1, 63), (3, 8, 1, 1999), (4, 9, 2, 0), (4, 11, 1, 2)],
        [(1, 1, 3, 693), (1, 4, 3, 696), (1, 7, 1, 699), (5, 12, 3, 0), (5, 15, 1, 3)],
    )
    for pieces, expected in zip(batch.pieces, tiles, strict=True):
        lines = pieces.listed.tolist()
        line = 0
        for row, token, queries, position in expected:
            count = lines[line][0]
            key = 0
            for number in range(line, line + count):
                assert lines[number][:5] == [count, row, token, queries, position]
                assert lines[number][5] == key < lines[number][6]
                assert lines[number][7] == line
                key = lines[number][6]
            assert key == position + queries
            line += count
        assert line > len(expected), "a long tile has several pieces"
        assert [piece[0] for piece in lines[line:]] == [0] * (len(lines) - line)


def test_rows_of_about_one_length_are_left_whole(interpreter: None) -> None:
    triton = import_module("holdfast.kernels.triton")
    contexts = [1000, 1300, 1100, 1250]
    batch = empty_batch([1] * 4, contexts, 4, 16)
    batch.pieces = (pieces_of(batch, 4, 4),)
    triton.list_pieces(batch)
    assert batch.pieces[0].listed[:, 0].tolist() == [1, 1, 1, 1] + [0] * 5
    batch.context[0] = 4000
    triton.list_pieces(batch)
    assert batch.pieces[0].listed[:, 0].tolist() == [2, 2, 1, 1, 1] + [0] * 4


@pytest.mark.parametrize(
    ("counts", "contexts", "wanted", "sunk"),
    [
        ([1], [1], 17, True),
        pytest.param([1] * 6, [400, 1, 256, 257, 900, 12], 1, False, marks=pytest.mark.soak),
        ([1] * 6, [400, 1, 256, 257, 900, 12], 5, True),
        pytest.param([1], [2000], 17, True, marks=pytest.mark.soak),
        ([1, 9, 0, 1, 40, 2], [300, 600, 0, 2, 40, 257], 3, True),
        ([30], [700], 5, False),
        ([0, 4, 0], [0, 4, 0], 3, False),
    ],
)
def test_attention_over_pieces(
    interpreter: None, counts: list[int], contexts: list[int], wanted: int, sunk: bool
) -> None:
    """However the keys are cut into pieces, the softmax is that of the whole row."""
    triton = import_module("holdfast.kernels.triton")
    page, kv_heads, group, dim = 16, 2, 3, 8
    generator = torch.Generator().manual_seed(len(contexts))
    needed = [-(-context // page) for context in contexts]
    units = list(range(sum(needed) + 2))
    random.Random(1).shuffle(units)
    full = torch.full((len(contexts), max(needed)), 2**30, dtype=torch.int32)
    storage = torch.full((len(units), 2, page, kv_heads, dim), NAN)
    keys = [torch.randn(context, kv_heads, dim, generator=generator) for context in contexts]
    values = [torch.randn(context, kv_heads, dim, generator=generator) for context in contexts]
    for row, context in enumerate(contexts):
        own = [units.pop() for _ in range(needed[row])]
        full[row, : needed[row]] = torch.tensor(own, dtype=torch.int32)
        for position in range(context):
            storage[own[position // page], 0, position % page] = keys[row][position]
            storage[own[position // page], 1, position % page] = values[row][position]
    total = sum(counts)
    batch = empty_batch(counts, contexts, total + 3, page)
    batch.pieces = (pieces_of(batch, 5, wanted, most=9), pieces_of(batch, 21, wanted, above=9))
    tables = StepTables(torch.zeros(len(contexts), dtype=torch.int64), full, full, 0, 0)
    order = torch.arange(len(contexts), dtype=torch.int32)
    triton.prepare_step(torch.zeros(total + 3, dtype=torch.int32), order, tables, batch)
    triton.list_pieces(batch)
    assert batch.full is not None
    query = torch.randn(total + 3, kv_heads * group, dim, generator=generator)
    sinks = torch.randn(kv_heads * group, generator=generator) if sunk else None
    for _ in range(2):  # the counters are as they were
        actual = triton.attend(
            query, storage[:, 0], storage[:, 1], batch.full, batch, scale=dim**-0.5, sinks=sinks
        )
        place = 0
        for row, count in enumerate(counts):
            if count:
                own = slice(place, place + count)
                expected = naive.attend_row(query[own], keys[row], values[row], dim**-0.5, None, sinks)
                assert relative_error(actual[own], expected) < 3e-6
            place += count
        assert not any(pieces.arrived.any() for pieces in batch.pieces)
