"""An engine that calls Triton's kernels for everything says what an engine says that calls torch's.

Kernels are compared one by one elsewhere, with tensors that a test made. Here the engine makes them: their
types, their strides and what lies behind them. In Triton's interpreter, with full pages, windows and states.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from holdfast import kernels
from holdfast.engine.engine import Engine
from holdfast.engine.sampling import Sampling
from holdfast.engine.step import executor, graphs
from holdfast.engine.step.split_keys import Sharing
from holdfast.kernels import triton as device
from holdfast.models.config import AttentionConfig
from tests.engine.test_graphs import Replayed
from tests.engine.tiny import tiny_engine, write_model

pytestmark = [
    pytest.mark.usefixtures("interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:triton"),
]

SAMPLINGS = [
    Sampling(temperature=0, max_tokens=2, ignore_eos=True),
    Sampling(temperature=0.9, top_k=20, top_p=0.9, seed=7, max_tokens=2, ignore_eos=True),
    Sampling(temperature=0.7, min_p=0.01, seed=3, max_tokens=2, ignore_eos=True, logprobs=2),
]


def talk(engine: Engine) -> list[list[int]]:
    """Turns side by side, each sampled in its own way; a rewind, a fork and a session that was spilled."""
    sessions = [engine.session() for _ in SAMPLINGS]
    turns = [
        session.say([5, 9, *range(20, 24 + 5 * number)], sampling)
        for number, (session, sampling) in enumerate(zip(sessions, SAMPLINGS, strict=True))
    ]
    said = [each.wait().token_ids for each in turns]
    sessions[0].rewind(1)
    fork = sessions[1].fork()
    assert sessions[2].spill()
    turns = [session.say([7, 8], SAMPLINGS[1]) for session in (*sessions, fork)]
    return said + [each.wait().token_ids for each in turns]


@pytest.mark.parametrize(
    ("family", "page_size"), [pytest.param("bamba", 16, marks=pytest.mark.soak), ("olmo3", 1)]
)
def test_tokens_do_not_depend_on_whose_kernels_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, page_size: int
) -> None:
    directory = write_model(tmp_path / family, family)
    said = []
    for tritons in (False, True):
        if tritons:
            monkeypatch.setattr(kernels, "implementation", lambda _: device)
        with tiny_engine(directory, page_size=page_size, chunk_tokens=12, host_memory=1 << 20) as engine:
            said.append(talk(engine))
    assert said[0] == said[1]


def give_shapes(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Replayed]:
    """Recorded shapes with room to spare, and lists of pieces, as on a GPU; its memory has held anything."""
    made: list[Replayed] = []

    def record(step: Callable[[], graphs.Outcome]) -> tuple[graphs.Recorded, graphs.Outcome]:
        made.append(Replayed(step))
        return made[-1], made[-1].outcome

    monkeypatch.setattr(graphs, "MIXED_TOKENS", (16,))
    monkeypatch.setattr(graphs, "MIXED_ROWS", (3,))
    monkeypatch.setattr(graphs, "TILES_ONLY", 0)
    monkeypatch.setattr(executor, "TILES_ONLY", 0)
    monkeypatch.setattr(executor, "small_step_of", lambda model: 16)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Device)
    running, model = engine.loop.executor, engine.loop.setup.model
    mixers = [mixer for layer in model.config.layers for mixer in layer.mixers]
    attention = next(each for each in mixers if isinstance(each, AttentionConfig) and each.window is None)
    running._sharing = Sharing(attention, graphs.largest_of(graphs.shapes(3)), model.device, None)
    for component in ("full", "window", "state"):
        for storage in running.memory.storage(component):
            storage.fill_(torch.nan)
    running.capture(record=record)
    return made


class Device:
    multi_processor_count = 3


@pytest.mark.parametrize("family", ["bamba", pytest.param("olmo3", marks=pytest.mark.soak)])
def test_tokens_do_not_depend_on_shapes_pieces_and_what_memory_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    directory = write_model(tmp_path / family, family)
    options = {"max_running": 3, "chunk_tokens": 12, "host_memory": 1 << 20}
    with tiny_engine(directory, **options) as engine:
        expected = talk(engine)
    monkeypatch.setattr(kernels, "implementation", lambda _: device)
    with tiny_engine(directory, **options) as engine:
        made = give_shapes(engine, monkeypatch)
        assert talk(engine) == expected
    assert sum(each.replays > 0 for each in made) >= 3
