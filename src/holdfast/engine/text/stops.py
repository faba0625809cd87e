"""When generated text has said a stop string.

`StopMatcher` finds stop strings in streamed text, whatever the borders between tokens. It works one character
at a time and remembers how much of each stop string the text ends with (Knuth, Morris and Pratt's prefix
function, one a stop string), so that no text is ever looked at twice: a character costs each stop string a
constant number of comparisons on average, and never more than the logarithm of its length. The tables grow
only as far as the text has matched: a turn that is given long stop strings begins as fast as any other. Used
by the turn's stream in `stream`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Emitted:
    """Text that may be shown now, and the stop string that ended the stream, if one did."""

    text: str
    stop: str | None = None


class _Progress:
    """How many characters of one stop string the text ends with: `matched`.

    Where the text ends with `length` characters and goes on otherwise than the stop string does, it may still
    end with fewer: `_shorter[length]` is the largest number of them that goes on with another character, -1
    where there is none. `_border` is the length of the longest text, short of the whole, that the first
    len(_shorter) characters of the stop string both begin and end with.
    """

    __slots__ = ("_border", "_shorter", "matched", "stop")

    def __init__(self, stop: str) -> None:
        assert stop, "an empty text is no stop string"
        self.stop = stop
        self.matched = 0
        self._shorter = [-1]
        self._border = 0

    def read(self, text: str) -> int | None:
        """More text, up to where the stop string is complete: how much that was, None where it is not."""
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
        """Know what to do about one character more."""
        stop, shorter, border = self.stop, self._shorter, self._border
        following = stop[len(shorter)]
        shorter.append(shorter[border] if stop[border] == following else border)
        while border >= 0 and stop[border] != following:
            border = shorter[border]
        self._border = border + 1


class StopMatcher:
    """Watches one stream of text for stop strings.

    Text that could be the beginning of a stop string is held back until it is known not to be; of the stop
    strings that a piece of text completes the one that begins first wins, and of two that begin at one place
    the longer one. After a stop nothing more is emitted.
    """

    __slots__ = ("_held", "_keep", "_progress", "_stopped")

    def __init__(self, stops: tuple[str, ...], *, keep_stop: bool = False) -> None:
        self._progress = [_Progress(stop) for stop in set(stops)]
        self._keep = keep_stop
        self._held: deque[str] = deque()
        """Characters that may begin a stop string: as many as the longest progress."""
        self._stopped = False

    def push(self, text: str, *, may_stop: bool = True) -> Emitted:
        """New text of the stream; without `may_stop` it cannot end the stream (too few tokens yet)."""
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
        """What was held back, at the end of the stream."""
        for progress in self._progress:
            progress.matched = 0
        return self._take(len(self._held))

    def _take(self, count: int) -> str:
        """The first characters of those that are held."""
        return "".join([self._held.popleft() for _ in range(count)])
