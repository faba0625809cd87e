"""Memory is shared out for sessions of an expected length, or as stated."""

from pathlib import Path

import pytest
import torch

from holdfast.core.layout import Component, Tier
from holdfast.engine.options import OptionError, make_options
from holdfast.engine.start import memory_plan
from holdfast.engine.start.memory_plan import plan_memory
from holdfast.models.checkpoint import load_model, open_checkpoint
from holdfast.models.model import Model
from holdfast.models.weights import Placement


@pytest.fixture(scope="module")
def hybrid(directories: dict[str, Path]) -> Model:
    placement = Placement(torch.device("cpu"), torch.float32)
    return load_model(open_checkpoint(directories["bamba"]), placement, load_format="dummy")


# One attention layer: keys and values of 16 tokens, 2 heads of 8, float32. One state layer: the last 3 inputs
# of 96 channels, and 4 heads of 16 x 8.
PAGE_BYTES = 2 * 16 * 2 * 8 * 4
SLOT_BYTES = (96 * 3 + 4 * 16 * 8) * 4


def test_stated_sizes_are_taken(hybrid: Model) -> None:
    plan = plan_memory(hybrid, make_options(kv_tokens=1000, state_slots=20, session_tokens=100))
    assert plan.sizes() == {(Component.FULL, Tier.DEVICE): 63, (Component.STATE, Tier.DEVICE): 20}
    assert plan.unit_bytes == {Component.FULL: PAGE_BYTES, Component.STATE: SLOT_BYTES}
    assert plan.tokens_max == 63 * 16
    assert plan.sessions == min(63 // 7, 20 // 3)


def test_free_memory_is_shared_out_by_sessions(hybrid: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten sessions of 128 tokens: eight pages and three slots each."""
    each = 8 * PAGE_BYTES + 3 * SLOT_BYTES
    monkeypatch.setattr(memory_plan, "free_bytes", lambda device: 2 * (10 * each + each // 2))
    plan = plan_memory(hybrid, make_options(session_tokens=128, memory_fraction=0.5))
    assert plan.sizes() == {(Component.FULL, Tier.DEVICE): 80, (Component.STATE, Tier.DEVICE): 30}
    assert plan.sessions == 10
    assert plan.lines()[-2] == "room for 10 sessions of 128 tokens on the device"
    assert plan.lines()[0].startswith("full: 80 pages of 16 tokens")


def test_host_memory_holds_whole_sessions(hybrid: Model) -> None:
    each = 8 * PAGE_BYTES + 3 * SLOT_BYTES
    options = make_options(session_tokens=128, kv_tokens=512, state_slots=8, host_memory=4 * each + 1)
    sizes = plan_memory(hybrid, options).sizes()
    assert (sizes[Component.FULL, Tier.HOST], sizes[Component.STATE, Tier.HOST]) == (32, 12)


@pytest.mark.parametrize(
    ("room", "pages", "slots"),
    [
        (8 * PAGE_BYTES + 3 * SLOT_BYTES - 1, 7, 2),
        (4 * PAGE_BYTES + 2 * SLOT_BYTES, 4, 1),
        (2 * PAGE_BYTES + SLOT_BYTES, 2, 1),
        (PAGE_BYTES + SLOT_BYTES, 1, 1),
        (PAGE_BYTES + SLOT_BYTES - 1, 0, 0),
        (1, 0, 0),
    ],
)
def test_a_tier_smaller_than_a_planned_session_holds_shorter_ones(
    hybrid: Model, tmp_path: Path, room: int, pages: int, slots: int
) -> None:
    """Never more than its bytes, and a unit of each component or none."""
    options = make_options(
        session_tokens=128,
        kv_tokens=512,
        state_slots=8,
        host_memory=room,
        disk=str(tmp_path),
        disk_limit=room,
    )
    plan = plan_memory(hybrid, options)
    for counts in (plan.host, plan.disk):
        assert (counts.full, counts.state) == (pages, slots)
        assert counts.full * PAGE_BYTES + counts.state * SLOT_BYTES <= room


def test_a_disk_has_no_more_units_than_can_be_kept_account_of(hybrid: Model, tmp_path: Path) -> None:
    options = make_options(
        session_tokens=2048, page_size=1, kv_tokens=512, disk=str(tmp_path), disk_limit=1 << 60
    )
    disk = plan_memory(hybrid, options).disk
    assert disk.full == memory_plan.DISK_UNITS_MAX
    assert disk.state == 3 * memory_plan.DISK_UNITS_MAX // 2048


def test_a_session_is_never_planned_longer_than_the_context(hybrid: Model) -> None:
    assert plan_memory(hybrid, make_options(session_tokens=1 << 20)).session_tokens == 2048


@pytest.mark.parametrize(
    ("option", "sizes"), [("kv_tokens", {"kv_tokens": 16}), ("state_slots", {"state_slots": 1})]
)
def test_too_little_for_one_turn_is_refused(hybrid: Model, option: str, sizes: dict[str, int]) -> None:
    with pytest.raises(OptionError) as caught:
        plan_memory(hybrid, make_options(**sizes))
    assert caught.value.option == option


def test_too_small_a_window_is_refused_by_its_option(directories: dict[str, Path]) -> None:
    placement = Placement(torch.device("cpu"), torch.float32)
    windowed = load_model(open_checkpoint(directories["mistral"]), placement, load_format="dummy")
    with pytest.raises(OptionError) as caught:
        plan_memory(windowed, make_options(window_tokens=8))
    assert caught.value.option == "window_tokens"


@pytest.mark.parametrize(
    ("option", "sizes"),
    [
        ("kv_tokens", {"kv_tokens": 100_000, "state_slots": 8}),
        ("state_slots", {"kv_tokens": 512, "state_slots": 100_000}),
        ("session_tokens", {"session_tokens": 128}),
    ],
)
def test_pools_that_cannot_be_had_are_refused_by_name(
    hybrid: Model, monkeypatch: pytest.MonkeyPatch, option: str, sizes: dict[str, int]
) -> None:
    room = 0 if option == "session_tokens" else 64 * PAGE_BYTES + 64 * SLOT_BYTES
    monkeypatch.setattr(memory_plan, "free_bytes", lambda device: room)
    with pytest.raises(OptionError, match=r"is too large: pools need .* GB, and .* GB are free") as refused:
        plan_memory(hybrid, make_options(**sizes))
    assert refused.value.option == option


def test_a_refusal_says_how_much_would_do(hybrid: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "free_bytes", lambda device: 64 * PAGE_BYTES + 20 * SLOT_BYTES)
    with pytest.raises(OptionError, match=r"enough for 1,024$"):
        plan_memory(hybrid, make_options(kv_tokens=65 * 16, state_slots=20))
    plan_memory(hybrid, make_options(kv_tokens=1024, state_slots=20))


def test_host_memory_that_cannot_be_had_is_refused(hybrid: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU both come out of the same memory."""
    pools = {"kv_tokens": 1024, "state_slots": 20}
    room = 64 * PAGE_BYTES + 20 * SLOT_BYTES
    monkeypatch.setattr(memory_plan, "free_bytes", lambda device: room + (1 << 20))
    plan_memory(hybrid, make_options(**pools, host_memory=1 << 20))
    with pytest.raises(OptionError, match="host_memory is too large"):
        plan_memory(hybrid, make_options(**pools, host_memory=(1 << 20) + 1))
