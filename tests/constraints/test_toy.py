"""The toy matcher keeps the protocol, and its state tells lost and doubled tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.engine.constraints.masks import MaskRows
from holdfast.engine.constraints.toy import ToyCompiled, ToyMatcher

VOCABULARY, END = 50, 7


def allowed_by(matcher: ToyMatcher) -> list[int]:
    rows = MaskRows.allocated(1, VOCABULARY)
    matcher.fill(rows, 0)
    return rows.allowed(0)


def walk(seed: int, choices: list[int]) -> list[int]:
    """Tokens of a turn that takes the allowed token that each choice points at; it goes on past ends."""
    matcher = ToyMatcher(VOCABULARY, END, seed)
    tokens: list[int] = []
    for choice in choices:
        allowed = [token for token in allowed_by(matcher) if token != END]
        tokens.append(allowed[choice % len(allowed)])
        assert matcher.accept(tokens[-1:])
    return tokens


CHOICES = st.lists(st.integers(0, 1000), min_size=1, max_size=30)


@given(st.integers(0, 1 << 40), CHOICES, st.data())
def test_masks_validation_and_acceptance_agree(seed: int, choices: list[int], data: st.DataObject) -> None:
    tokens = walk(seed, choices)
    cut = data.draw(st.integers(0, len(tokens)))
    compiled = ToyCompiled(VOCABULARY, END, seed)
    matcher = compiled.matcher(tokens[:cut])
    allowed = allowed_by(matcher)
    assert (END in allowed) == matcher.accepting
    assert [token for token in range(-1, VOCABULARY + 2) if matcher.validate([token])] == allowed
    assert matcher.validate([*tokens[cut:], -1]) == len(tokens) - cut
    if forced := matcher.forced():
        assert allowed == forced
    straight = compiled.matcher(tokens)
    straight.rollback(len(tokens) - cut)
    assert allowed_by(straight) == allowed


@given(st.integers(0, 1 << 40), st.lists(st.integers(0, 1000), min_size=12, max_size=30), st.data())
def test_a_lost_or_doubled_token_shows(seed: int, choices: list[int], data: st.DataObject) -> None:
    tokens = walk(seed, choices)
    at = data.draw(st.integers(0, len(tokens) - 12))
    right = ToyMatcher(VOCABULARY, END, seed)
    right.accept(tokens)
    for wrong in (tokens[:at] + tokens[at + 1 :], tokens[: at + 1] + tokens[at:]):
        matcher = ToyMatcher(VOCABULARY, END, seed)
        assert not matcher.accept(wrong) or matcher._states[-1] != right._states[-1]


def test_ends() -> None:
    matcher = ToyMatcher(VOCABULARY, END)
    assert matcher.accepting and not matcher.complete
    assert matcher.accept([END])
    assert matcher.complete and matcher.forced() == [] and allowed_by(matcher) == []
    matcher.rollback(1)
    assert not matcher.complete
    assert not matcher.accept([END, 3])
    assert matcher.failed and "token 3" in matcher.why and not matcher.accept([])
    assert allowed_by(matcher) == []
