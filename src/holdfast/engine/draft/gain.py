"""When drafting pays: how many tokens to draft for a session, from the acceptance measured on it.

A step that verifies k drafts of a row costs `1 + k * cost` of a step without them: a pass of the draft model
each, and a token more to compute. If each draft is accepted with probability p, given that those before it
were, the step brings `1 + p + ... + p**k` tokens. The k with the highest ratio is drafted; where no k gains,
drafting rests, twice as long each time, and is then tried again from the prior. The costs are ratios of work,
not measured times, so that a turn's steps do not depend on what else the machine does. Used by `proposer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from holdfast.models.config import ModelConfig
from holdfast.models.work import work_of

__all__ = ["LENGTH_MAX", "REST_FIRST", "REST_MAX", "Acceptance", "Costs", "best_length"]

LENGTH_MAX = 8
"""Most drafts of a row."""

PRIOR, PRIOR_WEIGHT = 0.75, 8.0
"""Acceptance that is assumed of a session of which nothing is known, and how many drafts that counts for."""

RETRY_WEIGHT = 4.0
"""The same for a session that is tried again: it is switched off sooner."""

MEMORY = 0.96
"""How much of the evidence is left after each draft: about the last 25 drafts count."""

REST_FIRST, REST_MAX = 16, 1024
"""Steps without drafts where they do not pay: the first time, and at most."""

DRAFT_COST_MIN = 0.05
"""A pass of the draft model costs at least this part of a step: launches and sampling do not shrink."""

TOKEN_COST = {"cpu": 0.25, "cuda": 1 / 256}
"""What one more token adds to a step of one: on a GPU small steps take as long as their weights are read."""


class Costs(NamedTuple):
    """Costs in parts of a step of one token: a pass of the draft model, and one more token in the step."""

    draft: float
    token: float

    @classmethod
    def of(cls, draft: ModelConfig, target: ModelConfig, device: torch.device) -> Costs:
        """The costs of a pair of models, from the work of a token."""
        ratio = work_of(draft) / work_of(target)
        return cls(min(1.0, max(DRAFT_COST_MIN, ratio)), TOKEN_COST.get(device.type, TOKEN_COST["cuda"]))

    def each(self, rows: int) -> float:
        """The cost of one draft for each of so many rows, in parts of a step of those rows."""
        return self.draft + rows * self.token / (1.0 + rows * self.token)


def best_length(rate: float, cost: float, most: int) -> int:
    """The number of drafts, at most `most`, that brings most tokens for its cost; 0 if none gains."""
    best, gain, tokens = 0, 1.0, 1.0
    for length in range(1, most + 1):
        tokens += rate**length
        ratio = tokens / (1.0 + length * cost)
        if ratio > gain:
            best, gain = length, ratio
    return best


@dataclass(slots=True)
class Acceptance:
    """The acceptance of one session's drafts; `rest` steps are still made without any."""

    right: float = PRIOR * PRIOR_WEIGHT
    tried: float = PRIOR_WEIGHT
    rest: int = 0
    next_rest: int = REST_FIRST
    rests: int = 0
    """How often drafting was switched off."""

    @property
    def rate(self) -> float:
        """The estimated probability that a draft is accepted if those before it were."""
        return self.right / self.tried

    def note(self, drafts: Sequence[int], said: Sequence[int]) -> int:
        """Compare drafts with what the model said at their positions; returns how many were right."""
        agreed = 0
        for draft, token in zip(drafts, said, strict=False):
            self.right *= MEMORY
            self.tried = self.tried * MEMORY + 1.0
            if draft != token:
                break
            self.right += 1.0
            agreed += 1
        if drafts and agreed == len(drafts):
            self.next_rest = REST_FIRST
        return agreed

    def length(self, costs: Costs, rows: int, most: int) -> int:
        """How many tokens to draft in the next step, beside so many rows that draft as well.

        A session whose drafts would not even pay in a step of its own rests. One whose drafts do not pay
        among so many rows goes without in this step only.
        """
        if self.rest:
            self.rest -= 1
            return 0
        if not best_length(self.rate, costs.each(1), LENGTH_MAX):
            self.rest, self.next_rest = self.next_rest - 1, min(REST_MAX, 2 * self.next_rest)
            self.rests += 1
            self.right, self.tried = PRIOR * RETRY_WEIGHT, RETRY_WEIGHT
            return 0
        return best_length(self.rate, costs.each(rows), min(most, LENGTH_MAX))
