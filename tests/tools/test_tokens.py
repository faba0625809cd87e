"""Answers as tokens of a byte-level vocabulary, through the engine's detokenizer; the work of a parser."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import pytest

from holdfast.engine.text.tokenizer import Tokenizer
from holdfast.engine.tools.events import Event, wire_form
from holdfast.engine.tools.formats import CALL_FORMATS
from tests.tools.answers import ANSWERS, Answer, meaning, parsed
from tests.tools.tokens import byte_tokenizer

TEXT_MARKERS = ("<function=", "</function>", "<parameter=", "</parameter>")


def token_markers(answer: Answer) -> tuple[str, ...]:
    """The markers that are tokens in the family's vocabulary."""
    return tuple(marker for marker in answer.markers if marker not in TEXT_MARKERS)


def events_by_token(answer: Answer, cut: int | None = None) -> list[Event]:
    """As the engine does it: marker tokens to `mark`, the text of others to `feed`; `cut` tokens of them."""
    encoder = byte_tokenizer(token_markers(answer))
    tokenizer = Tokenizer(encoder, template=None, names={}, eos_tokens=())
    tokens = encoder.encode(answer.wire).ids
    stream = tokenizer.detokenizer(skip_special_tokens=False)
    parser = answer.parser({encoder.token_to_id(marker): marker for marker in token_markers(answer)})
    events: list[Event] = []
    for token in tokens[:cut]:
        events += parser.mark(token) if parser.is_marker(token) else parser.feed(stream.add([token]))
    events += parser.feed(stream.finish())
    return events + parser.finish()


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_by_token(answer: Answer) -> None:
    encoder = byte_tokenizer(token_markers(answer))
    tokens = {encoder.token_to_id(marker): marker for marker in token_markers(answer)}
    whole = parsed(answer.parser(tokens), answer.pieces(tokens))
    events = events_by_token(answer)
    assert meaning(events) == meaning(whole)
    assert wire_form(events) == answer.wire


@pytest.mark.parametrize("answer", [each for each in ANSWERS if each.calls][::3])
def test_an_answer_that_ends_at_any_token(answer: Answer) -> None:
    """Also inside a character: the bytes that are left are shown as replacement characters."""
    size = len(byte_tokenizer(token_markers(answer)).encode(answer.wire).ids)
    whole = answer.wire
    for cut in range(size):
        wire = wire_form(events_by_token(answer, cut))
        assert whole.startswith(wire.rstrip("\ufffd"))


def calls_made(work: Callable[[], object]) -> int:
    """How many functions a piece of work calls."""
    count = 0

    def note(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


ADVERSARIAL = [
    "{marker}",
    "{marker} ",
    '{marker}{{"name": "',
    '{marker}{{"a": [',
    "<",
    "{marker}f",
    " ",
    "[",
    '"\\',
]


@pytest.mark.parametrize("name", sorted(CALL_FORMATS))
@pytest.mark.parametrize("pattern", ADVERSARIAL)
def test_work_is_linear_in_the_input(name: str, pattern: str) -> None:
    piece = pattern.format(marker=CALL_FORMATS[name].markers[0])

    def work(count: int) -> int:
        answer = Answer(name, piece * count)
        return calls_made(lambda: parsed(answer.parser(), [piece] * count))

    work(10)
    small, large = work(150), work(600)
    assert large <= 4.4 * small + 2000
