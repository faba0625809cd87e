"""Random schemas: valid instances are accepted in any tokenisation, and whatever the masks allow is valid."""

from __future__ import annotations

import json
from random import Random

import jsonschema_rs
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.bench.schemas import hundred, make_schema
from holdfast.engine.constraints.grammar import Grammar, Kind
from holdfast.engine.constraints.guidance import GuidanceBuilder
from tests.constraints.vocabularies import END
from tests.constraints.walks import allowed_by, spell, wander


def require_valid(schema: object, text: bytes) -> None:
    """JSON has numbers that no float holds; they are numbers all the same."""
    value = json.loads(text, parse_float=lambda digits: max(-1e300, min(1e300, float(digits))))
    jsonschema_rs.validate(schema, value)


SEEDS = st.integers(0, 1 << 32)


@given(SEEDS)
def test_the_generator_makes_valid_instances(seed: int) -> None:
    random = Random(seed)
    made = make_schema(random)
    jsonschema_rs.validate(made.schema, json.loads(made.text(random)), validate_formats=True)


@settings(max_examples=120)
@given(SEEDS)
def test_instances_are_accepted_in_any_tokenisation(builder: GuidanceBuilder, seed: int) -> None:
    random = Random(seed)
    made = make_schema(random, depth=2)
    matcher = builder.compile(Grammar.of(Kind.JSON_SCHEMA, made.schema)).matcher()
    spell(matcher, made.text(random).encode(), random)
    assert matcher.accepting
    assert matcher.accept([END])


@settings(max_examples=80)
@given(SEEDS)
def test_what_masks_allow_is_valid(builder: GuidanceBuilder, seed: int) -> None:
    random = Random(seed)
    made = make_schema(random, depth=2)
    matcher = builder.compile(Grammar.of(Kind.JSON_SCHEMA, made.schema)).matcher()
    text = wander(matcher, random)
    if text is not None:
        require_valid(made.schema, text)


def test_most_walks_end(builder: GuidanceBuilder) -> None:
    """A walk that never ends would check nothing."""
    ended = 0
    for seed in range(40):
        random = Random(seed)
        made = make_schema(random, depth=2)
        matcher = builder.compile(Grammar.of(Kind.JSON_SCHEMA, made.schema)).matcher()
        ended += wander(matcher, random) is not None
    assert ended >= 30


@settings(max_examples=80)
@given(SEEDS)
def test_the_mask_is_exactly_what_is_validated(builder: GuidanceBuilder, seed: int) -> None:
    """Every allowed token is taken. Where the next text is forced, only its canonical token is allowed."""
    random = Random(seed)
    made = make_schema(random, depth=1)
    compiled = builder.compile(Grammar.of(Kind.JSON_SCHEMA, made.schema))
    tokens = spell(compiled.matcher(), made.text(random).encode(), random)
    matcher = compiled.matcher(tokens[: random.randrange(len(tokens))])
    allowed = set(allowed_by(matcher))
    taken = {token for token in range(builder.vocabulary.size) if matcher.validate([token]) == 1}
    assert allowed <= taken
    assert allowed == taken or len(allowed) == 1


def test_smollm2_wanders_through_schemas(smollm2_builder: GuidanceBuilder) -> None:
    ended = 0
    for seed, schema in enumerate(hundred()[:24:2]):
        matcher = smollm2_builder.compile(Grammar.of(Kind.JSON_SCHEMA, schema)).matcher()
        text = wander(matcher, Random(seed), most=120)
        if text is not None:
            ended += 1
            require_valid(schema, text)
    assert ended >= 6
