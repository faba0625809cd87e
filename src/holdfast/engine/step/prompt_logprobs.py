"""Log-probabilities of a prompt's own tokens, for turns that ask for them. Used by the executor."""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.core.plan import Row
from holdfast.core.turn import Turn
from holdfast.engine.step.lead import Lead
from holdfast.engine.step.sampler import token_logprobs
from holdfast.engine.text.stream import TokenLogprob, TurnStream
from holdfast.models.model import StepModel

__all__ = ["PROMPT_ROWS", "note_prompt"]

PROMPT_ROWS = 128
"""Prompt tokens whose logits are computed at a time: a GPU may lack memory for those of a long chunk."""


def note_prompt(
    model: StepModel, lead: Lead | None, row: Row[Turn], stream: TurnStream, hidden: Tensor, end: int
) -> None:
    """Record what a row tells of its prompt; its hidden states end at `end`."""
    top = stream.sampling.prompt_logprobs
    if top is None or row.start + 1 >= len(stream.prompt_tokens):
        return
    # Tokens recomputed after a retraction are already recorded.
    first = max(row.start, stream.input_first + len(stream.prompt_logprobs)) + 1
    following = stream.prompt_tokens[first : row.start + row.count + 1]
    if not following:
        return
    place = end - row.count + first - 1 - row.start
    for begin in range(0, len(following), PROMPT_ROWS):
        some = following[begin : begin + PROMPT_ROWS]
        first_row = place + begin
        if lead is not None:
            lead.logits(first_row, len(some))
        logits = model.logits(hidden[first_row : first_row + len(some)])
        if lead is not None:
            lead.done()
        asked = torch.tensor(some, dtype=torch.int64).to(model.device, non_blocking=True)
        values, ids, tops = token_logprobs(logits, asked, top)
        for token, value, best, best_values in zip(
            some, values.tolist(), ids.tolist(), tops.tolist(), strict=True
        ):
            stream.prompt_logprobs.append(
                TokenLogprob(token, value, tuple(zip(best, best_values, strict=True)))
            )
