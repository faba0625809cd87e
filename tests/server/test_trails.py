"""Texts of conversations are compared with those of sessions: by stretches, and without reasoning."""

from itertools import pairwise

import pytest

from holdfast.engine.tools.formats import reasoning_format
from holdfast.server.text.histories import new_from
from holdfast.server.text.jobs import Stretch, TrailFields
from holdfast.server.text.trails import APART_CHARACTERS, PLACES_MAX, Match, find, places_in, stretch_of

THINK = reasoning_format("think")


def spelled(tokens: list[int], before: int | None) -> str:
    assert before == 7
    return "".join(map(chr, tokens))


def trail(*parts: str, said: str = "", merge: tuple[int, int] = (0, 0)) -> TrailFields:
    """A trail of some texts, and of an answer that is tokens."""
    stretches = [stretch_of(part, 0, len(part)) for part in parts]
    return TrailFields([*stretches, *([Stretch(tokens=[*map(ord, said)], before=7)] if said else [])], merge)


def test_the_longest_beginning_is_found_and_of_equals_the_first() -> None:
    trails = [trail("ab", "cd"), trail("ab", "cd", "ef"), trail("ab", "cd", "ef"), trail("ab", "xy", "ef")]
    assert find("abcdefgh", trails, spelled) == Match(1, 3, 6)
    assert find("abcdxx", trails, spelled) == Match(0, 2, 4)
    assert find("abx", trails, spelled) == Match(0, 1, 2)
    assert find("a", trails, spelled) is None and find("xabcd", trails, spelled) is None
    assert find("abcd", [], spelled) is None


def test_a_text_that_is_all_there_leaves_its_last_stretch() -> None:
    assert find("abcd", [trail("ab", "cd", "ef")], spelled) == Match(0, 1, 2, is_all=True)
    assert find("ab", [trail("ab", "cd")], spelled) == Match(0, 0, 0, is_all=True)
    assert find("abcd", [trail("ab"), trail("ab", "cd")], spelled) == Match(1, 1, 2, is_all=True)


def test_answers_are_compared_by_what_their_tokens_spell() -> None:
    found = find("abcdef", [trail("ab", said="cd")], spelled)
    assert found == Match(0, 2, 4, said=stretch_of("cd", 0, 2))
    assert find("abxdef", [trail("ab", said="cd")], spelled) == Match(0, 1, 2)
    assert find("abc", [trail("ab", said="cd")], spelled) == Match(0, 1, 2)
    assert find("abcd", [trail("ab", said="cd")], spelled) == Match(0, 1, 2, is_all=True)


def test_stretches_are_merged_if_they_are_found() -> None:
    parts = ("ab", "cd", "ef", "gh")
    found = find("abcdefghi", [trail(*parts, merge=(1, 3))], spelled)
    assert found == Match(0, 4, 8, merged=stretch_of("cdef", 0, 4))
    assert find("abcdxx", [trail(*parts, merge=(1, 3))], spelled) == Match(0, 2, 4)


def test_places_are_beginnings_of_lines_some_way_apart() -> None:
    lines = "".join(f"{number:09}\n" for number in range(1000))
    places = places_in(lines, 30, 6000)
    assert places and places[0] == 550 and all(lines[place - 1] == "\n" for place in places)
    gaps = [after - before for before, after in pairwise(places)]
    assert all(gap >= APART_CHARACTERS for gap in gaps) and places[-1] < 6000
    assert len(places_in(lines * 20, 0, len(lines) * 20)) <= PLACES_MAX
    assert places_in("x" * 5000, 0, 5000) == [] == places_in("\n" * 5000, 0, 5000)
    assert places_in(lines, 0, 100) == []


@pytest.mark.parametrize(
    ("text", "history", "found"),
    [
        ("a b c", "a b", (3, 3)),
        ("a b", "a b c", (None, 3)),
        ("a x c", "a b", (None, 2)),
        ("q: yes<end>more", "q: <think>hm</think>\n\nyes<end>", (11, 11)),
        ("q: <think>\n\n</think>\n\nyes<end>more", "q: <think>hm</think>\n\nyes<end>", (30, 30)),
        ("q: <think>hm</think>\n\nyes<end>", "q: <think>hm</think>\n\nyes", (25, 25)),
        ("q: no<end>", "q: <think>hm</think>yes<end>", (None, 3)),
        ("q: yes<end>", "q: <think>hm", (None, 3)),
        ("q: <think>x", "q: <think>hm</think>yes<end>", (None, 10)),
        ("q: <tag>yes", "q: <think>hm</think><tag>yes", (11, 11)),
        ("q: one q: two<end>", "q: <think>1</think>one q: <think>2</think>two", (13, 13)),
        ("q: one q: <think>2</think>two!", "q: <think>1</think>one q: <think>2</think>two", (29, 29)),
    ],
)
def test_reasoning_that_was_left_out_is_no_difference(
    text: str, history: str, found: tuple[int | None, int]
) -> None:
    assert new_from(text, history, THINK) == found


def test_without_a_format_of_reasoning_all_is_compared() -> None:
    assert new_from("q: yes", "q: <think>hm</think>yes", None) == (None, 3)
    long = "word " * 20_000
    assert new_from(long + "x", long, None) == (len(long), len(long))
    assert new_from(long[:70_001] + "x", long, None) == (None, 70_001)
