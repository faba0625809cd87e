"""What simulated memory contains, and the model that reads it.

The content of a position is a hash of every token up to it, so two memories are equal there exactly if all
that led to them was. The fake model's next token is a function of that content alone: however it is chunked,
retracted, rolled back, spilled or forked, a correct run gives the same tokens as one that knows no memory.
"""

from __future__ import annotations

from collections.abc import Iterable

EMPTY = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_STOP_EVERY = 23


def extend(content: int, token: int) -> int:
    """The content after one more token."""
    mixed = (content ^ (token + 0x632BE59BD9B4E019)) * 0xBF58476D1CE4E5B9 & _MASK
    return (mixed ^ (mixed >> 29)) * 0x94D049BB133111EB & _MASK


def content_of(tokens: Iterable[int]) -> int:
    """The content after all of `tokens`."""
    content = EMPTY
    for token in tokens:
        content = extend(content, token)
    return content


def next_token(content: int, vocabulary: int) -> int:
    """What the fake model says after this content."""
    return (content >> 17) % vocabulary


def stops(content: int) -> bool:
    """Whether the fake model has said its last token with this content."""
    return content % _STOP_EVERY == 0


class History:
    """Contents of all lengths of one token list, brought up to date by what changed in it."""

    __slots__ = ("contents", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.contents: list[int] = [EMPTY]

    def follow(self, tokens: list[int]) -> list[int]:
        """The contents of the lengths 0..len(tokens)."""
        same = len(self.tokens)
        if self.tokens != tokens[:same]:
            same = next(i for i, (a, b) in enumerate(zip(self.tokens, [*tokens, -1], strict=False)) if a != b)
        del self.tokens[same:], self.contents[same + 1 :]
        content = self.contents[-1]
        for token in tokens[same:]:
            content = extend(content, token)
            self.contents.append(content)
        self.tokens = list(tokens)
        return self.contents
