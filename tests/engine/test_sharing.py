"""Which lists of keys a step gets: of pieces, a queue of them where there is a kernel for it, or none."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.engine.engine import Engine
from holdfast.engine.step import split_keys as sharing
from holdfast.engine.step.graphs import largest_of, shapes
from holdfast.engine.step.inputs import Limits, Lists, Shape, views
from holdfast.engine.step.split_keys import LONG_STEP, QUEUED_ROWS, Sharing, sharing_for
from holdfast.kernels import PieceQueue, build_queue
from holdfast.kernels.cuda import attention
from holdfast.kernels.cuda.driver import Machine
from holdfast.models.config import AttentionConfig

Make = Callable[..., Engine]

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
HEADS = AttentionConfig(heads=32, kv_heads=8, head_dim=128, scale=1.0, rope=None)
LARGEST = largest_of(shapes(64))
MIXED, DECODE = Shape(16, 128, 16, False), Shape(16, 16, 16, True)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of 132 multiprocessors, as far as lists are laid out for one; the lists are on the host."""
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132)
    )
    monkeypatch.setattr(attention, "machine_of", lambda _: Machine(132, 232_448))


def queue_of(shape: Shape) -> PieceQueue:
    return build_queue(shape.tokens, shape.rows, HEADS.heads, HEADS.kv_heads, HEADS.head_dim, CPU)


def test_a_queue_for_all_but_large_decode_steps() -> None:
    largest = largest_of(shapes(256))
    made = Sharing(HEADS, largest, CPU, queue_of(largest))
    for shape in shapes(256):
        pieces, queue = made.lists(shape)
        assert (queue is None, len(pieces)) == (
            (True, 1) if shape.decode and shape.rows > QUEUED_ROWS else (False, 0)
        )
    made = Sharing(HEADS, LARGEST, CPU, queue_of(LARGEST))
    first, second = made.lists(MIXED).queue, made.lists(LARGEST).queue
    assert first is not None and second is not None
    assert first.listed.data_ptr() == second.listed.data_ptr(), "the same place for every step"
    assert first.listed.shape[0] < second.listed.shape[0]


def test_pieces_where_there_is_no_queue() -> None:
    made = Sharing(HEADS, LARGEST, CPU, None)
    assert [len(made.lists(shape).pieces) for shape in (DECODE, MIXED, LARGEST)] == [1, 2, 2]
    assert all(made.lists(shape).queue is None for shape in shapes(64))


def test_steps_that_are_too_large() -> None:
    """For the queue a step may be too large that is not for pieces; beyond that it has neither."""
    taken, plain = (Sharing(HEADS, LARGEST, CPU, queue) for queue in (queue_of(LARGEST), None))
    few = Shape(2, LARGEST.tokens + 100, 2, False)
    assert taken.lists(few).queue is None
    assert len(taken.lists(few).pieces) == len(plain.lists(few).pieces) == 2
    many = Shape(2, 8192, 2, False)
    assert taken.lists(many) == plain.lists(many) == Lists()


class Made:
    """What `sharing_for` makes of a model's layers, for a GPU that is not there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, taken: bool, step_tokens: int = 64) -> None:
        self.step_tokens = step_tokens
        self.asked: list[tuple[object, ...]] = []
        self.built: list[tuple[object, ...]] = []

        def takes(*given: object) -> bool:
            self.asked.append(given)
            return taken

        def build(*given: object) -> str:
            self.built.append(given)
            return "queue"

        monkeypatch.setattr(sharing, "takes_queue", takes)
        monkeypatch.setattr(sharing, "takes_scaled_queue", lambda *given: takes("scaled", *given))
        monkeypatch.setattr(sharing, "build_queue", build)
        monkeypatch.setattr(sharing, "Sharing", self.share)

    def share(self, *given: object, scaled: bool) -> tuple[object, ...]:
        return (*given, "scaled") if scaled else given

    def __call__(
        self, *mixers: object, device: torch.device = GPU, stored: torch.dtype = torch.bfloat16
    ) -> Any:
        config: Any = SimpleNamespace(layers=[SimpleNamespace(mixers=(mixer,)) for mixer in mixers])
        return sharing_for(config, LARGEST, 64, (torch.bfloat16, stored), device, self.step_tokens)


def test_a_model_whose_full_attention_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(monkeypatch, taken=True)
    window = replace(HEADS, head_dim=256, window=128)
    sunk = replace(HEADS, sinks=True)
    assert made(HEADS, window, sunk) == (HEADS, LARGEST, GPU, "queue")
    assert made.asked == [(32, 8, 128, 64, torch.bfloat16, GPU)], "decided once, windows aside"
    assert made.built == [(LARGEST.tokens, LARGEST.rows, 32, 8, 128, GPU)]


def test_a_queue_has_room_for_the_longest_step(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(monkeypatch, taken=True, step_tokens=8192)
    made(HEADS)
    made(HEADS, stored=torch.float8_e4m3fn)
    made(replace(HEADS, head_dim=64))
    sizes = [(given[0], given[1]) for given in made.built]
    short = (LARGEST.tokens, LARGEST.rows)
    assert sizes == [(8192, LARGEST.rows), short, short], "no long steps in eight bits, or with other heads"


def test_long_steps_have_the_whole_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its list is made by one kernel, whatever their size, with or without rows of one token."""
    made = Sharing(HEADS, LARGEST, CPU, queue_of(Shape(64, 8192, 64, False)))
    found = [
        made.lists(Shape(rows, tokens, rows, False), ones=ones).queue
        for rows, tokens, ones in ((1, LONG_STEP, False), (1, 8192, False), (64, 3000, True))
    ]
    lines = {(queue.listed.shape[0], queue.tiles) for queue in found if queue is not None}
    assert len(found) == 3 and None not in found and len(lines) == 1
    assert made.lists(Shape(1, LONG_STEP - 1, 1, False), ones=False) == Lists()
    short = made.lists(Shape(1, LONG_STEP - 1, 1, False)).queue
    assert short is not None and not short.tiles
    assert made.lists(Shape(1, 20_000, 1, False), ones=False) == Lists(), "more than there is room for"
    narrow = replace(HEADS, head_dim=64)
    for without in (
        Sharing(HEADS, LARGEST, CPU, None),
        Sharing(HEADS, LARGEST, CPU, queue_of(LARGEST), scaled=True),
        Sharing(narrow, LARGEST, CPU, queue_of(Shape(64, 8192, 64, False))),
    ):
        assert without.lists(Shape(1, 4096, 1, False), ones=False) == Lists()
    listed: list[PieceQueue | None] = []
    monkeypatch.setattr(sharing, "list_pieces", lambda batch: listed.append(batch.queue))
    made.warm_up(CPU)
    Sharing(HEADS, LARGEST, CPU, None).warm_up(CPU)
    (warmed,) = listed
    assert warmed is not None and {(warmed.listed.shape[0], warmed.tiles)} == lines


def test_a_model_whose_full_attention_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(monkeypatch, taken=False)
    assert made(HEADS) == (HEADS, LARGEST, GPU, None)
    assert len(made.asked) == 1 and not made.built


@pytest.mark.parametrize("other", [{"heads": 64}, {"kv_heads": 4}, {"head_dim": 64}])
def test_a_model_whose_layers_differ(monkeypatch: pytest.MonkeyPatch, other: dict[str, int]) -> None:
    made = Made(monkeypatch, taken=True)
    assert made(HEADS, replace(HEADS, **other)) == (HEADS, LARGEST, GPU, None)  # type: ignore[arg-type]
    assert not made.asked


def test_keys_of_another_type_have_no_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(monkeypatch, taken=True)
    assert made(HEADS, stored=torch.float16) == (HEADS, LARGEST, GPU, None)
    assert not made.asked


def test_keys_in_eight_bits_have_a_kernel_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(monkeypatch, taken=True)
    assert made(HEADS, stored=torch.float8_e4m3fn) == (HEADS, LARGEST, GPU, "queue", "scaled")
    assert made.asked == [("scaled", 32, 8, 128, 64, torch.bfloat16, GPU)]


def test_the_queue_of_eight_bit_keys_is_for_decode_steps_of_any_size() -> None:
    largest = largest_of(shapes(256))
    made = Sharing(HEADS, largest, CPU, queue_of(largest), scaled=True)
    for shape in shapes(256):
        pieces, queue = made.lists(shape)
        assert (queue is None) != shape.decode
        assert bool(pieces) != shape.decode


def test_models_without_keys_to_share(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(monkeypatch, taken=True)
    assert made(replace(HEADS, window=128)) is None
    assert made(HEADS, device=CPU) is None
    assert not made.asked


def test_batches_of_the_executor(make: Make) -> None:
    """A batch has lists where the model has them and some row has one token."""
    executor = make(max_running=16).loop.executor
    assert executor._sharing is None
    largest = largest_of(shapes(16))
    buffers = executor._buffers(largest, 4)
    words = torch.zeros(largest.words, dtype=torch.int32)

    def batch_of(shape: Shape, rows_of_one: int) -> tuple[int, bool]:
        limits = Limits(1 if shape.decode else shape.tokens, 64, rows_of_one)
        batch = executor._batch(buffers, views(words, shape), shape, limits)
        return len(batch.pieces), batch.queue is not None

    assert batch_of(MIXED, 1) == (0, False)
    executor._sharing = Sharing(HEADS, largest, CPU, queue_of(largest))
    assert batch_of(MIXED, 1) == (0, True)
    assert batch_of(MIXED, 0) == (0, False)
    assert batch_of(DECODE, 16) == (0, True)
