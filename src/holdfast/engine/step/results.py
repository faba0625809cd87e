"""The results of a step's rows: sampled tokens to the tokens of turns.

A row's drafts are accepted as far as the model agrees with them. The turn's stream takes the tokens up to a
stop and feeds them to the turn's constraint; tokens that the constraint leaves no choice about are taken at
once. Called by the executor.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from holdfast.core.plan import Row, RowResult
from holdfast.core.turn import Turn
from holdfast.engine.step.sampler import Sampled
from holdfast.engine.text.stream import TokenLogprob, TurnStream

__all__ = ["NUMERIC_ERROR", "logprobs_of", "row_result", "with_forced"]

log = logging.getLogger("holdfast.executor")

NUMERIC_ERROR = "numeric_error"


def row_result(
    row: Row[Turn],
    stream: TurnStream | None,
    sampled: list[int],
    logprobs: dict[int, TokenLogprob],
    first: int,
) -> RowResult:
    """The accepted drafts, then the model's next token, up to a stop; `with_forced` adds to it.

    `first` is the index of the row's first sample in `logprobs`. A turn that is over has no stream. A turn
    whose text or constraint fails is that turn's failure alone: the others of the step keep their tokens.
    """
    drafts = row.tokens[row.count - row.drafts :]
    accepted = 0
    while accepted < len(drafts) and sampled[accepted] == drafts[accepted]:
        accepted += 1
    said = sampled[: accepted + 1]
    if min(said) < 0:
        return _failure(stream) or RowResult([], error=NUMERIC_ERROR)
    if stream is None:
        return RowResult(said)
    count = stream.sampling.logprobs
    asked = None
    if count is not None:
        found = [logprobs[first + place] for place in range(len(said))]
        asked = [replace(each, top=each.top[:count]) for each in found]
    try:
        taken = stream.push(said, asked)
    except Exception as error:  # noqa: BLE001
        return _text_failure(row, error)
    return RowResult(taken, stream.finish)


def with_forced(row: Row[Turn], stream: TurnStream, result: RowResult) -> RowResult:
    """The result of a constrained turn with the tokens that the constraint leaves no choice about."""
    if result.error is not None or stream.finish is not None:
        return result
    taken = result.tokens
    try:
        forced = _take_forced(stream, row.turn.request.max_tokens - row.turn.generated - len(taken))
    except Exception as error:  # noqa: BLE001
        return _text_failure(row, error)
    finish: str | None = stream.finish
    failure = _failure(stream) if finish is None else None
    return failure or RowResult(taken + forced, finish, forced=len(forced))


def _text_failure(row: Row[Turn], error: Exception) -> RowResult:
    log.error("turn %s: detokenisation failed", row.turn.request.turn_id, exc_info=error)
    return RowResult([], error=f"the tokenizer failed: {type(error).__name__}")


def _take_forced(stream: TurnStream, room: int) -> list[int]:
    """Take the tokens that the constraint leaves no choice about, as many as there is room for."""
    constraint, taken = stream.constraint, list[int]()
    assert constraint is not None
    while constraint.takes_runs and stream.finish is None:
        run = constraint.forced()[: room - len(taken)]
        if not run:
            break
        taken += stream.push(list(run))
    return taken


def _failure(stream: TurnStream | None) -> RowResult | None:
    """The result of a turn whose constraint has failed: nothing may follow. None if it has not."""
    constraint = None if stream is None else stream.constraint
    if constraint is None or not constraint.failed:
        return None
    return RowResult([], error=f"constraint: {constraint.why}")


def logprobs_of(sampled: Sampled, tokens: list[int]) -> dict[int, TokenLogprob]:
    """Log-probabilities by the index of their sample."""
    if sampled.logprobs is None or sampled.top_ids is None or sampled.top_logprobs is None:
        return {}
    values, ids, tops = sampled.logprobs.tolist(), sampled.top_ids.tolist(), sampled.top_logprobs.tolist()
    return {
        place: TokenLogprob(tokens[place], value, tuple(zip(best, best_values, strict=True)))
        for place, value, best, best_values in zip(sampled.logprob_rows, values, ids, tops, strict=True)
    }
