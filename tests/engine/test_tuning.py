"""Sizes follow from the device, the model and the free memory; stated ones are taken as they are."""

from pathlib import Path

import pytest
import torch

from holdfast.engine.options import make_options
from holdfast.engine.start import memory_plan, tuning
from holdfast.engine.start.memory_plan import plan_memory
from holdfast.engine.start.tuning import Choice, StepCost, Tuning
from holdfast.engine.step.profiling import row_counts
from holdfast.engine.tiers.files import layout_identity
from holdfast.models.checkpoint import load_model, open_checkpoint
from holdfast.models.memory import MemoryTypes
from holdfast.models.model import Model
from holdfast.models.weights import Placement

CUDA = torch.device("cuda")
GB = 10**9


def load(directory: Path) -> Model:
    placement = Placement(torch.device("cpu"), torch.float32)
    return load_model(open_checkpoint(directory), placement, load_format="dummy")


class Device:
    """A GPU with so much free memory, on which a step takes so long and so many bytes for each token."""

    def __init__(self, free: int, token_bytes: int, token_seconds: float) -> None:
        self.free = free
        self.token_bytes = token_bytes
        self.token_seconds = token_seconds
        self.measured: list[tuple[int, bool]] = []

    def measure(
        self, model: Model, tokens: int, page_size: int, rows_max: int, types: MemoryTypes, *, timed: bool
    ) -> StepCost:
        assert page_size in (16, 32, 64) and rows_max
        self.measured.append((tokens, timed))
        if tokens * self.token_bytes > self.free:
            raise torch.OutOfMemoryError("too large a step")
        return StepCost(tokens, tokens * self.token_bytes, tokens * self.token_seconds if timed else 0.0)


def plan_on(device: Device, model: Model, monkeypatch: pytest.MonkeyPatch, **options: object) -> Tuning:
    """The sizes of a model on a GPU that is not here."""
    monkeypatch.setattr(model, "device", CUDA)
    monkeypatch.setattr(memory_plan, "free_bytes", lambda _: device.free)
    monkeypatch.setattr(memory_plan, "small_step_of", lambda _: 192)
    return plan_memory(model, make_options(**options), device.measure).tuning


LARGE = Device(100 * GB, 120_000, 1 / 35_000)
"""As a model of 8 billion weights runs on an H200."""


def test_on_a_cpu_the_sizes_are_constants(directories: dict[str, Path]) -> None:
    plan = plan_memory(load(directories["bamba"]), make_options())
    assert plan.tuning.options() == {
        "page_size": 16,
        "chunk_tokens": 512,
        "step_tokens": 1024,
        "mixed_tokens": 1024,
        "max_running": 64,
        "checkpoints": 8,
    }
    assert plan.lines()[-1] == (
        "page-size 16, chunk-tokens 512, step-tokens 1024, mixed-tokens 1024, max-running 64, checkpoints 8: "
        "default on a CPU"
    )


def test_a_large_gpu_gets_large_steps(directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    found = plan_on(LARGE, load(directories["llama"]), monkeypatch)
    assert found.options() == {
        "page_size": 64,
        "chunk_tokens": 8192,
        "step_tokens": 8192,
        "mixed_tokens": 192,
        "max_running": 256,
        "checkpoints": 8,
    }
    assert len(found.lines()) == 6, "each has its own reason"
    assert "takes 0.23 s and 1.0 GB" in found.lines()[2]


def test_the_step_is_measured_once_where_it_fits(
    directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(100 * GB, 120_000, 1 / 35_000)
    plan_on(device, load(directories["llama"]), monkeypatch)
    assert device.measured == [(8192, True)]


@pytest.mark.parametrize(
    ("token_seconds", "token_bytes", "free", "step"),
    [
        (1 / 35_000, 120_000, 100 * GB, 8192),
        (1 / 9_000, 300_000, 100 * GB, 2048),  # A model four times as large, on the same device.
        (1 / 4_000, 120_000, 7 * GB, 1024),  # A smaller device.
        (1 / 35_000, 120_000, 5 * GB, 4096),  # Little memory beside the weights.
        (1.0, 120_000, 100 * GB, 512),
        (1 / 35_000, 200_000, GB, 512),  # A step of 8,192 does not even fit.
    ],
    ids=["large", "large-model", "slow", "little-memory", "very-slow", "out-of-memory"],
)
def test_a_step_takes_no_longer_and_no_more_than_it_may(
    directories: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    token_seconds: float,
    token_bytes: int,
    free: int,
    step: int,
) -> None:
    device = Device(free, token_bytes, token_seconds)
    found = plan_on(device, load(directories["llama"]), monkeypatch, memory_fraction=0.1)
    assert (found.step_tokens, found.chunk_tokens) == (step, step)
    assert device.measured[-1][0] == step, "pools are sized beside the step that is used"


def test_a_device_without_memory_for_the_smallest_step_is_refused(
    directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(GB, 10_000_000, 1.0)
    with pytest.raises(torch.OutOfMemoryError):
        plan_on(device, load(directories["llama"]), monkeypatch)
    assert [tokens for tokens, _ in device.measured] == [8192, 4096, 2048, 1024, 512]


def test_stated_sizes_are_taken_as_they_are(
    directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {
        "page_size": 32,
        "chunk_tokens": 100,
        "step_tokens": 300,
        "mixed_tokens": 40,
        "max_running": 7,
        "checkpoints": 0,
    }
    device = Device(100 * GB, 120_000, 1.0)
    model = load(directories["bamba"])
    found = plan_on(device, model, monkeypatch, **given)
    assert found.options() == given
    assert found.lines()[0].endswith(": as given") and len(found.lines()) == 1
    assert device.measured == [(300, False)], "for the size of the pools alone"
    device.measured.clear()
    plan_on(device, model, monkeypatch, **given, kv_tokens=1000, state_slots=10)
    assert device.measured == []


def test_the_page_size_does_not_depend_on_the_free_memory(
    directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of spilled sessions are valid for one page size: a restart must find them valid."""
    model = load(directories["llama"])
    plans = []
    for device in (LARGE, Device(3 * GB, 120_000, 1.0)):
        found = plan_on(device, model, monkeypatch)
        plans.append(found.page_size)
        assert (found.step_tokens == 8192) is (device is LARGE)
    assert plans == [64, 64]
    layouts = [
        plan_memory(model, make_options(page_size=size, kv_tokens=1024), LARGE.measure).layout
        for size in (16, 64)
    ]
    identities = {layout_identity(each.page_size, each, model.memory_shape, model.dtype) for each in layouts}
    assert len(identities) == 2, "and files of another page size are not taken"


@pytest.mark.parametrize(
    ("window", "size"), [(0, 64), (4096, 64), (128, 64), (127, 32), (64, 32), (63, 16), (8, 16)]
)
def test_a_window_has_at_least_two_pages(window: int, size: int) -> None:
    assert tuning.choose_page_size(True, window).value == size
    assert tuning.choose_page_size(False, window).value == 16


@pytest.mark.parametrize(
    ("pool", "chunk"), [(None, 8192), (100_000, 8192), (16_384, 8192), (16_383, 8191), (1000, 500), (1, 1)]
)
def test_the_window_pool_holds_a_chunk_twice(pool: int | None, chunk: int) -> None:
    assert tuning.choose_chunk(True, 8192, pool).value == chunk
    assert tuning.choose_chunk(False, 1024, pool).value == 512


@pytest.mark.parametrize(
    ("tokens", "windows", "slots", "running"),
    [
        (1 << 20, None, None, 256),
        (100 * 1024, None, None, 100),
        (1024, None, None, 8),
        (1 << 20, 90, None, 90),
        (1 << 20, None, 700, 256),
        (1 << 20, None, 80, 40),
        (None, None, 6, 8),
    ],
)
def test_no_more_turns_run_than_the_pools_have_room_for(
    tokens: int | None, windows: int | None, slots: int | None, running: int
) -> None:
    assert tuning.choose_running(True, tokens, windows, slots).value == running
    assert tuning.choose_running(False, tokens, windows, slots).value == 64


def test_checkpoints_are_the_same_on_all_devices() -> None:
    assert tuning.choose_checkpoints(True) == (8, "evicted before any session")
    assert tuning.choose_checkpoints(False) == (8, "default on a CPU")


def test_steps_beside_answers_are_small_with_graphs_and_bounded_without() -> None:
    assert tuning.choose_mixed(True, 8192, 192, graphs=True).value == 192
    assert tuning.choose_mixed(True, 8192, 192, graphs=False).value == 512
    assert tuning.choose_mixed(False, 1024, 192, graphs=True).value == 1024, "no bound on a CPU"


def test_neighbours_with_one_reason_are_one_line() -> None:
    one, other = Choice(1, "one"), Choice(2, "other")
    assert Tuning.of(one, one, other, one, other, other).lines() == [
        "page-size 1, chunk-tokens 1: one",
        "step-tokens 2: other",
        "mixed-tokens 1: one",
        "max-running 2, checkpoints 2: other",
    ]


@pytest.mark.parametrize(
    ("tokens", "context", "counts"),
    [
        (8192, 40_960, [1, 8191]),
        (8192, 4096, [1, 4096, 4095]),
        (8193, 4096, [1, 4096, 4096]),
        (1, 4096, [1, 1]),
    ],
)
def test_a_measured_step_has_no_row_longer_than_the_context(
    tokens: int, context: int, counts: list[int]
) -> None:
    assert row_counts(tokens, context) == counts
