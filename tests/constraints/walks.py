"""Ways through a grammar, token by token, with the masks checked on the way."""

from __future__ import annotations

from functools import cache
from random import Random

from holdfast.engine.constraints.guidance import GuidanceMatcher
from holdfast.engine.constraints.masks import MaskRows
from holdfast.engine.constraints.vocabulary import Vocabulary

CLOSERS = {b'"', b"]", b"}", b">"}


def allowed_by(matcher: GuidanceMatcher) -> list[int]:
    """The tokens of the next mask."""
    rows = MaskRows.allocated(1, matcher.vocabulary.size)
    matcher.fill(rows, 0)
    return rows.allowed(0)


@cache
def _table(vocabulary: Vocabulary) -> list[bytes]:
    return [vocabulary.tokenizer.decode_bytes([token]) for token in range(vocabulary.size)]


@cache
def _closing(vocabulary: Vocabulary) -> frozenset[int]:
    """Tokens that begin with the end of a string, a list or an object, and those that end the turn."""
    return vocabulary.end_tokens | {
        token for token, text in enumerate(_table(vocabulary)) if text[:1] in CLOSERS
    }


def bytes_of(matcher: GuidanceMatcher, token: int) -> bytes:
    return _table(matcher.vocabulary)[token]


def require_sound(matcher: GuidanceMatcher, allowed: list[int], sample: list[int]) -> None:
    """What the mask allows the matcher takes; the end is allowed exactly when it accepts; padding never."""
    ends = matcher.vocabulary.end_tokens
    assert (not ends.isdisjoint(allowed)) == matcher.accepting
    assert all(matcher.validate([token]) == 1 for token in sample)
    controls = set(matcher.vocabulary.control_tokens.values()) - ends
    assert controls.isdisjoint(allowed)
    assert all(bytes_of(matcher, token) for token in allowed), "padding is allowed"


def spell(matcher: GuidanceMatcher, text: bytes, random: Random) -> list[int]:
    """Accept a text in a random tokenisation that the masks allow."""
    tokens: list[int] = []
    ends = matcher.vocabulary.end_tokens
    while text:
        allowed = [token for token in allowed_by(matcher) if token not in ends]
        fitting = [token for token in allowed if text.startswith(bytes_of(matcher, token))]
        require_sound(matcher, allowed_by(matcher), random.sample(allowed, min(5, len(allowed))))
        assert fitting, f"no token is allowed before {text[:40]!r}"
        token = random.choice(fitting)
        assert matcher.accept([token]), matcher.why
        tokens.append(token)
        text = text[len(bytes_of(matcher, token)) :]
    return tokens


def wander(matcher: GuidanceMatcher, random: Random, most: int = 400) -> bytes | None:
    """Random tokens until the turn ends; None if it does not end in time.

    After some tokens those are preferred that close a string, a list or an object.
    """
    text = b""
    ends = matcher.vocabulary.end_tokens
    for count in range(most):
        allowed = allowed_by(matcher)
        assert allowed, f"nothing is allowed after {text!r}: {matcher.why}"
        require_sound(matcher, allowed, random.sample(allowed, min(5, len(allowed))))
        closing = sorted(_closing(matcher.vocabulary).intersection(allowed))
        token = random.choice(closing if closing and count > 20 else allowed)
        assert matcher.accept([token]), matcher.why
        if token in ends:
            return text
        text += bytes_of(matcher, token)
    return None
