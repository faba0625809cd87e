"""Steps with drafts beside steps without, at a planted acceptance: what verification costs, and what a head.

Three loops of one model: without drafts; with drafts that cost nothing, so that only their verification
does; and with an EAGLE-3 head of random weights, which is fed and drafts as any head. Random weights agree
with nothing, so drafts are accepted by dice: the answers mean nothing, and the work is that of a real head
which is right as often. Used by `gpu` and by `cpu.heads`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from holdfast.bench.loops import Talk, open_loop
from holdfast.core.plan import Row, RowResult
from holdfast.core.session import Session
from holdfast.core.turn import Turn
from holdfast.engine.draft.gain import Costs
from holdfast.engine.loop import EngineLoop
from holdfast.engine.step import executor
from holdfast.engine.step.results import row_result
from holdfast.engine.text.stream import TokenLogprob, TurnStream
from holdfast.models.config import AttentionConfig, LayerConfig, MlpConfig
from holdfast.models.eagle3 import Eagle3Description, Eagle3Head, load_eagle3
from holdfast.models.model import Model
from holdfast.models.weights import Placement

__all__ = ["DraftCase", "measure_drafts", "planted", "random_head"]

DRAFTS = 3
ALWAYS = Costs(0.01, 0.0)
"""Costs under which drafts always pay."""
OUTPUTS_MAX = 32_000
"""Tokens that published heads know."""
PROMPT = 64
SEED = 1


@dataclass(frozen=True, slots=True)
class DraftCase:
    """Rows at a time, the chance that a draft is accepted, tokens of each answer, and how often to time."""

    rows: int
    agreement: float
    tokens: int = 128
    repeats: int = 3


def random_head(model: Model) -> Eagle3Head:
    """An EAGLE-3 head of random weights: the model's width, its attention, and an MLP of three widths."""
    config = model.config
    mixers = [mixer for layer in config.layers for mixer in layer.mixers]
    attention = next(mixer for mixer in reversed(mixers) if isinstance(mixer, AttentionConfig))
    plain = AttentionConfig(
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        scale=attention.scale,
        rope=attention.rope,
        input_width=2 * config.width,
    )
    count = len(config.layers)
    described = Eagle3Description(
        path=Path(),
        layer=LayerConfig((plain,), MlpConfig(3 * config.width)),
        width=config.width,
        target_width=config.width,
        vocabulary=config.vocabulary,
        outputs=min(OUTPUTS_MAX, config.vocabulary),
        norm_epsilon=config.norm_epsilon,
        norm_before_residual=False,
        taps=(0, count // 2, count) if count < 8 else None,
        quantisation=None,
    )
    placement = Placement(model.device, model.dtype)
    return load_eagle3(described, model, placement, dummy=True)


@contextmanager
def planted(agreement: float) -> Iterator[None]:
    """Accept each draft with a chance, if those before it were, whatever the model says."""
    dice = random.Random(SEED)

    def by_dice(
        row: Row[Turn],
        stream: TurnStream | None,
        sampled: list[int],
        logprobs: dict[int, TokenLogprob],
        first: int,
    ) -> RowResult:
        said = list(sampled)
        for place, draft in enumerate(row.tokens[row.count - row.drafts :]):
            if dice.random() >= agreement:
                said[place] = draft + 1 if draft == 0 else draft - 1
                break
            said[place] = draft
        return row_result(row, stream, said, logprobs, first)

    executor.row_result = by_dice  # type: ignore[attr-defined]
    try:
        yield
    finally:
        executor.row_result = row_result  # type: ignore[attr-defined]


class Run(NamedTuple):
    """One round of answers, from when all have begun: tokens, steps and time."""

    tokens: int
    steps: int
    seconds: float


def run(loop: EngineLoop, case: DraftCase, name: str) -> Run:
    """All rows at a time, each a session of its own; the prompts are computed before the clock starts."""
    talks = [Talk(loop, f"{name} {number}") for number in range(case.rows)]
    vocabulary = loop.setup.model.config.vocabulary
    for number, talk in enumerate(talks):
        dice = random.Random(number)
        talk.begin([dice.randrange(vocabulary) for _ in range(PROMPT)], case.tokens)
    while any(not talk.said for talk in talks):
        loop.step()
    _wait(loop)
    before = sum(len(talk.said) for talk in talks)
    began, step = time.perf_counter(), loop.scheduler.registry.ledger.step
    for talk in talks:
        talk.finish()
    _wait(loop)
    found = Run(
        sum(len(talk.said) for talk in talks) - before,
        loop.scheduler.registry.ledger.step - step,
        time.perf_counter() - began,
    )
    for talk in talks:
        loop.scheduler.close(talk.name, loop.now())
    loop.step()
    while loop.busy:
        loop.step()
    return found


def _wait(loop: EngineLoop) -> None:
    if loop.setup.model.device.type == "cuda":
        torch.cuda.synchronize()


def loops_of(make_model: Callable[[], Model], graphs: bool, options: dict[str, Any]) -> dict[str, EngineLoop]:
    """A loop without drafts, one with drafts for nothing, and one with a head."""
    plain = open_loop(make_model(), graphs, **options)
    told = open_loop(make_model(), graphs, **options, speculate="ngram")
    with_head = open_loop(make_model(), graphs, head=random_head, **options)

    def propose(session: Session, turn: Turn) -> list[int]:
        """Any tokens."""
        return [7] * DRAFTS if turn.generated and not session.unsettled else []

    told.scheduler.planner.propose = propose
    assert with_head.drafts is not None
    with_head.drafts.costs = ALWAYS
    with_head.drafts.length_max = DRAFTS
    return {"none": plain, "verification": told, "head": with_head}


def measure_drafts(
    make_model: Callable[[], Model], graphs: bool, options: dict[str, Any], cases: Sequence[DraftCase]
) -> Iterator[dict[str, Any]]:
    """For each case the steps per token, and tokens a second with drafts to those without, side by side."""
    loops = loops_of(make_model, graphs, options)
    for case in cases:
        runs: dict[str, list[Run]] = {way: [] for way in loops}
        warm = replace(case, tokens=16)
        for number in range(case.repeats + 1):
            for way, loop in loops.items():
                with planted(case.agreement):
                    one = run(loop, case if number else warm, f"{way} {number}")
                if number:
                    runs[way].append(one)
        rate = {way: [each.tokens / each.seconds for each in found] for way, found in runs.items()}
        step = {way: [each.seconds / each.steps for each in found] for way, found in runs.items()}
        yield {
            "name": "drafts at planted acceptance",
            "agreement": case.agreement,
            "drafts": DRAFTS,
            "rows": case.rows,
            "tokens_a_step": round(runs["head"][0].tokens / runs["head"][0].steps / case.rows, 2),
            **{
                f"{way}_to_none": round(
                    median(a / b for a, b in zip(rate[way], rate["none"], strict=True)), 3
                )
                for way in ("verification", "head")
            },
            **{
                f"step_of_{way}": round(
                    median(a / b for a, b in zip(step[way], step["none"], strict=True)), 3
                )
                for way in ("verification", "head")
            },
        }
