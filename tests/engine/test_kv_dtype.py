"""The type of the KV cache: what it takes, what sessions say with it, and files of another type."""

import logging
from pathlib import Path

import pytest
import torch

from holdfast.core.layout import Component, Tier
from holdfast.engine.engine import Engine
from holdfast.engine.options import OptionError, make_options
from holdfast.engine.start import memory_plan
from holdfast.engine.start.memory_plan import plan_memory
from holdfast.models.checkpoint import load_model, open_checkpoint
from holdfast.models.memory import FP8, MemoryTypes
from holdfast.models.model import Model
from holdfast.models.weights import Placement
from tests.engine.conftest import Make
from tests.engine.direct import direct
from tests.engine.test_disk_tier import options, run, said, state, talk, to_disk
from tests.engine.tiny import greedy, write_model


def loaded(directory: Path, dtype: torch.dtype = torch.bfloat16) -> Model:
    placement = Placement(torch.device("cpu"), dtype)
    return load_model(open_checkpoint(directory), placement, load_format="dummy")


# --- sizes ----------------------------------------------------------------------------------------


def test_a_page_has_a_byte_for_each_number_and_for_each_head(directories: dict[str, Path]) -> None:
    """Keys and values of 16 tokens, 2 heads of 8, in one layer; the state stays as it is."""
    model = loaded(directories["bamba"])
    sizes = {"kv_tokens": 1000, "state_slots": 20}
    plain, eight = (plan_memory(model, make_options(kv_dtype=name, **sizes)) for name in ("auto", "fp8"))
    assert plain.unit_bytes[Component.FULL] == 2 * 16 * 2 * 8 * 2
    assert eight.unit_bytes[Component.FULL] == 2 * 16 * 2 * (8 + 1)
    assert eight.unit_bytes[Component.STATE] == plain.unit_bytes[Component.STATE]
    memory = model.memory(eight.device, 16, eight.types)
    for component, name in ((Component.FULL, "full"), (Component.STATE, "state")):
        stored = sum(storage[0].nbytes for storage in memory.storage(name))
        assert stored == eight.unit_bytes[component]


@pytest.mark.parametrize("head_dim", [64, 128])
def test_nearly_twice_the_sessions_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head_dim: int
) -> None:
    model = loaded(write_model(tmp_path / "wide", "llama", hidden_size=4 * head_dim, head_dim=head_dim))
    monkeypatch.setattr(memory_plan, "free_bytes", lambda device: 4 << 30)
    plans = [
        plan_memory(model, make_options(session_tokens=2048, kv_dtype=name)) for name in ("auto", "fp8_e4m3")
    ]
    assert plans[1].sessions >= 1.9 * plans[0].sessions
    assert "types of memory: kv fp8_e4m3" in plans[1].lines()
    assert not any(line.startswith("types") for line in plans[0].lines())


def test_other_types(directories: dict[str, Path]) -> None:
    model = loaded(directories["llama"])
    for name, dtype in (("auto", torch.bfloat16), ("float16", torch.float16), ("float32", torch.float32)):
        plan = plan_memory(model, make_options(kv_dtype=name, kv_tokens=64))
        assert plan.types == MemoryTypes(torch.bfloat16, dtype)
        assert str(plan.types) == ("" if name == "auto" else f"kv {name}")


def test_types_that_are_refused(directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="kv_dtype must be one of auto"):
        make_options(kv_dtype="int3")
    model = loaded(directories["llama"])
    model.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(OptionError, match=r"compute capability 8\.9"):
        memory_plan.memory_types(model, make_options(kv_dtype="fp8"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert memory_plan.memory_types(model, make_options(kv_dtype="fp8")).kv == FP8


# --- sessions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fp8", "bfloat16"])
def test_sessions_go_on_from_what_is_stored(make_any: Make, tmp_path: Path, name: str) -> None:
    """Forks, rewinds, spills and restores say what a session says that was left alone."""
    plain = make_any(kv_dtype=name).session()
    expected = talk(plain, range(6))
    engine = make_any(kv_dtype=name, **options(tmp_path, host_memory=8 << 20))
    session = engine.session(id="s")
    assert talk(session, range(3)) == expected[:3]
    fork = session.fork()
    assert talk(fork, range(3, 5)) == expected[3:5]
    session.rewind(2)
    assert talk(session, range(2, 4)) == expected[2:4]
    to_disk(engine)
    assert talk(session, range(4, 5)) == expected[4:5]
    run(engine)
    assert direct(engine.loop, "spill", "s", Tier.HOST)
    run(engine)
    assert state(engine) == "SPILLED"
    assert talk(session, range(5, 6)) == expected[5:6]


def test_eight_bits_are_what_attention_reads(make_any: Make) -> None:
    """Codes and scales of every component are written."""
    engine = make_any(kv_dtype="fp8")
    talk(engine.session(), range(2))
    memory = engine.loop.executor.memory
    for name in ("full", "window"):
        for storage in memory.storage(name):
            assert storage.dtype == torch.uint8 and bool(storage.any())
    assert memory.types.scaled


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("types", [("auto", "fp8"), ("fp8", "auto"), ("bfloat16", "fp8")])
def test_a_file_of_another_type_is_recomputed(
    make_any: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, types: tuple[str, str]
) -> None:
    before, after = types
    engine = make_any(kv_dtype=before, **options(tmp_path))
    talk(engine.session(id="s"), range(2))
    engine.loop.shut_down()

    def history(engine: Engine) -> list[int]:
        return list(engine.loop.scheduler.registry.find("s").sequence.tokens)

    with caplog.at_level(logging.WARNING):
        again = make_any(kv_dtype=after, **options(tmp_path))
    assert "session s will be recomputed: its snapshot cannot be used: types does not match" in caplog.text
    known = history(again)
    answer = again.resume("s").say(said(2), greedy(9))
    assert answer.usage.computed_tokens >= len(known)
    fresh = make_any(kv_dtype=after).session()
    assert fresh.say([*known, *said(2)], greedy(9)).token_ids == answer.token_ids


def test_a_file_of_the_same_type_is_read(make_any: Make, tmp_path: Path) -> None:
    engine = make_any(kv_dtype="fp8", **options(tmp_path))
    talk(engine.session(id="s"), range(2))
    engine.loop.shut_down()
    again = make_any(kv_dtype="fp8_e4m3", **options(tmp_path))
    answer = again.resume("s").say(said(2), greedy(9))
    assert answer.usage.computed_tokens <= 21 + 9
