"""The token budget of a step: large for inputs alone, small beside decoding."""

from __future__ import annotations

from itertools import islice

from holdfast.core.registry import Registry

__all__ = ["step_tokens"]


def step_tokens(registry: Registry, small: int | None, most: int) -> int:
    """The token budget of the next step; `small` is the size of a small step, if there is one.

    Long inputs alone go in large steps. While turns decode, or if all inputs are short, steps are small:
    inputs then run beside decoding at almost no cost, and no answer stalls for another turn's input.
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
