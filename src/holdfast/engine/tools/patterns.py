"""Regular expressions over streamed text: where the next match is, and how much text is certain to have none.

Response templates (see `response_template`) mark regions by regular expressions, and a marker may be cut
anywhere. `re` cannot say that a match may still come, so patterns are compiled to the automaton of Thompson
and Pike: all alternatives advance together, one step a character, in the order of their priority. Time is
linear in the text whatever the pattern, which comes with a checkpoint. Lookarounds, anchors and
back-references are rejected.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

REPEATS_MAX = 256
INSTRUCTIONS_MAX = 4096


class PatternRefused(ValueError):
    """A pattern is not valid, or uses what streamed text does not support."""


@dataclass(slots=True)
class _Step:
    """One instruction: take a character that `takes` accepts, or go on at the targets, or note a capture."""

    takes: Callable[[str], bool] | None = None
    targets: list[int] = field(default_factory=list)
    opens: str = ""
    closes: str = ""


class Pattern:
    """A compiled pattern. `names` are its named groups."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.names: list[str] = []
        self.steps: list[_Step] = []
        self._place = 0
        try:
            re.compile(source)
        except re.error as error:
            raise PatternRefused(f"{source!r} is not a regular expression: {error}") from None
        start, ends = self._alternatives()
        if self._place < len(source):
            raise PatternRefused(f"{source!r}: unexpected {source[self._place]!r}")
        self.start = start
        self.end = self._emit(_Step())
        self._join(ends, self.end)

    @property
    def matches_nothing(self) -> bool:
        """Whether the empty text is a match."""
        search = Search(self)
        search.finish()
        return search.found

    def matches_in(self, text: str) -> Iterator[Match]:
        """All matches, in order, without overlaps."""
        base = 0
        while True:
            search = Search(self)
            search.feed(text[base:])
            search.finish()
            found = search.match(text[base:])
            if found is None or found.end == found.start:
                return
            yield Match(base + found.start, base + found.end, found.groups)
            base += found.end

    @classmethod
    def of_literals(cls, *literals: str) -> Pattern:
        """A pattern of plain texts, the longest first."""
        return cls("|".join(re.escape(each) for each in sorted(literals, key=len, reverse=True)))

    def _emit(self, step: _Step) -> int:
        if len(self.steps) == INSTRUCTIONS_MAX:
            raise PatternRefused(f"{self.source!r} is too large")
        self.steps.append(step)
        return len(self.steps) - 1

    def _join(self, ends: list[int], target: int) -> None:
        for end in ends:
            self.steps[end].targets.append(target)

    def _peek(self) -> str:
        return self.source[self._place] if self._place < len(self.source) else ""

    def _alternatives(self) -> tuple[int, list[int]]:
        """A choice; returns its first step, and the steps that lead out of it."""
        fork = self._emit(_Step())
        ends: list[int] = []
        while True:
            start, leads_out = self._sequence()
            self.steps[fork].targets.append(start)
            ends += leads_out
            if self._peek() != "|":
                return fork, ends
            self._place += 1

    def _sequence(self) -> tuple[int, list[int]]:
        start = self._emit(_Step())
        ends = [start]
        while self._peek() not in ("", "|", ")"):
            first, ends_of_item = self._repeated()
            self._join(ends, first)
            ends = ends_of_item
        return start, ends

    def _repeated(self) -> tuple[int, list[int]]:
        begin = self._place
        start, ends = self._item()
        least, most = self._bounds()
        if (least, most) == (1, 1):
            return start, ends
        lazy = self._peek() == "?"
        self._place += lazy
        if self._peek() == "+":
            raise PatternRefused(f"{self.source!r}: possessive quantifiers are not supported")
        after = self._place
        start = self._emit(_Step())
        ends = [start]
        for _ in range(least):
            ends = self._copy(begin, ends)
        if most is None:
            fork = self._emit(_Step())
            self._join(ends, fork)
            back = self._copy(begin, [fork])
            self._join(back, fork)
            ends = [self._exit(fork, lazy=lazy)]
        else:
            leaving: list[int] = []
            for _ in range(most - least):
                fork = self._emit(_Step())
                self._join(ends, fork)
                ends = self._copy(begin, [fork])
                leaving.append(self._exit(fork, lazy=lazy))
            ends = ends + leaving
        self._place = after
        return start, ends

    def _copy(self, begin: int, ends: list[int]) -> list[int]:
        """Compile the item at `begin` once more, after `ends`."""
        self._place = begin
        start, leads_out = self._item()
        self._join(ends, start)
        return leads_out

    def _exit(self, fork: int, *, lazy: bool) -> int:
        """A way out of a repetition: tried last, or first if it is lazy."""
        out = self._emit(_Step())
        self.steps[fork].targets.insert(0 if lazy else len(self.steps[fork].targets), out)
        return out

    def _bounds(self) -> tuple[int, int | None]:
        sign = self._peek()
        if sign in ("*", "+", "?"):
            self._place += 1
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
        counted = re.compile(r"\{(\d*)(,?)(\d*)\}").match(self.source, self._place)
        if counted is None or not (counted[1] or counted[3]):
            return 1, 1
        self._place = counted.end()
        least = int(counted[1] or 0)
        most = least if not counted[2] else int(counted[3]) if counted[3] else None
        if max(least, most or 0) > REPEATS_MAX:
            raise PatternRefused(f"{self.source!r} repeats more than {REPEATS_MAX} times")
        return least, most

    def _item(self) -> tuple[int, list[int]]:
        sign = self._peek()
        if sign == "(":
            return self._group()
        if sign in ("^", "$"):
            raise PatternRefused(f"{self.source!r}: anchors are not supported")
        single = re.compile(r"\\[\s\S]|\[\^?\]?(?:\\[\s\S]|[^\]\\])*\]|[\s\S]").match(
            self.source, self._place
        )
        assert single is not None, "there is a character left"
        self._place = single.end()
        text = single.group()
        if re.fullmatch(r"\\[AbBZzGK0-9]", text):
            raise PatternRefused(f"{self.source!r}: {text} is not supported")
        accepts = re.compile(text, re.DOTALL).fullmatch
        step = self._emit(_Step(takes=lambda character: accepts(character) is not None))
        return step, [step]

    def _group(self) -> tuple[int, list[int]]:
        head = re.compile(r"\((?:\?:|\?P<(\w+)>|(?!\?))").match(self.source, self._place)
        if head is None:
            raise PatternRefused(f"{self.source!r}: lookarounds, flags and references are not supported")
        self._place = head.end()
        name = head[1] or ""
        if name and name not in self.names:
            self.names.append(name)
        before = self._emit(_Step(opens=name))
        start, ends = self._alternatives()
        self._join([before], start)
        after = self._emit(_Step(closes=name))
        self._join(ends, after)
        self._place += 1
        return before, [after]


@dataclass(frozen=True, slots=True)
class Match:
    """A match: its borders, counted from where the search began, and the named groups that took part."""

    start: int
    end: int
    groups: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Thread:
    """One alternative: the step it waits at, where it began, and its captures as (name, start, end)."""

    step: int
    start: int
    captures: tuple[tuple[str, int, int], ...]


class Search:
    """Looks for the first match of a pattern in text that grows. Places count from where the search began."""

    def __init__(self, pattern: Pattern) -> None:
        self._pattern = pattern
        self._threads: list[_Thread] = []
        self._read = 0
        self._best: _Thread | None = None
        self._best_end = 0
        self._ended = False

    @property
    def pending(self) -> int:
        """The place before which no match can begin any more."""
        places = [thread.start for thread in self._threads]
        return min(places, default=self._read) if self._best is None else min([self._best.start, *places])

    def feed(self, text: str) -> None:
        """Read on; stops where a match is certain."""
        for character in text:
            if self.found:
                return
            self._advance(character)

    @property
    def found(self) -> bool:
        """Whether a match is certain: no alternative of higher priority is left."""
        return self._best is not None and (self._ended or not self._threads)

    def finish(self) -> None:
        """No more text: the best match so far is certain."""
        if self._best is None:
            threads: dict[int, _Thread] = {}
            self._follow(_Thread(self._pattern.start, self._read, ()), threads)
        self._ended = True

    def match(self, text: str, base: int = 0) -> Match | None:
        """The match that is certain; `text` is what was read, without its first `base` characters."""
        if not self.found:
            return None
        best = self._best
        assert best is not None
        groups = {name: text[start - base : end - base] for name, start, end in best.captures if end >= 0}
        return Match(best.start, self._best_end, groups)

    def _advance(self, character: str) -> None:
        """One character: first all that is possible without it, then what takes it."""
        waiting: dict[int, _Thread] = {}
        stopped = False
        for thread in self._threads:
            if self._follow(thread, waiting):
                stopped = True
                break
        if not stopped and self._best is None:
            self._follow(_Thread(self._pattern.start, self._read, ()), waiting)
        self._read += 1
        self._threads = [
            _Thread(target, thread.start, thread.captures)
            for step, thread in waiting.items()
            if self._takes(step, character)
            for target in self._pattern.steps[step].targets
        ]
        if not self._threads and self._best is None:
            return
        self._settle()

    def _takes(self, step: int, character: str) -> bool:
        takes = self._pattern.steps[step].takes
        return takes is not None and takes(character)

    def _settle(self) -> None:
        """Follow the free steps now, so that a match is noted at the character that completes it."""
        waiting: dict[int, _Thread] = {}
        for thread in self._threads:
            if self._follow(thread, waiting):
                break
        self._threads = list(waiting.values())

    def _follow(self, thread: _Thread, waiting: dict[int, _Thread]) -> bool:
        """Note where a thread waits for a character; True if it matches, which ends lower priorities."""
        stack = [thread]
        seen: set[int] = set()
        while stack:
            here = stack.pop()
            if here.step in seen or here.step in waiting:
                continue
            seen.add(here.step)
            if here.step == self._pattern.end:
                self._best, self._best_end = here, self._read
                return True
            step = self._pattern.steps[here.step]
            if step.takes is not None:
                waiting[here.step] = here
                continue
            captures = here.captures
            if step.opens:
                captures = (
                    *(each for each in captures if each[0] != step.opens),
                    (step.opens, self._read, -1),
                )
            if step.closes:
                captures = tuple(
                    (name, start, self._read if name == step.closes else end) for name, start, end in captures
                )
            stack += [_Thread(target, here.start, captures) for target in reversed(step.targets)]
        return False
