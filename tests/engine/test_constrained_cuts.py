"""A constrained turn says the same whatever happens to it: cut, rewound, forked, retracted, restarted.

Random schemas and random cuts. The reference is one uninterrupted turn with the same seed. A matcher that
missed a token, or saw one twice, allows other tokens: the difference shows.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from holdfast.core.turn import Ending, TurnEvent
from holdfast.engine.constraints.grammar import Grammar, Kind
from holdfast.engine.engine import Engine, Session, Turn
from holdfast.engine.sampling import Sampling
from tests.engine.conftest import Make
from tests.engine.tiny import WORDS, tiny_engine, word

TOKENS = 48
PROMPT = [word(WORDS[place % len(WORDS)]) for place in range(19)]
SHAPES = range(3)
MORE_SHAPES = [pytest.param(number, marks=pytest.mark.soak) for number in range(3, 24)]


def schema(random: Random, depth: int = 0) -> dict[str, Any]:
    """A random schema of bounded texts, so that most turns come to an end."""
    kinds = ["object", "enum", "integer", "string", "array", "boolean"]
    kind = "object" if depth == 0 else random.choice(kinds if depth < 2 else kinds[1:])
    if kind == "object":
        names = random.sample(["name", "river", "depth", "stones", "old"], random.randint(1, 3))
        inner = {name: schema(random, depth + 1) for name in names}
        return {"type": "object", "properties": inner, "required": names, "additionalProperties": False}
    if kind == "enum":
        return {"enum": random.sample(["the river", "cold", "deep", 7, None, "under stones"], 3)}
    if kind == "string":
        return {"type": "string", "maxLength": random.randint(1, 6)}
    if kind == "array":
        items = schema(random, depth + 1)
        return {"type": "array", "items": items, "minItems": 1, "maxItems": random.randint(1, 3)}
    return {"type": kind}


def sampling(seed: int, **more: object) -> Sampling:
    return Sampling(max_tokens=TOKENS, temperature=1.0, seed=seed, **more)  # type: ignore[arg-type]


def say(session: Session, grammar: Grammar, seed: int, **more: object) -> Turn:
    return session.say(PROMPT, sampling(seed, **more), grammar=grammar)


def reference(engine: Engine, grammar: Grammar, seed: int) -> list[int]:
    with engine.session() as session:
        turn = say(session, grammar, seed)
        tokens, text = turn.token_ids, turn.text
        assert turn.finish_reason in ("stop", "length")
        if turn.finish_reason == "stop":
            json.loads(text)
    assert tokens
    return tokens


def reference_of(make: Make, number: int) -> list[int]:
    _, grammar, seed = case(number)
    return reference(make(), grammar, seed)


def case(number: int) -> tuple[Random, Grammar, int]:
    random = Random(number)
    return random, Grammar.of(Kind.JSON_SCHEMA, schema(random)), random.randrange(1 << 30)


def drive(engine: Engine, turn: Turn, tokens: int) -> None:
    """Drive until a turn has so many tokens, or is over."""
    while not turn.done and len(turn._stream.tokens) < tokens:
        engine.drive()


def retract(engine: Engine, turn: Turn) -> None:
    """Take a running turn back to the queue, as a lack of memory does."""
    session = engine.loop.scheduler.registry.sessions[turn._turn.session_id]
    core = session.turn
    if core is None or core.ending is not None or session not in engine.loop.scheduler.registry.running:
        return
    core.ending = Ending(TurnEvent.RETRACT, "the test takes it back")
    if not session.unsettled:
        engine.loop.scheduler.settler.end(session)


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("number", [*SHAPES, *MORE_SHAPES])
def test_cuts_change_no_token(make_any: Make, number: int, overlap: bool) -> None:
    random, grammar, seed = case(number)
    expected = make_any.once(reference_of, number)
    engine = make_any(overlap=overlap)
    session = engine.session(id="s")
    for cut in ("interrupt", "keep", "rewind", "fork", "retract"):
        place = random.randrange(len(expected))
        turn = say(session, grammar, seed)
        drive(engine, turn, place)
        if cut == "retract":
            drive(engine, turn, 1)
            ends = turn.done
            retract(engine, turn)
            assert turn.token_ids == expected, cut
            assert ends or turn._turn.retracts == 1
        elif cut == "fork":
            assert turn.token_ids == expected
            with session.fork() as child:
                child.rewind(0)
                assert say(child, grammar, seed).token_ids == expected, cut
        elif cut == "rewind":
            turn.wait()
        elif cut == "keep" and not turn.done:
            kept = min(place, turn._turn.generated)
            session.interrupt(keep=kept)
            assert turn.token_ids == expected[:kept], cut
        elif not turn.done:
            session.interrupt()
            said = turn.token_ids
            assert said == expected[: len(said)], cut
        session.rewind(0)
    assert say(session, grammar, seed).token_ids == expected
    session.close()


WAYS: tuple[dict[str, object], ...] = (
    {"overlap": True},
    {"speculate": "ngram"},
    {"speculate": "ngram", "overlap": True},
)


@pytest.mark.parametrize(
    ("number", "way"),
    [
        pytest.param(number, way, marks=() if number == way else pytest.mark.soak)
        for number in SHAPES
        for way in range(len(WAYS))
    ],
)
def test_other_ways_to_make_the_steps_change_no_token(make_any: Make, number: int, way: int) -> None:
    """One token at a time (log-probabilities), with drafts, with overlap, and beside other turns."""
    _, grammar, seed = case(100 + number)
    expected = make_any.once(reference_of, 100 + number)
    engine = make_any(**WAYS[way])
    crowd = engine.session().say(PROMPT[:7], Sampling(max_tokens=TOKENS, seed=1, ignore_eos=True))
    one, two = engine.session(), engine.session()
    slow = say(two, grammar, seed, logprobs=0)
    assert say(one, grammar, seed).token_ids == expected
    assert slow.token_ids == expected and len(slow.logprobs) == len(expected)
    crowd.wait()


def test_forced_tokens_take_no_steps_of_their_own(make: Make) -> None:
    names = ["first name", "last name", "river name", "stone count"]
    form = {
        "type": "object",
        "properties": {name: {"type": "boolean"} for name in names},
        "required": names,
        "additionalProperties": False,
    }
    engine = make()
    turn = engine.session().say(PROMPT, Sampling(max_tokens=400, seed=3), grammar=form)
    before = engine.loop.scheduler.registry.ledger.step
    assert set(json.loads(turn.text)) == set(names)
    steps = engine.loop.scheduler.registry.ledger.step - before
    assert steps <= 0.4 * len(turn.token_ids)


@pytest.mark.parametrize("family", ["llama", "bamba", "mistral"])
def test_a_restart_changes_no_token(directories: dict[str, Path], tmp_path: Path, family: str) -> None:
    random, grammar, seed = case(200)
    journal = {"journal": str(tmp_path / "journal")}
    with tiny_engine(directories[family], **journal) as engine:
        expected = reference(engine, grammar, seed)
        session = engine.session(id="s")
        turn = say(session, grammar, seed)
        kept = random.randrange(len(expected))
        turn.wait()
        session.interrupt(keep=kept)
        abandoned = engine.session(id="abandoned")
        drive(engine, say(abandoned, grammar, seed), 3)
    with tiny_engine(directories[family], **journal) as engine:
        assert sorted(engine.sessions()) == ["abandoned", "s"]
        assert engine.known_tokens("s") == len(PROMPT) + kept and engine.known_tokens("abandoned") == 0
        assert say(engine.resume("abandoned"), grammar, seed).token_ids == expected
        session = engine.resume("s")
        session.rewind(0)
        assert say(session, grammar, seed).token_ids == expected


def test_a_thinking_budget_is_the_same_in_every_way(make: Make) -> None:
    """A turn whose reasoning is cut short by its budget, with and without overlap and retraction."""
    said: list[list[int]] = []
    for options in ({}, {"overlap": True}, {"speculate": "ngram"}):
        engine = make(reasoning_parser="think", **options)
        opened = [*PROMPT, *engine.loop.setup.tokenizer.encode("<think>", add_special_tokens=False)]
        turn = engine.session().say(
            opened, Sampling(max_tokens=40, seed=5, ignore_eos=True), thinking_tokens=9
        )
        drive(engine, turn, 5)
        retract(engine, turn)
        said.append(turn.token_ids)
        assert turn.answer.reasoning_tokens >= 9 and len(turn.token_ids) == 40
        marker = engine.loop.setup.tokenizer.encode("</think>", add_special_tokens=False)
        assert turn.token_ids[9 : 9 + len(marker)] == marker
    assert said[0] == said[1] == said[2]
