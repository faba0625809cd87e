"""What a turn says: end tokens, stop strings across tokens, whole characters, and where a cut falls."""

from holdfast.engine.sampling import Sampling
from holdfast.engine.text.stream import TurnStream
from tests.engine.tiny import END, byte_tokens, tokenizer, word


def stream(**sampling: object) -> TurnStream:
    return TurnStream(tokenizer(), Sampling(**sampling), (END,))  # type: ignore[arg-type]


def test_words_come_as_they_are_said() -> None:
    turn = stream()
    assert turn.push([word("the")]) == [word("the")]
    turn.push([word("river")])
    assert turn.pieces == [" the", " river"]
    assert turn.finish is None


def test_an_end_token_ends_and_is_no_text() -> None:
    turn = stream()
    assert turn.push([word("cold"), END, word("deep")]) == [word("cold"), END]
    assert (turn.text, turn.finish) == (" cold", "stop")
    shown = stream(skip_special_tokens=False)
    shown.push([word("cold"), END])
    assert shown.text == " cold<|end|>"


def test_end_tokens_can_be_ignored_or_added() -> None:
    turn = stream(ignore_eos=True, stop_token_ids=[word("deep")])
    turn.push([word("cold"), END, word("old")])
    assert turn.finish is None
    assert turn.push([word("deep"), word("old")]) == [word("deep")]
    assert (turn.finish, turn.text) == ("stop", " cold old")


def test_nothing_stops_before_the_least_number_of_tokens() -> None:
    turn = stream(min_tokens=2, stop=[" cold"])
    turn.push([word("cold"), END])
    assert turn.finish is None
    turn.push([word("cold")])
    assert (turn.finish, turn.text) == ("stop", " cold")


def test_a_stop_string_may_span_tokens() -> None:
    turn = stream(stop=["deep und"])
    for name in ("and", "deep"):
        turn.push([word(name)])
    assert turn.text == " and ", "what may be the beginning of a stop is held back"
    assert turn.push([word("under"), word("old")]) == [word("under")]
    assert (turn.finish, turn.text) == ("stop", " and ")
    turn.end()
    assert turn.text == " and "


def test_what_was_held_back_comes_at_the_end() -> None:
    turn = stream(stop=["deep under"])
    turn.push([word("deep")])
    assert turn.text == " "
    turn.end()
    assert turn.text == " deep"


def test_characters_are_shown_whole() -> None:
    turn = stream()
    for token in byte_tokens("né😀"):
        turn.push([token])
    assert turn.pieces == ["n", "é", "😀"]
    broken = stream()
    broken.push(byte_tokens("a😀")[:3])
    assert broken.text == "a"
    broken.end()
    assert broken.text == "a\N{REPLACEMENT CHARACTER}"


def test_a_cut_falls_between_tokens() -> None:
    turn = stream()
    turn.push([word("the"), *byte_tokens("é"), word("old")])
    assert [turn.text_of(count) for count in range(5)] == ["", " the", " the", " theé", " theé old"]
    lengths = [turn.tokens_of(characters) for characters in (0, 3, 4, 5, 6, 9)]
    assert lengths == [0, 0, 1, 3, 3, 4], "half a word or half a character is not shown"
