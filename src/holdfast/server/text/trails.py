"""Compares a rendered conversation with the texts of sessions, stretch by stretch.

    | messages | opening | answer | messages    | opening | answer |
               ^         ^        ^    ^   ^    ^         ^        ^   places from which a session can go on

A *trail* is the text of a session, in stretches: the messages of a turn as the chat template wrote them, what
opens the answer (the generation prompt), and the answer. The messages of the last turn are in several, so
that an edit at their end leaves the beginning. The API process keeps a length and a digest of each, and of
the last answer its tokens. The comparison uses the text that the model would read: it shows dropped
reasoning and edited messages, and ignores different tokens of the same text. Runs in text processes, which
keep nothing between two jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import NamedTuple

from holdfast.server.text.jobs import Stretch, TrailFields

__all__ = ["APART_CHARACTERS", "PLACES_MAX", "Match", "Spell", "find", "places_in", "stretch_of"]

PLACES_MAX = 32
"""Places inside the messages of one turn."""
APART_CHARACTERS = 512
"""Least distance of two such places."""

DIGEST_BYTES = 16

Spell = Callable[[list[int], int | None], str]
"""The text of generated tokens, and of the token before them."""


class Match(NamedTuple):
    """The first `stretches` of trail `trail`, which are the first `characters` of a text.

    `is_all`: the text ends with the next stretch. `said` is the digest of the trail's last stretch, if it was
    tokens and is in the text. `merged` stands for the stretches that were to be merged.
    """

    trail: int
    stretches: int
    characters: int
    is_all: bool = False
    said: Stretch | None = None
    merged: Stretch | None = None


def stretch_of(text: str, start: int, end: int) -> Stretch:
    """A part of a text by its length and digest."""
    content = text[start:end].encode("utf-8", "surrogatepass")
    return Stretch(end - start, blake2b(content, digest_size=DIGEST_BYTES).digest())


def places_in(text: str, start: int, end: int) -> list[int]:
    """Where a part of a text may be cut: at beginnings of lines, some way apart."""
    apart = max(APART_CHARACTERS, (end - start) // PLACES_MAX)
    places: list[int] = []
    place = start + apart
    while (found := text.find("\n", place, end - 1) + 1) > 0:
        if not text[found].isspace():
            places.append(found)
            place = found + apart
        else:
            place = found
    return places


def find(text: str, trails: Sequence[TrailFields], spell: Spell) -> Match | None:
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
    text: str, number: int, trail: TrailFields, spell: Spell, digests: dict[tuple[int, int], Stretch]
) -> Match | None:
    """How far a text goes along one trail; `digests` are those of the text that are known."""
    ends, said = [0], None
    for stretch in trail.stretches:
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
    first, last = trail.merge
    merged = stretch_of(text, ends[first], ends[last]) if first < last <= count else None
    return Match(number, count, ends[count], is_all, None if is_all else said, merged)
