"""Work in portions: a generator that yields after each, so that something else may come between two.

Reports are made so between the engine's steps, and long bodies are read so between the events of a loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TypeVar

__all__ = ["Portions", "finish", "in_turns"]

Answer = TypeVar("Answer")
Portions = Generator[None, None, Answer]
"""Work in portions; it returns its answer."""


def finish(work: Portions[Answer]) -> Answer:
    """The answer of work in portions, without pauses."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            answer: Answer = end.value
            return answer


async def in_turns(work: Portions[Answer]) -> Answer:
    """The answer of work in portions; other tasks of the event loop get a turn after each."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            answer: Answer = end.value
            return answer
        await asyncio.sleep(0)
