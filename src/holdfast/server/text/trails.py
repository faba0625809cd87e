"""Compares a rendered conversation with the texts of sessions, stretch by stretch.

    | messages | opening | answer | messages | opening | answer |
               ^         ^        ^                             ^   places from which a session can go on

A *trail* is the text of a session, in stretches: the messages of a turn as the chat template wrote them, what
opens the answer (the generation prompt), and the answer. The API process keeps a length and a digest of each,
and of the last answer its tokens. What is compared is the text that the model would read: a template that
drops reasoning, and a client that edits a message, show in it, and tokens that another spelling of the same
text would have do not. Runs in text processes, which keep nothing between two jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import NamedTuple

from holdfast.server.text.jobs import Stretch

__all__ = ["STRETCHES_MAX", "Match", "Spell", "find", "stretch_of"]

STRETCHES_MAX = 96
"""A longer trail that is found has its first half merged into one stretch."""

DIGEST_BYTES = 16

Spell = Callable[[list[int], int | None], str]
"""The text of generated tokens, and of the token before them."""


class Match(NamedTuple):
    """The first `stretches` of trail `trail`, which are the first `characters` of a text.

    `is_all`: the text ends with the next stretch. `said` is the digest of the trail's last stretch, if it was
    tokens and is in the text. `head` stands for the first `merged` stretches.
    """

    trail: int
    stretches: int
    characters: int
    is_all: bool = False
    said: Stretch | None = None
    head: Stretch | None = None
    merged: int = 0


def stretch_of(text: str, start: int, end: int) -> Stretch:
    """A part of a text by its length and digest."""
    content = text[start:end].encode("utf-8", "surrogatepass")
    return Stretch(end - start, blake2b(content, digest_size=DIGEST_BYTES).digest())


def find(text: str, trails: Sequence[Sequence[Stretch]], spell: Spell) -> Match | None:
    """The longest beginning of a text that a trail has, of equals the first; None if none has any.

    Something is left to compute: a text that a trail has whole is found without its last stretch.
    """
    best: Match | None = None
    digests: dict[tuple[int, int], Stretch] = {}
    for number, trail in enumerate(trails):
        match = _follow(text, number, trail, spell, digests)
        if match is not None and (best is None or _reach(match) > _reach(best)):
            best = match
    return best


def _reach(match: Match) -> tuple[int, bool]:
    return match.characters, match.is_all


def _follow(
    text: str, number: int, trail: Sequence[Stretch], spell: Spell, digests: dict[tuple[int, int], Stretch]
) -> Match | None:
    """How far a text goes along one trail; `digests` are those of the text that are known."""
    ends, said = [0], None
    for stretch in trail:
        start = ends[-1]
        if stretch.tokens:
            spelled = spell(stretch.tokens, stretch.before)
            if not text.startswith(spelled, start):
                break
            ends.append(start + len(spelled))
            said = stretch_of(text, start, ends[-1])
            continue
        place = (start, start + stretch.characters)
        if place[1] > len(text):
            break
        if place not in digests:
            digests[place] = stretch_of(text, *place)
        if digests[place].digest != stretch.digest:
            break
        ends.append(place[1])
    if len(ends) == 1:
        return None
    is_all = ends[-1] == len(text)
    count = len(ends) - 1 - is_all
    merged = count // 2 if count > STRETCHES_MAX else 0
    head = stretch_of(text, 0, ends[merged]) if merged else None
    return Match(number, count, ends[count], is_all, None if is_all else said, head, merged)
