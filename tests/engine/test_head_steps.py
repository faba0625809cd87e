"""What a draft head costs beside its passes: nothing without one, and no copy where none is needed."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.core.registry import Plan
from holdfast.engine.draft.head_passes import HeadPasses
from holdfast.engine.draft.passes import Asked
from holdfast.engine.draft.reporting import draft_gauges, draft_lines
from holdfast.engine.engine import Engine
from holdfast.engine.step import graphs
from holdfast.engine.step.executor import Executor
from holdfast.engine.step.flight import Flight
from holdfast.engine.step.graphs import Outcome, Recorded
from tests.engine.drafting import PROMPT, check_empty
from tests.engine.heads import (
    cache_of,
    head_engine,
    head_of,
    mtp_engine,
    write_eagle3,
    write_llama,
    write_qwen,
)
from tests.engine.test_graphs import Replayed
from tests.engine.tiny import greedy, tiny_engine


class ReplayedWhole(Replayed):
    """A step that runs anew, and leaves residual streams as well where the first run did."""

    def replay(self) -> None:
        self.replays += 1
        again = self._step()
        self.outcome.hidden.copy_(again.hidden)
        self.outcome.tokens.copy_(again.tokens)
        for one, other in zip(self.outcome.features, again.features, strict=True):
            one.copy_(other)


def capture(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> list[ReplayedWhole]:
    """Give an executor shapes for few rows and tokens."""
    made: list[ReplayedWhole] = []

    def record(step: Callable[[], Outcome]) -> tuple[Recorded, Outcome]:
        made.append(ReplayedWhole(step))
        return made[-1], made[-1].outcome

    monkeypatch.setattr(graphs, "MIXED_TOKENS", (8, 64))
    monkeypatch.setattr(graphs, "MIXED_ROWS", (4, 64))
    executor.capture(record=record)
    return made


def engines(directory: Path, kind: str, **options: object) -> tuple[Engine, Engine]:
    """An engine without drafts and one with a head."""
    common = {"load_format": "auto", "max_running": 64, **options}
    if kind == "mtp":
        path = write_qwen(directory / "model", "dense")
        return tiny_engine(path, **common), mtp_engine(path, **common)
    path = write_llama(directory / "model")
    return tiny_engine(path, **common), head_engine(
        path, draft=str(write_eagle3(directory / "head")), **common
    )


@pytest.mark.parametrize(("kind", "overlap"), [("mtp", True), ("eagle3", False)])
def test_graphs_change_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, overlap: bool
) -> None:
    """Of the target's graphs and the head's; what a graph overwrites is copied, once for each tensor.

    Turns begin one after another: with overlap a graph runs again before its hidden states are fed.
    """
    made: list[list[list[int]]] = []
    run = HeadPasses.run

    def running(passes: HeadPasses, asked: list[Asked]) -> list[list[int]]:
        made[-1].extend(drafts := run(passes, asked))
        return drafts

    monkeypatch.setattr(HeadPasses, "run", running)
    plain, eager = engines(tmp_path, kind, overlap=overlap)
    _, engine = engines(tmp_path, kind, overlap=overlap)
    assert isinstance(engine.loop.executor, Executor)
    passes = head_of(engine).passes
    target, head = capture(engine.loop.executor, monkeypatch), capture(passes.executor, monkeypatch)
    prompts = [PROMPT, [5, 6, 7, 8], [30, 31, 32]]
    expected = [result.token_ids for result in plain.generate(prompts, greedy(24))]
    for each in (eager, engine):
        made.append([])
        turns = []
        for prompt in prompts:
            turns.append(each.session().say(prompt, greedy(24)))
            each.drive()
        assert [turn.token_ids for turn in turns] == expected
        for session_id in each.sessions():
            each.resume(session_id).close()
    assert made[0] == made[1] and sum(map(len, made[0])) > 100
    assert sum(each.replays for each in target) >= 20 and sum(each.replays for each in head) >= 20
    tensors = 1 if kind == "mtp" else 3
    graphed = sum(each.replays for each in target)
    copies = head_of(eager).states.copies
    assert copies < 24 * tensors and head_of(engine).states.copies == copies + graphed * tensors
    check_empty(engine)


class Launches(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def launches(engine: Engine) -> list[Counter[str]]:
    """The operators of the target's steps of a turn that does not draft."""
    executor, found = engine.loop.executor, list[Counter[str]]()
    assert isinstance(executor, Executor)
    start = executor.start

    def counted(plan: Plan) -> Flight:
        with Launches() as mode, torch.inference_mode():
            flight = start(plan)
        if plan.rows:
            found.append(mode.counts)
        return flight

    executor.start = counted  # type: ignore[method-assign]
    engine.generate([PROMPT], greedy(6))
    executor.start = start  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
def test_a_step_launches_the_same_with_and_without_a_head(tmp_path: Path, kind: str) -> None:
    """Hidden states are handed over as they are; an engine without a head hands nothing over.

    In torch: with an EAGLE head a step is no longer one pass in C, which launches nothing.
    """
    plain, engine = engines(tmp_path, kind, dtype="float32")
    assert isinstance(plain.loop.executor, Executor)
    assert plain.loop.executor._watch is None and plain.loop.executor.model.taps == ()
    head_of(engine).costs = head_of(engine).costs._replace(draft=10.0)
    expected = launches(plain)
    assert len(expected) >= 6 and launches(engine) == expected and sum(expected[1].values()) > 20


def test_the_cache_is_in_reports(tmp_path: Path) -> None:
    _, engine = engines(tmp_path, "mtp")
    session = engine.session()
    session.say(PROMPT, greedy(12)).wait()
    report = engine.memory()["draft"]
    assert isinstance(report, dict)
    held = report["holders"]["SESSION"]
    places = cache_of(engine).entries[session.id].places
    assert held == -(-places // report["page_size"]) and report["holders"]["FREE"] + held == report["units"]
    gauges = draft_gauges(engine.loop.drafts)
    assert gauges["draft_pages_held"] == held and gauges["draft_sessions"] == 1
    assert "draft" in draft_lines(engine.loop.drafts)[0]
    session.close()
    check_empty(engine)
