"""Prompts of random tokens, the same for the same seed."""

from __future__ import annotations

import random

__all__ = ["prompt"]

PROMPT_TOKENS = (300, 32_000)
"""The range of token ids: ordinary words in every vocabulary that is measured."""


def prompt(length: int, seed: int) -> list[int]:
    """Random tokens; another seed gives another prompt, so that no round hits a cache."""
    chance = random.Random(seed)
    return [chance.randrange(*PROMPT_TOKENS) for _ in range(length)]
