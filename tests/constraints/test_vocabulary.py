"""The bytes of tokens are right, forced tokens are those of our encoder, and control tokens are not text."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from holdfast.engine.constraints.errors import Fault, GrammarError
from holdfast.engine.constraints.grammar import Grammar, Kind
from holdfast.engine.constraints.guidance import GuidanceBuilder, ParallelMatchers
from holdfast.engine.constraints.masks import MaskRows
from holdfast.engine.constraints.matcher import Fill
from holdfast.engine.constraints.vocabulary import Vocabulary, control_tokens
from holdfast.engine.text.tokenizer import Tokenizer
from tests.constraints.vocabularies import END, KINDS, PADDING, TEXTS, small_tokenizer
from tests.constraints.walks import allowed_by

CHARACTERS = 'hello world 123 naïve 日本 😀\n\t"{}[]:,<>|s/'


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def some_tokenizer(kind: str) -> Tokenizer:
    return small_tokenizer(kind)


@pytest.fixture(scope="module")
def vocabulary(some_tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(some_tokenizer, size=some_tokenizer.vocabulary_size + PADDING, end_tokens=[END])


def random_texts(count: int) -> list[str]:
    draw = random.Random(7)
    made = ["".join(draw.choice(CHARACTERS) for _ in range(draw.randrange(1, 30))) for _ in range(count)]
    return [*TEXTS[:2], *TEXTS[3:], *made]


def test_bytes_of_tokens_are_those_of_the_text(some_tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    for text in random_texts(60):
        tokens = some_tokenizer.encode(text, add_special_tokens=False)
        spelled = vocabulary.tokenizer.decode_bytes(tokens)
        # Vocabularies of pieces put a space before a text.
        assert spelled in (text.encode(), b" " + text.encode())


def test_forced_tokens_are_our_encoders(kind: str, some_tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    builder = GuidanceBuilder(vocabulary)
    prefixed = (
        some_tokenizer.encode("a", add_special_tokens=False)
        != some_tokenizer.encode(" a", add_special_tokens=False)
        and vocabulary.tokenizer.decode_bytes(some_tokenizer.encode("a", add_special_tokens=False)) == b" a"
    )
    for text in random_texts(25):
        # A text that begins with a space is written the same way wherever it stands.
        shown = " " + text if prefixed else text
        expected = some_tokenizer.encode(text, add_special_tokens=False)
        compiled = builder.compile(Grammar.of(Kind.CHOICE, [shown]))
        assert compiled.matcher().forced() == expected, (kind, text)


def test_control_tokens_are_special_and_nothing_else_is(
    some_tokenizer: Tokenizer, vocabulary: Vocabulary
) -> None:
    controls = set(control_tokens(some_tokenizer).values())
    assert controls == {0, 1, 2, some_tokenizer.token_of("<tool>")}
    for token in range(some_tokenizer.vocabulary_size):
        spelled_ff = vocabulary.tokenizer.decode_bytes([token]) in (b"\xff", b"")
        assert vocabulary.tokenizer.is_special_token(token) == (token in controls or spelled_ff)


@pytest.mark.parametrize("name", ["<|end|>", "<tool>", "<s>"])
def test_the_name_of_a_control_token_is_ordinary_text(
    name: str, some_tokenizer: Tokenizer, vocabulary: Vocabulary
) -> None:
    builder = GuidanceBuilder(vocabulary)
    for grammar in (Grammar.of(Kind.CHOICE, [name]), Grammar.of(Kind.JSON_SCHEMA, {"const": name})):
        matcher = builder.compile(grammar).matcher()
        tokens = matcher.forced()
        assert set(tokens).isdisjoint(vocabulary.control_tokens.values())
        assert vocabulary.tokenizer.decode_bytes(tokens).strip(b'"') in name.encode()
        assert matcher.accept(tokens)


def test_free_text_allows_everything_but_control_tokens_and_padding(
    some_tokenizer: Tokenizer, vocabulary: Vocabulary
) -> None:
    matcher = GuidanceBuilder(vocabulary).compile(Grammar.of(Kind.REGEX, r"(.|\n)*")).matcher()
    allowed = set(allowed_by(matcher))
    controls = set(vocabulary.control_tokens.values())
    assert allowed & controls == {END}
    assert max(allowed) < some_tokenizer.vocabulary_size
    assert some_tokenizer.token_of("plain added") in allowed


def test_smollm2_bytes_equal_ours(smollm2: Tokenizer, smollm2_builder: GuidanceBuilder) -> None:
    read = smollm2_builder.vocabulary.tokenizer
    controls = smollm2.special_tokens
    for token in range(smollm2.vocabulary_size):
        if token not in controls:
            assert read.decode_bytes([token]) == smollm2.token_bytes(token)


def test_several_end_tokens(tokenizer: Tokenizer) -> None:
    size = tokenizer.vocabulary_size
    builder = GuidanceBuilder(Vocabulary(tokenizer, size=size, end_tokens=[END, 2]))
    compiled = builder.compile(Grammar.of(Kind.CHOICE, ["ab", "a"]))
    for end in (END, 2):
        matcher = compiled.matcher(tokenizer.encode("a"))
        assert {END, 2} <= set(allowed_by(matcher))
        assert matcher.validate([end]) == 1
        assert matcher.accept([end])
        assert matcher.complete


def test_an_end_token_that_is_text_ends_only_where_the_matcher_accepts(tokenizer: Tokenizer) -> None:
    end = tokenizer.encode("b")[0]
    vocabulary = Vocabulary(tokenizer, size=tokenizer.vocabulary_size, end_tokens=[end])
    matcher = GuidanceBuilder(vocabulary).compile(Grammar.of(Kind.REGEX, "[ab]{2}")).matcher()
    assert end not in allowed_by(matcher)
    assert matcher.accept(tokenizer.encode("aa"))
    assert end in allowed_by(matcher)
    assert matcher.accept([end])
    drafted = GuidanceBuilder(vocabulary).compile(Grammar.of(Kind.REGEX, "[ab]{2}")).matcher()
    rows = MaskRows.allocated(3, vocabulary.size)
    a = tokenizer.encode("a")[0]
    ParallelMatchers(threads=1).fill([Fill(drafted, 0, [a, a])], rows)
    assert [end in rows.allowed(row) for row in range(3)] == [False, False, True]


def test_a_model_without_an_end_token_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(GrammarError, match="end-of-turn") as caught:
        Vocabulary(tokenizer, size=tokenizer.vocabulary_size, end_tokens=[])
    assert caught.value.fault is Fault.UNAVAILABLE


def test_identity_tells_sizes_and_ends_apart(tokenizer: Tokenizer) -> None:
    size = tokenizer.vocabulary_size
    made = [
        Vocabulary(tokenizer, size=each, end_tokens=ends)
        for each, ends in ((size, [END]), (size + 1, [END]), (size, [END, 2]), (size, [END]))
    ]
    assert made[0].identity == made[3].identity
    assert len({each.identity for each in made}) == 3


def test_nothing_imports_llguidance_before_it_is_needed() -> None:
    """Machines without it run turns without constraints."""
    code = "import sys, holdfast.engine.constraints.guidance; sys.exit('llguidance' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_llguidance_constraints_are_unavailable(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    monkeypatch.setattr("holdfast.engine.constraints.vocabulary.find_spec", lambda name: None)
    with pytest.raises(GrammarError, match="llguidance") as caught:
        Vocabulary(tokenizer, size=tokenizer.vocabulary_size, end_tokens=[END])
    assert caught.value.fault is Fault.UNAVAILABLE
