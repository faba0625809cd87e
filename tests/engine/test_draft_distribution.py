"""Chi-squared: what is sampled with a draft model is distributed as the target model says, exactly.

The expected probabilities are the target's own, from the log-probabilities of an engine without drafts; the
counts are of tokens that follow the same history, over many seeds.
"""

import math
from collections import Counter
from pathlib import Path

import pytest

from holdfast.core.plan import Row, RowResult
from holdfast.core.turn import Turn
from holdfast.engine.engine import Engine
from holdfast.engine.sampling import Sampling
from holdfast.engine.step import executor
from holdfast.engine.step.results import row_result
from tests.engine.drafting import PROMPT, drafting_engine, write_draft
from tests.engine.heads import mtp_engine, write_qwen
from tests.engine.tiny import tiny_engine, write_model

DRAWS, ROWS, CHOICES = 600, 60, 4
HEAT = 0.8
ROOM: dict[str, object] = {"max_running": ROWS, "state_slots": 4 * ROWS, "draft_tokens": 8192}


def expected_after(plain: Engine, history: list[int]) -> dict[int, float]:
    """The probabilities of the tokens that top-k leaves, after a history and at the temperature."""
    turn = plain.generate([history], Sampling(max_tokens=1, temperature=0.0, logprobs=CHOICES))[0]
    weights = {token: math.exp(value / HEAT) for token, value in turn.logprobs[0].top}
    return {token: weight / sum(weights.values()) for token, weight in weights.items()}


def draw(engine: Engine, prompt: list[int]) -> list[list[int]]:
    """Answers of four tokens, by seed."""
    said: list[list[int]] = []
    for seed in range(0, DRAWS, ROWS):
        sessions = [engine.session() for _ in range(ROWS)]
        turns = [
            session.say(
                prompt,
                Sampling(max_tokens=4, temperature=HEAT, top_k=CHOICES, seed=seed + row, ignore_eos=True),
            )
            for row, session in enumerate(sessions)
        ]
        said += [turn.token_ids for turn in turns]
        for session in sessions:
            session.close()
    return said


def excess(plain: Engine, prompt: list[int], said: list[list[int]]) -> tuple[float, int]:
    """Chi-squared over its degrees of freedom in standard deviations, for tokens two and three.

    Both come from rows with drafts. Histories that are too rare to be counted are left out.
    """
    chance, freedom = 0.0, 0
    for place in (1, 2):
        by_history: dict[tuple[int, ...], Counter[int]] = {}
        for tokens in said:
            by_history.setdefault(tuple(tokens[:place]), Counter())[tokens[place]] += 1
        for history, counts in by_history.items():
            total = counts.total()
            if total < 40:
                continue
            chances = expected_after(plain, [*prompt, *history])
            assert set(counts) <= set(chances), "a token that the target would never sample"
            for token, probability in chances.items():
                chance += (counts[token] - total * probability) ** 2 / (total * probability)
            freedom += len(chances) - 1
    return (chance - freedom) / math.sqrt(2 * freedom), freedom


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("bamba", "llama"),
        ("dense", "mtp"),
        pytest.param("llama", "llama", marks=pytest.mark.soak),
        pytest.param("olmo3", "llama", marks=pytest.mark.soak),
    ],
)
def test_the_distribution_is_the_targets(tmp_path: Path, target: str, draft: str) -> None:
    if draft == "mtp":
        path = write_qwen(tmp_path / target, target)
        plain, engine = tiny_engine(path, load_format="auto"), mtp_engine(path, **ROOM)
    else:
        path = write_model(tmp_path / target, target)
        plain, engine = tiny_engine(path), drafting_engine(path, write_draft(tmp_path, draft), **ROOM)
    said = draw(engine, PROMPT[:20])
    counters = engine.loop.scheduler.registry.counters
    assert 0 < counters.accepted_tokens < counters.drafted_tokens, "some are accepted, some are not"
    found, freedom = excess(plain, PROMPT[:20], said)
    assert freedom >= 12
    assert found < 4.5


def test_a_rule_that_accepts_every_draft_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same figures, where drafts become tokens without the target's agreement."""

    def careless(
        row: Row[Turn], stream: object, sampled: list[int], logprobs: object, first: int
    ) -> RowResult:
        drafts = row.tokens[row.count - row.drafts :]
        return row_result(row, stream, [*drafts, *sampled[len(drafts) :]], logprobs, first)  # type: ignore[arg-type]

    path = write_model(tmp_path / "llama", "llama")
    plain, engine = tiny_engine(path), drafting_engine(path, write_draft(tmp_path), **ROOM)
    monkeypatch.setattr(executor, "row_result", careless)
    said = draw(engine, PROMPT[:20])
    monkeypatch.undo()
    try:
        found, _ = excess(plain, PROMPT[:20], said)
    except AssertionError:
        return
    assert found > 9
