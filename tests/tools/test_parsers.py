"""Every parser over all ways to cut its input into pieces."""

from __future__ import annotations

import itertools

import pytest

from holdfast.engine.tools.events import CallBegin, CallEnd, Text, Transcript, call_ids, wire_form
from tests.tools.answers import ANSWERS, Answer, meaning, parsed

NUMBERED = [pytest.param(each, id=f"{index}-{each.format}") for index, each in enumerate(ANSWERS)]


@pytest.mark.parametrize("answer", NUMBERED)
def test_an_answer_means_what_it_should(answer: Answer) -> None:
    events = parsed(answer.parser(), [answer.wire])
    assert meaning(events) == answer.expected
    assert wire_form(events) == answer.wire


@pytest.mark.parametrize("answer", NUMBERED)
def test_every_cut_means_the_same(answer: Answer) -> None:
    """Two pieces at every character, three at every pair, and one character at a time."""
    wire = answer.wire
    places = range(len(wire) + 1)
    cuts = [[wire[:first], wire[first:]] for first in places]
    step = max(1, len(wire) // 12)
    cuts += [
        [wire[:first], wire[first:second], wire[second:]]
        for first, second in itertools.combinations(places[::step], 2)
    ]
    for pieces in [*cuts, list(wire)]:
        events = parsed(answer.parser(), pieces)
        assert meaning(events) == answer.expected, pieces
        assert wire_form(events) == wire, pieces
