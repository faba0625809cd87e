"""Stop strings in streamed text.

`StopMatcher` finds stop strings across token boundaries. It works character by character with the
Knuth-Morris-Pratt failure function of each stop string, so no text is scanned twice: amortised constant time
per character and stop string, logarithmic in the worst case. The tables grow with the match, so long stop
strings do not slow the start of a turn. Used by `stream`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Emitted:
    """Text that may be emitted now, and the stop string that ended the stream, if any."""

    text: str
    stop: str | None = None


class _Progress:
    """The state of one stop string: the text ends with its first `matched` characters.

    On a mismatch after `length` characters the match falls back to `_shorter[length]`, the longest border
    whose next character differs; -1 where there is none. `_border` is the longest proper border of the first
    len(_shorter) characters of the stop string.
    """

    __slots__ = ("_border", "_shorter", "matched", "stop")

    def __init__(self, stop: str) -> None:
        assert stop, "a stop string must not be empty"
        self.stop = stop
        self.matched = 0
        self._shorter = [-1]
        self._border = 0

    def read(self, text: str) -> int | None:
        """Advance over text; returns the length up to the end of the stop string, or None."""
        stop, shorter, matched = self.stop, self._shorter, self.matched
        for place, character in enumerate(text, start=1):
            while matched >= 0 and stop[matched] != character:
                matched = shorter[matched]
            matched += 1
            if matched == len(stop):
                return place
            if matched == len(shorter):
                self._grow()
        self.matched = matched
        return None

    def _grow(self) -> None:
        """Extend the failure function by one character."""
        stop, shorter, border = self.stop, self._shorter, self._border
        following = stop[len(shorter)]
        shorter.append(shorter[border] if stop[border] == following else border)
        while border >= 0 and stop[border] != following:
            border = shorter[border]
        self._border = border + 1


class StopMatcher:
    """Watches one stream of text for stop strings.

    Text that may begin a stop string is held back. Of several stop strings completed by one piece of text,
    the one that begins first wins, then the longer. After a stop nothing more is emitted.
    """

    __slots__ = ("_held", "_keep", "_progress", "_stopped")

    def __init__(self, stops: tuple[str, ...], *, keep_stop: bool = False) -> None:
        self._progress = [_Progress(stop) for stop in set(stops)]
        self._keep = keep_stop
        self._held: deque[str] = deque()
        """Characters that may begin a stop string: as many as the longest match."""
        self._stopped = False

    def push(self, text: str, *, may_stop: bool = True) -> Emitted:
        """New text of the stream; without `may_stop` it cannot end the stream (minimum length)."""
        if self._stopped:
            return Emitted("")
        if not self._progress:
            return Emitted(text)
        if not may_stop:
            return Emitted(self.finish() + text)
        before = len(self._held)
        self._held.extend(text)
        found: tuple[int, int, str] | None = None
        for progress in self._progress:
            size = progress.read(text)
            if size is not None:
                length = len(progress.stop)
                complete = (before + size - length, -length, progress.stop)
                found = complete if found is None else min(found, complete)
        if found is None:
            hold = max((progress.matched for progress in self._progress), default=0)
            return Emitted(self._take(len(self._held) - hold))
        place, _, stop = found
        self._stopped = True
        shown = self._take(place + len(stop) if self._keep else place)
        self._held.clear()
        return Emitted(shown, stop)

    def finish(self) -> str:
        """Release the held text, at the end of the stream."""
        for progress in self._progress:
            progress.matched = 0
        return self._take(len(self._held))

    def _take(self, count: int) -> str:
        """Take the first `count` held characters."""
        return "".join([self._held.popleft() for _ in range(count)])
