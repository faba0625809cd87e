"""Stop strings: found across any borders, as a plain search finds them, at a cost that they cannot raise."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.engine.sampling import STOP_CHARACTERS_MAX
from holdfast.engine.text.stops import Emitted, StopMatcher


@pytest.mark.parametrize("keep", [False, True])
def test_stop_strings_are_found_across_any_borders(keep: bool) -> None:
    """However the text is cut, what is emitted is the text up to the earliest stop."""
    text = "one <|en two<|end|> three STOP"
    stops = ("<|end|>", "STOP", "<|end|> th")
    cut = text.index("<|end|>")
    expected = text[: cut + len("<|end|> th")] if keep else text[:cut]
    for size in range(1, len(text) + 1):
        matcher = StopMatcher(stops[:2], keep_stop=keep)
        emitted, stop = "", None
        for start in range(0, len(text), size):
            piece = matcher.push(text[start : start + size])
            emitted += piece.text
            stop = stop or piece.stop
        assert stop == "<|end|>"
        assert emitted == (text[: cut + len("<|end|>")] if keep else text[:cut])
        assert matcher.finish() == ""
    assert StopMatcher(stops, keep_stop=keep).push(text).text == expected


def test_only_what_may_begin_a_stop_is_held_back() -> None:
    matcher = StopMatcher(("aab", "\n\nUser:"))
    assert matcher.push("xa").text == "x"
    assert matcher.push("a").text == ""
    assert matcher.push("a").text == "a"
    assert matcher.push("c\n").text == "aac"
    assert matcher.push("\nUse").text == ""
    assert matcher.push(" it").text == "\n\nUse it"
    assert matcher.push("\n\nUser").text == ""
    assert matcher.finish() == "\n\nUser"


def test_text_before_the_minimum_cannot_stop() -> None:
    matcher = StopMatcher(("ab",))
    assert matcher.push("ab", may_stop=False).text == "ab"
    assert matcher.push("a").text == ""
    ended = matcher.push("bc")
    assert (ended.text, ended.stop) == ("", "ab")
    assert matcher.push("more").text == ""


# --- against a plain search -------------------------------------------------------------------------


class PlainMatcher:
    """What `StopMatcher` promises, by searching all that is held again for every piece of text."""

    def __init__(self, stops: tuple[str, ...], keep_stop: bool) -> None:
        self.stops = stops
        self.keep_stop = keep_stop
        self.held = ""
        self.stopped = False

    def push(self, text: str, may_stop: bool) -> Emitted:
        if self.stopped:
            return Emitted("")
        text = self.held + text
        if not may_stop:
            self.held = ""
            return Emitted(text)
        for place in range(len(text)):
            complete = [stop for stop in self.stops if text.startswith(stop, place)]
            if complete:
                stop = max(complete, key=len)
                self.stopped = True
                self.held = ""
                return Emitted(text[: place + len(stop)] if self.keep_stop else text[:place], stop)
        shown = next(
            place
            for place in range(len(text) + 1)
            if place == len(text) or any(stop.startswith(text[place:]) for stop in self.stops)
        )
        self.held = text[shown:]
        return Emitted(text[:shown])

    def finish(self) -> str:
        held, self.held = self.held, ""
        return held


STOPS = st.lists(st.text("ab", min_size=1, max_size=9), max_size=5).map(tuple)
PIECES = st.lists(st.tuples(st.text("ab", max_size=6), st.sampled_from([True, True, True, False])))


@given(STOPS, PIECES, st.booleans(), st.none() | st.integers(0, 9))
@example(("abcd", "bc"), [("abcd", True)], False, None)
@example(("abcd", "bc"), [("abc", True)], False, None)
@example(("aab", "ab", "aab"), [("a", True), ("a", False), ("a", True), ("ab", True)], True, None)
@example(("ab",), [("a", True), ("b", True)], False, 1)
def test_it_says_what_a_plain_search_says(
    stops: tuple[str, ...], pieces: list[tuple[str, bool]], keep_stop: bool, finished_before: int | None
) -> None:
    matcher = StopMatcher(stops, keep_stop=keep_stop)
    plain = PlainMatcher(stops, keep_stop)
    for number, (text, may_stop) in enumerate(pieces):
        if number == finished_before:
            assert matcher.finish() == plain.finish()
        assert matcher.push(text, may_stop=may_stop) == plain.push(text, may_stop)
    assert matcher.finish() == plain.finish()
    assert matcher.finish() == ""


# --- the cost ---------------------------------------------------------------------------------------


class CountedStop(str):
    """A stop string that counts how many of its characters were looked at."""

    __slots__ = ()
    looks = 0

    def __getitem__(self, key: object) -> str:
        found = super().__getitem__(key)  # type: ignore[index]
        CountedStop.looks += len(found)
        return found


def fibonacci_word(size: int) -> str:
    """The text that has the most ways to go on after a mismatch."""
    word, before = "a", "b"
    while len(word) < size:
        word, before = word + before, word
    return word[:size]


def hard_stops() -> Iterator[tuple[str, list[str], str]]:
    """Stop strings as long as they may be, and a text that is always near to one and never says it."""
    size, ends = STOP_CHARACTERS_MAX, "wxyz"
    yield "letters", [*(end * size for end in ends), "a" * (size - 1)], ("a" * (size - 2) + "b") * 3
    yield "one beginning", ["a" * (size - 1) + end for end in ends], "a" * (3 * size)
    yield "late mismatches", ["a" * (size - 1) + end for end in ends], ("a" * (size - 1) + "b") * 3
    word = fibonacci_word(size - 1)
    yield "fibonacci", [word + end for end in ends], word + "c" + word[:-1] + "c" + word * 2
    yield "lengths", ["a" * (size - number) + "b" for number in range(4)], "a" * (3 * size)


@pytest.mark.parametrize(("stops", "text"), [pytest.param(*case[1:], id=case[0]) for case in hard_stops()])
@pytest.mark.parametrize("size", [1, 1 << 20])
def test_stop_strings_cannot_make_a_token_dear(stops: list[str], text: str, size: int) -> None:
    """Looks at each stop string are bounded by the text alone: on average, and at any one character."""
    CountedStop.looks = 0
    matcher = StopMatcher(tuple(CountedStop(stop) for stop in stops))
    looks, shown = [CountedStop.looks], ""
    for start in range(0, len(text), size):
        emitted = matcher.push(text[start : start + size])
        assert emitted.stop is None
        shown += emitted.text
        looks.append(CountedStop.looks)
    assert shown + matcher.finish() == text
    assert looks[0] == 0, "a turn with long stop strings begins as fast as any other"
    assert looks[-1] <= 8 * len(stops) * len(text)
    if size == 1:
        steps = [after - before for before, after in pairwise(looks)]
        assert max(steps) <= 64 * len(stops)
