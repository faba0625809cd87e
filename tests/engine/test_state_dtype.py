"""Recurrent states that rest in eight bits: sizes, what sessions say with them, and files of another type."""

import logging
from pathlib import Path

import pytest
import torch

from holdfast.core.layout import Component, Tier
from holdfast.engine.engine import Engine
from holdfast.engine.options import make_options
from holdfast.engine.start import memory_plan
from holdfast.engine.start.memory_plan import plan_memory
from tests.engine.conftest import Make, maker
from tests.engine.direct import direct
from tests.engine.test_disk_tier import options, run, said, state, talk, to_disk
from tests.engine.test_kv_dtype import loaded
from tests.engine.tiny import greedy

# One state layer: the last 3 inputs of 96 channels, and 4 heads of 16 x 8.
FULL_BYTES = 96 * 3 * 2 + 4 * 16 * 8 * 4
RESTED_BYTES = 96 * 3 * 2 + 4 * 16 * (8 + 4)


@pytest.fixture
def hybrid(directories: dict[str, Path]) -> Make:
    yield from maker(directories["bamba"])


def test_sizes(directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The core's slots are small; two in full precision for each turn that may run are part of the plan."""
    model = loaded(directories["bamba"])
    plan = plan_memory(model, make_options(state_dtype="int8", kv_tokens=1000, state_slots=20, max_running=5))
    assert plan.unit_bytes[Component.STATE] == RESTED_BYTES
    assert plan.running_states == 10 and plan.tuning.max_running == 5
    assert "types of memory: idle states int8" in plan.lines()
    each = plan.unit_bytes[Component.FULL] * 128 + RESTED_BYTES * 3
    awake = 2 * 5 * FULL_BYTES
    monkeypatch.setattr(memory_plan, "free_bytes", lambda device: 4 * (20 * each + awake))
    sized = plan_memory(model, make_options(state_dtype="int8", session_tokens=2048, max_running=5))
    assert sized.sessions == 20
    assert plan_memory(model, make_options(state_dtype="float32", kv_tokens=64)).running_states == 0
    dense = loaded(directories["llama"])
    assert str(plan_memory(dense, make_options(state_dtype="int8", kv_tokens=64)).types) == ""


def test_running_turns_are_bounded_by_the_states_that_fit(
    directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(directories["bamba"])
    monkeypatch.setattr(memory_plan, "free_bytes", lambda device: 4 * 4 * 2 * 11 * FULL_BYTES)
    plan = plan_memory(model, make_options(state_dtype="int8", session_tokens=16))
    assert plan.tuning.max_running == 11 and plan.running_states == 22


def test_what_is_stored(hybrid: Make) -> None:
    engine = hybrid(state_dtype="int8")
    talk(engine.session(), range(2))
    run(engine)
    memory = engine.loop.executor.memory
    convolutions, codes, scales = memory.storage("state")
    assert (codes.dtype, scales.dtype) == (torch.int8, torch.float32)
    assert memory.recurrent is not None and memory.recurrent.shape[0] == 2 * 16 + 1
    assert convolutions.shape[0] == codes.shape[0] == 64 + 1


@pytest.mark.parametrize("more", [{}, {"overlap": True}, {"max_running": 1}, {"kv_dtype": "fp8"}], ids=str)
def test_sessions_go_on_from_what_rests(hybrid: Make, tmp_path: Path, more: dict[str, object]) -> None:
    """Forks, rewinds, spills and restores say what a session says that was left alone."""
    kinds = {"state_dtype": "int8", **{name: more[name] for name in more if name == "kv_dtype"}}
    expected = talk(hybrid(**kinds).session(), range(6))
    engine = hybrid(**{**kinds, **more}, **options(tmp_path, host_memory=8 << 20))
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


def test_many_sessions_take_turns_with_few_running_slots(hybrid: Make) -> None:
    expected = [talk(hybrid(state_dtype="int8").session(), range(number, number + 3)) for number in range(4)]
    engine = hybrid(state_dtype="int8", max_running=2)
    sessions = [engine.session() for _ in range(4)]
    for turn in range(3):
        turns = [session.say(said(number + turn), greedy(9)) for number, session in enumerate(sessions)]
        for number, answer in enumerate(turns):
            assert answer.wait().token_ids == expected[number][turn]


@pytest.mark.parametrize("types", [("auto", "int8"), ("int8", "float32")])
def test_a_file_of_another_type_is_recomputed(
    hybrid: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, types: tuple[str, str]
) -> None:
    before, after = types
    engine = hybrid(state_dtype=before, **options(tmp_path))
    talk(engine.session(id="s"), range(2))
    engine.loop.shut_down()
    with caplog.at_level(logging.WARNING):
        again = hybrid(state_dtype=after, **options(tmp_path))
    assert "its snapshot cannot be used: types does not match" in caplog.text
    known = _known(again)
    answer = again.resume("s").say(said(2), greedy(9))
    assert answer.usage.computed_tokens >= known


def test_a_restart_goes_on_from_the_file(hybrid: Make, tmp_path: Path) -> None:
    expected = talk(hybrid(state_dtype="int8").session(), range(3))
    engine = hybrid(state_dtype="int8", **options(tmp_path))
    assert talk(engine.session(id="s"), range(2)) == expected[:2]
    engine.loop.shut_down()
    again = hybrid(state_dtype="int8", **options(tmp_path))
    answer = again.resume("s").say(said(2), greedy(9))
    assert answer.token_ids == expected[2]
    assert answer.usage.computed_tokens <= 21 + 9


def _known(engine: Engine) -> int:
    return len(engine.loop.scheduler.registry.find("s").sequence.tokens)
