"""Markers such as <tool_call> in streamed text, whatever the borders between pieces.

The machines of this package read text in which each marker is one character, a lone surrogate: decoded UTF-8
has none, so no text of the model can be mistaken for one. A marker that is a token of the vocabulary is
recognised by the token alone, and the same characters in ordinary text stay text. Other markers are found in
the text; the end of a piece that may begin one is held back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

FIRST_MARK = 0xD800
MARK = re.compile("[\ud800-\udfff]")
"""Finds the next marker in text from `MarkerLexer`."""


class MarkerLexer:
    """Replaces markers by marks. `tokens` are the ids of those markers that are tokens of the vocabulary."""

    __slots__ = (
        "_first",
        "_held",
        "_longest",
        "_pattern",
        "_prefixes",
        "_tokens",
        "_wire",
        "literal",
        "marks",
    )

    def __init__(self, markers: Iterable[str], tokens: Mapping[int, str]) -> None:
        ordered = list(dict.fromkeys(markers))
        self.marks = {marker: chr(FIRST_MARK + index) for index, marker in enumerate(ordered)}
        self._wire = {FIRST_MARK + index: marker for index, marker in enumerate(ordered)}
        self._tokens = {token: self.marks[text] for token, text in tokens.items() if text in self.marks}
        by_token = set(self._tokens.values())
        found = [marker for marker in ordered if self.marks[marker] not in by_token]
        assert not any(a != b and b.startswith(a) for a in found for b in found), "a marker begins another"
        self.literal = frozenset(self.marks[marker] for marker in found)
        """Marks that were found in text, so that they may also be ordinary characters of a string."""
        self._pattern = re.compile("|".join(re.escape(marker) for marker in found)) if found else None
        self._first = re.compile(
            "[" + re.escape("".join({marker[0] for marker in found})) + "]" if found else ""
        )
        self._prefixes = {marker[:size] for marker in found for size in range(1, len(marker))}
        self._longest = max(map(len, found), default=0)
        self._held = ""

    def feed(self, text: str) -> str:
        """Ordinary text of the model."""
        if self._pattern is None or not (self._held or self._first.search(text)):
            return text
        text = self._pattern.sub(lambda found: self.marks[found.group()], self._held + text)
        self._held = ""
        first = self._first.search(text, max(0, len(text) - self._longest + 1))
        while first is not None:
            place = first.start()
            if text[place:] in self._prefixes:
                self._held = text[place:]
                return text[:place]
            first = self._first.search(text, place + 1)
        return text

    def mark(self, token: int) -> str:
        """A token that is a marker."""
        return self.finish() + self._tokens[token]

    def is_marker(self, token: int) -> bool:
        """Whether a token is a marker."""
        return token in self._tokens

    def marker_of(self, token: int) -> str:
        """The text of a token that is a marker; empty for others."""
        return self._wire[ord(self._tokens[token])] if token in self._tokens else ""

    @property
    def holds(self) -> bool:
        """Whether text is held back that may begin a marker."""
        return bool(self._held)

    def finish(self) -> str:
        """The held text."""
        held, self._held = self._held, ""
        return held

    def expand(self, text: str) -> str:
        """Text with its markers written out."""
        return text.translate(self._wire)
