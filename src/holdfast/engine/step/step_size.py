"""How many tokens a step may have: large steps for inputs alone, small ones beside answers."""

from __future__ import annotations

from itertools import islice

from holdfast.core.registry import Registry

__all__ = ["step_tokens"]


def step_tokens(registry: Registry, small: int | None, most: int) -> int:
    """How many tokens the next step may have; `small` is the size of a small step, where there are any.

    A long input that nobody waits beside goes in large steps. Where answers are being generated, or all
    inputs are short, steps are small: inputs then ride along with the answers, at next to no cost, and no
    answer stands still for somebody else's input.
    """
    if small is None or small >= most:
        return most
    waiting = islice(registry.queue.values(), registry.policy.looked_at_max)
    longest = max((len(turn.request.tokens) for turn in waiting), default=0)
    for session in registry.running:
        left = session.sequence.known - session.sequence.planned
        if left <= 1:
            return small
        longest = max(longest, left)
    return small if longest <= small else most
