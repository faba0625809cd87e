"""Attention over a queue of pieces without a GPU.

The list that the device makes, by Triton's interpreter; the CUDA kernel's compilation, shapes and launches
(against an emulated kernel). `python3 -m tests.gpu` checks its results on a GPU.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from holdfast.kernels import (
    Batch,
    PieceQueue,
    Pieces,
    build_batch,
    build_queue,
    configure,
    takes_queue,
)
from holdfast.kernels.batch import KEY_BLOCK, QUEUE_FIELDS, queue_lines, queue_room
from holdfast.kernels.cuda import attention, driver
from holdfast.kernels.cuda.attention import Shape, attend_queue, source_of
from holdfast.kernels.cuda.driver import Machine
from holdfast.kernels.settings import KernelSettings
from tests.kernels import emulated
from tests.kernels.batches import fill_cache, paged_batch, relative_error
from tests.kernels.sources import H200, compiler_report, needs_compiler, said_without_compiler

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:triton"),
]

UNTOUCHED = -7
GUARD = 5
RARE_SHAPES = [(64, 8, 8, 16), (128, 16, 2, 64), (128, 1, 8, 32)]
GPU = torch.device("cuda", 0)
HEADS = {"heads": 32, "kv_heads": 8, "dim": 128, "page_size": 64, "dtype": torch.bfloat16, "device": GPU}


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    cached = (attention.queue_kernel, driver.machine_of)
    for function in cached:
        function.cache_clear()
    yield
    configure(KernelSettings())
    for function in cached:
        function.cache_clear()


# --- what the device lists ------------------------------------------------------------------------


class Piece(NamedTuple):
    """A line of the list."""

    row: int
    token: int
    tokens: int
    first: int
    history: int
    begin: int
    finish: int
    parts: int
    part: int
    room: int


class Step(NamedTuple):
    """Rows of a step, and what its attention looks like."""

    counts: list[int]
    contexts: list[int]
    spare: int  # tokens past the last row
    queries: int
    kv_heads: int
    programs: int


def listed_by(step: Step, tiles: int = 0) -> tuple[list[list[int]], PieceQueue]:
    """The lines that a step's list has room for, filled over poison; what lies past them is left alone."""
    starts = [context - count for context, count in zip(step.contexts, step.counts, strict=True)]
    batch = build_batch([[0] * count for count in step.counts], starts)
    batch.tokens = torch.zeros(sum(step.counts) + step.spare, dtype=torch.int64)
    work = (step.queries, step.kv_heads, step.programs)
    lines = queue_lines(batch.tokens.shape[0], batch.rows, *work)
    storage = torch.full((lines + GUARD, QUEUE_FIELDS), UNTOUCHED, dtype=torch.int32)
    nothing = torch.zeros(0)
    batch.queue = PieceQueue(storage[:lines], nothing, nothing, nothing, *work, tiles)
    import_module("holdfast.kernels.triton").list_pieces(batch)
    assert bool((storage[lines:] == UNTOUCHED).all()), "written past the end of the list"
    return storage[:lines].tolist(), batch.queue


def tiles_of(step: Step) -> list[tuple[int, int, int, int, int]]:
    """Of each tile, in order: row, first token, tokens, position of the first one, keys of earlier steps.

    Those of rows of several tokens come first, the last of them before all others.
    """
    tiles, token = [], 0
    for row, (count, context) in enumerate(zip(step.counts, step.contexts, strict=True)):
        for passed in range(0, count, step.queries):
            history = context - count
            tokens = min(step.queries, count - passed)
            tiles.append((row, token + passed, tokens, history + passed, history))
        token += count
    several = [tile for tile in tiles if step.counts[tile[0]] > 1]
    return several[::-1] + [tile for tile in tiles if step.counts[tile[0]] == 1]


def check_list(step: Step) -> list[Piece]:
    """All that `PieceQueue` promises of a list; answers its pieces."""
    lines, queue = listed_by(step)
    used = next((number for number, line in enumerate(lines) if line[2] == 0), len(lines))
    assert used < len(lines), "no line ends the list"
    assert all(line[2] == 0 for line in lines[used:]), "a line of no tokens before a piece"
    assert all(line[10:] == [UNTOUCHED] * 2 for line in lines[:used])
    pieces = [Piece(*line[:10]) for line in lines[:used]]
    rooms: list[tuple[int, int]] = []
    at = 0
    for row, token, tokens, first, history in tiles_of(step):
        parts = pieces[at].parts
        key = 0
        for part, piece in enumerate(pieces[at : at + parts]):
            assert piece[:5] == (row, token, tokens, first, history)
            assert (piece.parts, piece.part, piece.room) == (parts, part, pieces[at].room)
            assert piece.begin == key < piece.finish
            assert piece.begin % KEY_BLOCK == 0
            key = piece.finish
        assert key == first + tokens, "each key of the tile once"
        assert parts <= -(-step.programs // step.kv_heads), "more pieces than programs"
        if parts > 1:
            rooms.append((pieces[at].room, pieces[at].room + parts * tokens))
        at += parts
    assert at == used
    rooms.sort()
    assert all(begin >= 0 for begin, _ in rooms)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(rooms)), "a room shared"
    tokens = sum(step.counts) + step.spare
    room = queue_room(tokens, queue.queries, queue.kv_heads, queue.programs)
    assert all(end <= room for _, end in rooms)
    return pieces


def random_step(seed: int) -> Step:
    chance = random.Random(seed)
    counts = [
        chance.choice([0, 1, 1, 1, chance.randint(0, 3), chance.randint(0, 80)])
        for _ in range(chance.randint(1, 12))
    ]
    longest = chance.choice([1, 200, 3000, 9000])
    history = [chance.choice([chance.randint(0, longest), 64 * chance.randint(0, 40)]) for _ in counts]
    return Step(
        counts,
        [before + count if count else 0 for before, count in zip(history, counts, strict=True)],
        spare=chance.choice([0, 1, 40]),
        queries=chance.choice([2, 8, 18, 32, 128]),
        kv_heads=chance.choice([1, 2, 5, 8]),
        programs=chance.choice([1, 4, 37, 132]),
    )


@pytest.mark.parametrize(
    "seed", [*range(16), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(16, 50))]
)
def test_a_list_keeps_its_promises(interpreter: None, seed: int) -> None:
    check_list(random_step(seed))


@pytest.mark.parametrize(
    "step",
    [
        Step([0, 0], [0, 0], 7, 32, 8, 132),
        Step([1], [1], 0, 32, 8, 132),
        Step([33, 32, 31], [33, 32, 31], 0, 32, 8, 132),
        Step([1], [20_000], 0, 8, 1, 132),
        Step([128], [2500], 0, 128, 1, 37),  # one wide tile, cut as often as there are programs
        Step([16] * 30, [64 * 40] * 30, 0, 16, 8, 132),
        Step([2] * 100, [64 * length for length in range(1, 101)], 0, 8, 1, 132),
        Step([8192], [8192], 0, 32, 8, 132),
        Step([2048, 1, 700, 900], [9000, 77, 700, 30_000], 0, 32, 8, 132),
    ],
    ids=lambda step: f"{len(step.counts)} rows of {step.counts[0]}",
)
def test_lists_of_steps_at_the_edge(interpreter: None, step: Step) -> None:
    check_list(step)


def test_a_kernel_for_more_tiles_lists_the_same(interpreter: None) -> None:
    step = Step([300, 1, 33], [5000, 800, 33], 5, 32, 8, 132)
    assert listed_by(step, tiles=500)[0] == listed_by(step)[0]


def test_pieces_become_shorter_towards_the_end(interpreter: None) -> None:
    """So that programs which find no more have little to wait for; rows of several tokens come first."""
    pieces = check_list(Step([1] * 60 + [32] * 4, [6400] * 64, 0, 32, 8, 132))
    lengths = [piece.finish - piece.begin for piece in pieces]
    wide = sum(piece.tokens > 1 for piece in pieces)
    assert all(piece.tokens == 32 for piece in pieces[:wide]) and wide >= 4
    assert all(piece.tokens == 1 for piece in pieces[wide:])
    assert lengths[wide] >= 2 * max(lengths[-20:])


def test_all_of_a_row_is_taken_at_one_time(interpreter: None) -> None:
    """A turn's input comes with the last token of the answer before it: 33 tokens are two tiles."""
    pieces = check_list(Step([1] * 58 + [33] * 6, [1150] * 64, 0, 32, 8, 132))
    assert [piece.tokens for piece in pieces[:12]] == [1, 32] * 6
    assert {piece.parts for piece in pieces[:12]} == {1}


def test_a_queue_for_a_smaller_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "machine_of", lambda _: H200)
    queue = build_queue(512, 64, 32, 8, 128, torch.device("cpu"))
    assert not queue.taken.any() and not queue.arrived.any(), "counters start at zero"
    small = queue.for_step(64, 4)
    assert small is not None
    work = (queue.queries, queue.kv_heads, queue.programs)
    assert small.listed.shape[0] == queue_lines(64, 4, *work) < queue.listed.shape[0]
    assert small.listed.data_ptr() == queue.listed.data_ptr() and small.partial is queue.partial
    assert queue.for_step(512, 64) is not None
    assert queue.for_step(513, 1) is None, "no room for the results of so many tokens"
    assert queue.for_step(64, 79) is None, "no lines for so many rows"


def test_a_queue_and_pieces_do_not_go_together(interpreter: None) -> None:
    triton, plain = (import_module(f"holdfast.kernels.{name}") for name in ("triton", "torch"))
    batch = build_batch([[0]], [0])
    nothing = torch.zeros(0, dtype=torch.int32)
    batch.queue = PieceQueue(torch.zeros(0, QUEUE_FIELDS), nothing, nothing, nothing, 32, 8, 132)
    with pytest.raises(AssertionError):
        triton.list_pieces(batch)  # a list that is too short
    with pytest.raises(AssertionError, match="on the host"):
        plain.list_pieces(batch)
    batch.pieces = (Pieces(nothing, nothing, 1, 1),)
    with pytest.raises(AssertionError, match="pieces or a queue"):
        triton.list_pieces(batch)


# --- the kernel -----------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize(
    "shape", [(128, 4, 8, 64), *(pytest.param(each, marks=pytest.mark.soak) for each in RARE_SHAPES)]
)
def test_a_kernel_compiles_and_keeps_its_sums_in_registers(
    tmp_path: Path, shape: tuple[int, int, int, int]
) -> None:
    wanted = Shape(*shape)
    stages = wanted.stages(H200)
    # Of the numbers that a group counts pieces with, two may be elsewhere: they are used once a piece.
    report = compiler_report(source_of(wanted, stages), tmp_path, spilled_most=16)
    own = re.search(r"(\d+) bytes smem", report)
    assert own is not None
    assert wanted.shared(stages) + int(own[1]) <= H200.shared_memory
    registers = re.search(r"Used (\d+) registers", report)
    assert registers is not None and int(registers[1]) == 168, "what `setmaxnreg` shares out anew"


@pytest.mark.parametrize(
    "given",
    [
        {"dtype": torch.float16},
        {"dtype": torch.float32},
        {"dim": 80},
        {"dim": 256},
        {"heads": 34},
        {"heads": 136},
        {"page_size": 8},
        {"page_size": 24},
        {"device": torch.device("cpu")},
    ],
    ids=str,
)
def test_what_is_left_to_others(monkeypatch: pytest.MonkeyPatch, given: dict[str, object]) -> None:
    monkeypatch.setattr(attention, "machine_of", lambda index: None if index is None else H200)
    monkeypatch.setattr(attention, "compile_source", lambda _: b"image")
    monkeypatch.setattr(attention, "Kernel", lambda *_: "kernel")
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    assert takes_queue(**HEADS)
    assert not takes_queue(**{**HEADS, **given})


def test_a_device_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | None] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(attention, "queue_kernel", lambda _, index: asked.append(index))
    assert not takes_queue(**{**HEADS, "device": torch.device("cuda")})
    assert not takes_queue(**HEADS)
    assert asked == [3, 0]


@pytest.mark.parametrize("why", ["switched off", "no Hopper", "little memory"])
def test_machines_without_the_kernel(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(attention, "compile_source", lambda _: pytest.fail("compiled"))
    match why:
        case "switched off":
            configure(KernelSettings(cuda=False))
        case "no Hopper":
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
        case _:
            monkeypatch.setattr(attention, "machine_of", lambda _: Machine(132, 64 << 10))
    assert not takes_queue(**HEADS)


def test_a_kernel_that_cannot_be_had_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said = said_without_compiler(attention, lambda: takes_queue(**HEADS), monkeypatch, caplog)
    assert said == ["CUDA kernel unavailable; falling back to Triton: no compiler today"]


# --- launches -------------------------------------------------------------------------------------


class Call(NamedTuple):
    """A call of `attend_queue`, and the kernel that it launches."""

    query: torch.Tensor
    storage: torch.Tensor
    out: torch.Tensor
    batch: Batch
    queue: PieceQueue
    kernel: emulated.Attention

    def __call__(self, sinks: torch.Tensor | None = None) -> None:
        assert self.batch.full is not None
        keys, values = self.storage[:, 1, 0], self.storage[:, 1, 1]
        attend_queue(self.query, keys, values, self.out, self.batch.full, self.queue, 0.5, sinks)

    def expected(self, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """The attention in torch."""
        assert self.batch.full is not None
        given = (self.query, self.storage[:, 1, 0], self.storage[:, 1, 1], self.batch.full, self.batch)
        plain = import_module("holdfast.kernels.torch")
        found: torch.Tensor = plain.attend(*given, scale=0.5, sinks=sinks)
        return found


@pytest.fixture
def call(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> Call:
    """20 tokens of three rows, one with a long history; 4 query heads of 64 columns, 2 key heads."""
    kernel = emulated.Attention(Shape(64, 2, 2, 32))
    machine = Machine(12, H200.shared_memory)
    monkeypatch.setattr(attention, "machine_of", lambda _: machine)
    monkeypatch.setattr(attention, "map_of", emulated.TensorMap)
    monkeypatch.setattr(attention, "queue_kernel", lambda shape, _: kernel if shape == kernel.shape else None)
    batch, total = paged_batch([18, 1, 1], [0, 700, 40], 32)
    generator = torch.Generator().manual_seed(5)
    storage, _, _ = fill_cache(batch, total, 2, 64, dtype=torch.bfloat16, generator=generator)
    storage = torch.nan_to_num(storage)
    query = torch.randn(20, 4, 64, generator=generator).bfloat16()
    batch.queue = queue = build_queue(20, 3, 4, 2, 64, torch.device("cpu"))
    import_module("holdfast.kernels.triton").list_pieces(batch)
    return Call(query, storage, torch.full_like(query, torch.nan), batch, queue, kernel)


@pytest.mark.parametrize("sunk", [False, True])
def test_a_launch_computes_attention(call: Call, sunk: bool) -> None:
    sinks = torch.linspace(-1, 3, 4) if sunk else None
    assert int(call.queue.listed[:, 7].max()) > 1, "the keys of the long row are split"
    call(sinks)
    assert relative_error(call.out, call.expected(sinks)) < 5e-3


@pytest.mark.parametrize(
    "broken",
    ["arrived", "partial", "queries", "kv_heads", "page_size", "strided", "dtype", "sinks"],
)
def test_what_a_launch_refuses(call: Call, broken: str) -> None:
    queue, sinks = call.queue, None
    match broken:
        case "arrived":
            call = call._replace(queue=replace(queue, arrived=queue.arrived[1:]))
        case "partial":
            needed = queue_room(20, queue.queries, 2, 12)
            call._replace(queue=replace(queue, partial=queue.partial[:needed]))()
            call = call._replace(queue=replace(queue, partial=queue.partial[: needed - 1]))
        case "queries":
            call = call._replace(queue=replace(queue, queries=16))
        case "kv_heads":
            call = call._replace(queue=replace(queue, kv_heads=8))
        case "page_size":
            assert call.batch.full is not None
            call.batch.full.page_size = 16
        case "strided":
            call = call._replace(query=torch.zeros(20, 8, 64, dtype=torch.bfloat16)[:, ::2])
        case "dtype":
            call = call._replace(query=call.query.float())
        case _:
            sinks = torch.zeros(4, dtype=torch.bfloat16)
    with pytest.raises(AssertionError):
        call(sinks)


def test_full_attention_of_a_batch_takes_its_queue(call: Call) -> None:
    """In one launch; window attention of the same batch does not use the queue."""
    triton = import_module("holdfast.kernels.triton")
    assert call.batch.full is not None
    given = (call.query, call.storage[:, 1, 0], call.storage[:, 1, 1], call.batch.full, call.batch)
    assert relative_error(triton.attend(*given, scale=0.5), call.expected()) < 5e-3
    assert call.kernel.launches == 1
    with pytest.raises(AssertionError, match="softcap"):
        triton.attend(*given, scale=0.5, softcap=20.0)
    triton.attend(*given, scale=0.5, window=9)
    assert call.kernel.launches == 1
