"""Matchers: masks, ends, rollback, replay, drafts, many rows at once, failures."""

from __future__ import annotations

from array import array
from random import Random

import pytest

from holdfast.bench.schemas import make_schema
from holdfast.engine.constraints.grammar import Grammar, Kind
from holdfast.engine.constraints.guidance import GuidanceBuilder, ParallelMatchers
from holdfast.engine.constraints.masks import MaskRows, words_for
from holdfast.engine.constraints.matcher import Fill
from holdfast.engine.constraints.toy import ToyMatcher
from tests.constraints.conftest import Open
from tests.constraints.vocabularies import END
from tests.constraints.walks import allowed_by, spell


@pytest.fixture(scope="module")
def filler() -> ParallelMatchers:
    return ParallelMatchers(threads=2)


def tokens_of(builder: GuidanceBuilder, text: str) -> list[int]:
    return builder.vocabulary.tokenizer.tokenize_str(text)


def test_the_end_is_allowed_exactly_when_the_matcher_accepts(
    open_matcher: Open, builder: GuidanceBuilder
) -> None:
    matcher = open_matcher(Kind.REGEX, "ab?")
    a, b = tokens_of(builder, "a")[0], tokens_of(builder, "b")[0]
    assert not matcher.accepting
    assert END not in allowed_by(matcher)
    assert matcher.validate([END]) == 0
    assert matcher.validate([a, END, a]) == 2
    assert matcher.accept([a])
    assert matcher.accepting and not matcher.complete
    assert END in allowed_by(matcher)
    assert matcher.accept([b])
    assert matcher.accepting and matcher.complete
    assert allowed_by(matcher) == [END]
    assert matcher.validate([END, END]) == 1
    assert matcher.accept([END])
    assert matcher.complete and matcher.accepting
    assert allowed_by(matcher) == []
    assert matcher.validate([a]) == 0
    assert matcher.forced() == []


def test_nothing_follows_the_end(open_matcher: Open, builder: GuidanceBuilder) -> None:
    matcher = open_matcher(Kind.REGEX, "a*")
    assert not matcher.accept([END, *tokens_of(builder, "a")])
    assert matcher.failed


def test_an_early_end_is_refused(open_matcher: Open, builder: GuidanceBuilder) -> None:
    matcher = open_matcher(Kind.REGEX, "ab")
    assert not matcher.accept([*tokens_of(builder, "a"), END])
    assert matcher.failed
    assert matcher.why == f"the grammar does not allow token {END}"


@pytest.mark.parametrize("token", [-1, 10**6, 1 << 40])
def test_ids_outside_the_vocabulary_are_refused(
    open_matcher: Open, builder: GuidanceBuilder, token: int
) -> None:
    matcher = open_matcher(Kind.REGEX, "a*")
    a = tokens_of(builder, "a")
    assert matcher.validate([*a, token, *a]) == 1
    assert not matcher.failed
    assert not matcher.accept([*a, token])
    assert matcher.failed


def test_padding_is_refused(open_matcher: Open, builder: GuidanceBuilder) -> None:
    matcher = open_matcher(Kind.REGEX, r"(.|\n)*")
    for token in range(builder.vocabulary.size - 13, builder.vocabulary.size):
        assert matcher.validate([token]) == 0


def test_a_failed_matcher_allows_nothing(
    open_matcher: Open, builder: GuidanceBuilder, filler: ParallelMatchers
) -> None:
    matcher = open_matcher(Kind.REGEX, "a*")
    assert not matcher.accept(tokens_of(builder, "b"))
    assert matcher.failed and not matcher.accepting and not matcher.complete
    assert allowed_by(matcher) == []
    assert matcher.forced() == []
    assert matcher.validate(tokens_of(builder, "a")) == 0
    assert not matcher.accept([])
    rows = MaskRows.allocated(1, builder.vocabulary.size)
    rows.allow(0, range(5))
    filler.fill([Fill(matcher, 0)], rows)
    assert rows.allowed(0) == []


def test_rollback_over_the_end(open_matcher: Open, builder: GuidanceBuilder) -> None:
    matcher = open_matcher(Kind.REGEX, "abc")
    assert matcher.accept([*tokens_of(builder, "a"), *tokens_of(builder, "b"), *tokens_of(builder, "c"), END])
    matcher.rollback(0)
    assert matcher.complete
    matcher.rollback(1)
    assert matcher.accepting and allowed_by(matcher) == [END]
    matcher.rollback(2)
    assert not matcher.accepting
    assert matcher.accept(tokens_of(builder, "bc"))


@pytest.mark.parametrize("seed", range(8))
def test_rollback_and_replay_equal_a_straight_run(builder: GuidanceBuilder, seed: int) -> None:
    """Cut a random answer anywhere: rolled back, replayed, or never longer, the masks are the same."""
    random = Random(seed)
    made = make_schema(random, depth=2)
    compiled = builder.compile(Grammar.of(Kind.JSON_SCHEMA, made.schema))
    tokens = [*spell(compiled.matcher(), made.text(random).encode(), random), END]
    masks, forced = [], []
    straight = compiled.matcher()
    for token in [*tokens, None]:
        masks.append(allowed_by(straight))
        forced.append(straight.forced())
        if token is not None:
            assert straight.accept([token])
    for cut in sorted({0, 1, len(tokens) - 1, *random.sample(range(len(tokens)), min(6, len(tokens)))}):
        replayed = compiled.matcher(tokens[:cut])
        assert (allowed_by(replayed), replayed.forced()) == (masks[cut], forced[cut])
        rolled = compiled.matcher(tokens)
        rolled.rollback(len(tokens) - cut)
        assert (allowed_by(rolled), rolled.forced()) == (masks[cut], forced[cut])
        assert replayed.accept(tokens[cut:]) and rolled.accept(tokens[cut:])
        assert allowed_by(replayed) == allowed_by(rolled) == masks[-1]


def test_forced_tokens_are_the_only_ones_allowed(open_matcher: Open) -> None:
    schema = {
        "type": "object",
        "properties": {name: {"type": "boolean"} for name in ("first", "second", "third")},
        "required": ["first", "second", "third"],
        "additionalProperties": False,
    }
    matcher = open_matcher(Kind.JSON_SCHEMA, schema)
    forced = matcher.forced()
    assert matcher.vocabulary.tokenizer.decode_bytes(forced).startswith(b'{"first":')
    for token in forced:
        assert allowed_by(matcher) == [token]
        assert matcher.accept([token])


def test_drafts_get_a_mask_each(
    open_matcher: Open, builder: GuidanceBuilder, filler: ParallelMatchers
) -> None:
    matcher = open_matcher(Kind.JSON_SCHEMA, {"type": "object"})
    drafts = [*tokens_of(builder, '{"a": [1, 2]}'), END]
    rows = MaskRows.allocated(len(drafts) + 2, builder.vocabulary.size)
    rows.allow(len(drafts) + 1, range(builder.vocabulary.size))
    filler.fill([Fill(matcher, 1, drafts)], rows)
    expected = open_matcher(Kind.JSON_SCHEMA, {"type": "object"})
    for index, token in enumerate(drafts):
        assert rows.allowed(1 + index) == allowed_by(expected)
        assert expected.accept([token])
    assert rows.allowed(1 + len(drafts)) == []
    assert rows.allowed(0) == []
    assert matcher.validate(drafts) == len(drafts), "the matcher has moved"


def test_masks_behind_a_refused_draft_are_zero(
    open_matcher: Open, builder: GuidanceBuilder, filler: ParallelMatchers
) -> None:
    matcher = open_matcher(Kind.REGEX, "a*")
    a, b = tokens_of(builder, "a")[0], tokens_of(builder, "b")[0]
    for drafts, count in (([a, b, a], 2), ([b], 1), ([a, 10**6], 2), ([a, END, a], 2)):
        rows = MaskRows.allocated(4, builder.vocabulary.size)
        for row in range(4):
            rows.allow(row, range(40))
        filler.fill([Fill(matcher, 0, drafts)], rows)
        filled = [bool(rows.allowed(row)) for row in range(len(drafts) + 1)]
        assert filled == [True] * count + [False] * (len(drafts) + 1 - count)
        assert not matcher.failed


def test_many_rows_at_once_equal_one_by_one(builder: GuidanceBuilder, filler: ParallelMatchers) -> None:
    random = Random(3)
    fills, expected = [], []
    rows = MaskRows.allocated(200, builder.vocabulary.size)
    row = 0
    for seed in range(24):
        made = make_schema(Random(seed % 8), depth=1)
        compiled = builder.compile(Grammar.of(Kind.JSON_SCHEMA, made.schema))
        tokens = tokens_of(builder, made.text(random))
        cut = random.randrange(len(tokens))
        drafts = tokens[cut : cut + random.choice([0, 0, 1, 4])]
        fills.append(Fill(compiled.matcher(tokens[:cut]), row, drafts))
        ends = range(cut, cut + len(drafts) + 1)
        expected += [allowed_by(compiled.matcher(tokens[:end])) for end in ends]
        row += len(drafts) + 1
    filler.fill(fills, rows)
    assert [rows.allowed(each) for each in range(row)] == expected
    plain = [Fill(fill.matcher, fill.row) for fill in fills]
    filler.fill(plain, rows)
    assert [rows.allowed(fill.row) for fill in plain] == [expected[fill.row] for fill in fills]


def test_tokens_of_many_matchers_at_once_equal_one_by_one(
    builder: GuidanceBuilder, filler: ParallelMatchers
) -> None:
    """Over random texts of schemas; a forced token has a mask of its own bit, from the second matcher too."""
    random, pairs = Random(4), []
    for seed in range(16):
        made = make_schema(Random(seed), depth=1)
        compiled = builder.compile(Grammar.of(Kind.JSON_SCHEMA, made.schema))
        tokens = [*spell(compiled.matcher(), made.text(random).encode(), random), END]
        pairs.append((compiled.matcher(), compiled.matcher(), tokens))
    forced = 0
    for place in range(max(len(tokens) for _, _, tokens in pairs)):
        going = [each for each in pairs if place < len(each[2])]
        filler.accept([(matcher, tokens[place]) for matcher, _, tokens in going])
        for matcher, alone, tokens in going:
            assert alone.accept([tokens[place]]) and not matcher.failed
            allowed = allowed_by(matcher)
            assert allowed == allowed_by(alone)
            run = alone.forced()
            assert run == matcher.forced()
            if run:
                assert allowed == run[:1]
                forced += 1
    assert all(matcher.ended and alone.ended for matcher, alone, _ in pairs)
    assert forced > 20


def test_a_token_that_is_refused_fails_its_matcher_alone(
    builder: GuidanceBuilder, filler: ParallelMatchers, open_matcher: Open
) -> None:
    fine, refusing, ended, toy = (
        open_matcher(Kind.REGEX, "ab"),
        open_matcher(Kind.REGEX, "b"),
        open_matcher(Kind.REGEX, "a*"),
        ToyMatcher(64, END, seed=5),
    )
    a = tokens_of(builder, "a")[0]
    ended.accept([END])
    filler.accept([(fine, a), (refusing, a), (ended, a), (toy, 64)])
    assert not fine.failed
    assert refusing.failed and refusing.why == f"the grammar does not allow token {a}"
    assert ended.failed and ended.why == refusing.why
    assert toy.failed
    filler.accept([(refusing, a), (fine, builder.vocabulary.size)])
    assert fine.failed and refusing.why == ended.why


def test_a_filler_serves_other_matchers_too(filler: ParallelMatchers) -> None:
    matcher = ToyMatcher(64, END, seed=5)
    drafts: list[int] = []
    straight = ToyMatcher(64, END, seed=5)
    rows = MaskRows.allocated(8, 64)
    expected = []
    for _ in range(4):
        straight.fill(rows, 7)
        expected.append(rows.allowed(7))
        drafts.append(next(token for token in rows.allowed(7) if token != END))
        straight.accept(drafts[-1:])
    refused = next(token for token in range(64) if straight.validate([token]) == 0)
    filler.fill([Fill(matcher, 0, [*drafts, refused, 0])], rows)
    assert [rows.allowed(row) for row in range(4)] == expected
    assert rows.allowed(4) and not rows.allowed(5) and not rows.allowed(6)
    assert matcher.validate(drafts) == len(drafts)


def test_fuel_that_runs_out_fails_the_turn(builder: GuidanceBuilder) -> None:
    """A grammar that compiles and is too complex later: zeros and a reason, no exception."""
    matcher = builder.compile(Grammar.of(Kind.REGEX, "(.*a.{5,2000}b){6}")).matcher()
    tokens = tokens_of(builder, "ab")
    for _ in range(3000):
        if matcher.failed or not matcher.accept(tokens):
            break
        allowed_by(matcher)
    assert matcher.failed
    assert "too complex" in matcher.why
    assert allowed_by(matcher) == []


def test_rows_over_a_buffer_of_the_caller() -> None:
    words = words_for(70)
    assert words == 3
    memory = array("I", [0xFFFFFFFF] * (2 * words))
    rows = MaskRows.over(memoryview(memory), words)
    rows.clear(1)
    rows.allow(1, [0, 33, 69])
    rows.forbid(1, [33])
    assert memory.tolist() == [0xFFFFFFFF] * 3 + [1, 0, 1 << 5]
    assert rows.allowed(1) == [0, 69]
    with pytest.raises(ValueError, match="rows"):
        MaskRows.over(memoryview(memory), 4)
