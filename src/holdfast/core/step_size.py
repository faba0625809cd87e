"""The token budget of a step: large for inputs alone, bounded while answers are generated.

A step that holds a decode row delays an answer by as long as it takes. So a step is large only where no
answer waits for it: a long input is then computed in few steps. The numbers come from the policy, which an
engine fits to its device; nothing here knows a device. Used by the planner.
"""

from __future__ import annotations

from itertools import islice

from holdfast.core.registry import Registry

__all__ = ["MIXED_PER_ROW", "mixed_bound", "step_budget"]

MIXED_PER_ROW = 2
"""Tokens per decode token in a mixed step, where that is more than `Policy.mixed_tokens`.

Beyond a few hundred tokens the time of a step grows with its tokens: a mixed step of twice the decode tokens
takes about twice a decode step. Less than two would leave inputs no token beside many answers.
"""


def mixed_bound(registry: Registry, running: int, drafting: bool) -> int:
    """Maximum tokens of a step in which some of `running` turns wait for their next token.

    With drafts, each of them may take its drafts along.
    """
    policy = registry.policy
    each = 1 + policy.drafts_max if drafting else 1
    return max(policy.mixed_tokens, MIXED_PER_ROW * running * each)


def step_budget(registry: Registry, most: int, drafting: bool) -> int:
    """The token budget of the next step, of at most `most`.

    While a turn waits for its next token, steps are bounded. If all inputs are short, they are small as well:
    the first are answered first. A long input without an answer beside it gets all of `most`.
    """
    policy = registry.policy
    small = policy.mixed_tokens
    if small >= most:
        return most
    running = registry.running
    longest = 0
    for session in running:
        left = session.sequence.known - session.sequence.planned
        if left <= 1:
            return min(most, mixed_bound(registry, len(running), drafting))
        longest = max(longest, left)
    for turn in islice(registry.queue.values(), policy.looked_at_max):
        longest = max(longest, len(turn.request.tokens))
    return small if longest <= small else most
