"""The benchmark of draft heads: planted acceptance is counted, and the work is a head's."""

from pathlib import Path

from holdfast.bench.drafts import DRAFTS, DraftCase, loops_of, measure_drafts, planted, run
from holdfast.bench.loops import open_model
from tests.engine.tiny import write_model


def test_planted_acceptance_is_counted(tmp_path: Path) -> None:
    path = write_model(tmp_path, "llama")
    options = {"kv_tokens": 4096, "leave_history": False}

    def make() -> object:
        return open_model(path, "cpu", "float32", dummy=True)

    cases = [DraftCase(rows, agreement, 40, 1) for rows, agreement in ((1, 0.0), (2, 0.8), (1, 1.0))]
    figures = list(measure_drafts(make, False, options, cases))  # type: ignore[arg-type]
    brought = [figure["tokens_a_step"] for figure in figures]
    assert brought[0] == 1.0 and 2.2 < brought[1] < 3.6 and 3.5 < brought[2] <= DRAFTS + 1
    assert all(figure["head_to_none"] > 0 and figure["step_of_verification"] > 0 for figure in figures)


def test_the_head_is_fed_and_drafts(tmp_path: Path) -> None:
    path = write_model(tmp_path, "llama")
    loop = loops_of(lambda: open_model(path, "cpu", "float32", dummy=True), False, {"kv_tokens": 4096})[
        "head"
    ]
    with planted(0.5):
        found = run(loop, DraftCase(2, 0.5, 30), "head")
    counters = loop.scheduler.registry.counters
    assert counters.drafted_tokens > 40 and 0 < counters.accepted_tokens < counters.drafted_tokens
    assert found.steps < 30 and loop.drafts is not None
    assert loop.drafts.passes.tokens_computed > 2 * (64 + 30)
    assert not loop.drafts.cache.entries, "everything is given back"
